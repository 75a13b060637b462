"""The drop table: what steered users cost agents in tau-trait, beside the noise floor.

Serves the user's model and plays `traitbasis bench tau-trait` with two scripted agents: the patient oracle, which is
the noise floor, and one that asks each thing once, a brittle agent; and, where a URL is given, a model as the agent.
`traitbasis report` then makes the figures. Goes on where it was.

    python experiments/drop_table.py                     # embedded model, 2 cores: 20 minutes
    python experiments/drop_table.py --model ./Llama-3.1-8B-Instruct --tasks 0-119 --trials 3 \\
        --agent-url https://api.openai.com/v1 --agent-model gpt-4.1      # one GPU, and the agent's bill
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from baselines.serve import served
from paper_table import HERE, run

from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import TraitBasisError
from traitbasis.pairs import PAPER_TRAITS


def main(
    model: Annotated[str, typer.Option(help="The customer's model.")] = DEFAULT_MODEL,
    basis: Annotated[Path | None, typer.Option(help="By default the model's own.")] = None,
    traits: Annotated[str, typer.Option(help="With commas.")] = ",".join(PAPER_TRAITS),
    domains: Annotated[str, typer.Option(help="With commas.")] = "retail,airline",
    tasks: Annotated[str, typer.Option(help="Of each domain.")] = "0-7",
    trials: Annotated[int, typer.Option(min=1)] = 1,
    agent_url: Annotated[str, typer.Option(help="OpenAI-compatible URL of a model that plays the agent.")] = "",
    agent_model: Annotated[str, typer.Option(help="The agent's model there.")] = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at the same time.")] = 8,
    serve_options: Annotated[str, typer.Option(help="More for traitbasis serve.")] = "--dtype bfloat16",
    seed: Annotated[int, typer.Option()] = 0,
    folder: Annotated[Path, typer.Option(help="Where the runs lie.")] = HERE / "results" / "drop_table",
    name: Annotated[str, typer.Option(help="Of the results beside it.")] = "drop_table",
) -> None:
    agents = {"oracle": ["--agent", "oracle"], "brittle": ["--agent", "oracle", "--patience", "1"]}
    if agent_url:
        agents["model"] = ["--agent-url", agent_url, "--agent-model", agent_model]
    traitbasis, target = [sys.executable, "-m", "traitbasis.cli"], HERE / "results" / name
    conditions = [{trait: "medium"} for trait in traits.split(",")]
    with served("steered", folder, conditions, model=model, basis=basis, options=serve_options.split()) as endpoints:
        url = next(endpoints).url.removesuffix("/v1")
        for agent, options in agents.items():
            print(f"playing {agent}", flush=True)
            run(
                [*traitbasis, "bench", "tau-trait", *options, "--user-url", url, "--traits", traits,
                 "--domains", domains, "--tasks", tasks, "--trials", str(trials), "--seed", str(seed),
                 "--concurrency", str(concurrency), "--out", str(folder / f"{agent}.jsonl")],
                folder / f"{agent}.log",
            )  # fmt: skip
    runs = [str(folder / f"{agent}.jsonl") for agent in agents if agent != "oracle"]
    floor = ["--floor", str(folder / "oracle.jsonl")]
    out = ["--json", f"{target}.json", "--html", str(folder / "report.html"), "--markdown"]
    run([*traitbasis, "report", *runs, *floor, *out], folder / "report.log")
    print((folder / "report.log").read_text(encoding="utf-8"))


if __name__ == "__main__":
    try:
        typer.run(main)
    except TraitBasisError as error:
        sys.exit(f"error: {error}")
