"""Draw what ``traitbasis bench engine --out FILE`` wrote: python experiments/bench/plot.py FILE… --out figure.png

Needs matplotlib: pip install 'traitbasis[plots]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("bench.png"))
    options = parser.parse_args()
    figure, (speed, price, first) = pyplot.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    for file in options.files:
        found = json.loads(file.read_text())
        label = found["made_with"]["dtype"]
        if throughput := found.get("throughput"):
            users = [int(count) for count in throughput["tokens_per_second"]]
            line = speed.plot(users, list(throughput["tokens_per_second"].values()), "o-", label=label)
            one = throughput["tokens_per_second"][str(users[0])] / throughput["share_of_roofline"][str(users[0])]
            speed.plot(users, [one * count for count in users], ":", color=line[0].get_color(), alpha=0.6)
        for count, costs in found.get("steering", {}).items():
            for place, (name, cost) in enumerate(costs.items()):
                ratio, x = cost["cpu"], f"{count} / {name}\n{label}"
                error = [[ratio["value"] - ratio["low"]], [ratio["high"] - ratio["value"]]]
                price.errorbar([x], [ratio["value"]], yerror=error, fmt="o", color=f"C{place}")
        if talk := found.get("conversation"):
            for name, style in (("cached", "o-"), ("uncached", "x--")):
                turns = range(1, len(talk["prompt_tokens"]) + 1)
                first.plot(turns, talk["first_token_over_turn_1"][name], style, label=f"{label}, {name}")
    speed.set(xscale="log", yscale="log", xlabel="users", ylabel="tokens per second", title="Throughput")
    speed.plot([], [], ":", color="gray", label="weights read once a step")
    price.axhline(0.97, color="gray", linewidth=0.8)
    price.set(ylabel="unsteered / steered CPU time", title="Price of steering, by users / layers")
    price.tick_params(axis="x", rotation=90, labelsize=7)
    first.set(
        xlabel="turn", ylabel="against turn 1", title="Time to first token, prefix cache on and off", yscale="log"
    )
    for axes in (speed, first):
        axes.legend(fontsize=8)
    figure.savefig(options.out, dpi=110)
    print("saved:", options.out)


if __name__ == "__main__":
    main()
