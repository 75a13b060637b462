"""How many samples does tuning need to show what four pairs show by steering? (The paper: 13,000 against 4.)

SFT and LoRA are trained at each size on the training set of ``experiments/baselines`` (the hand-written responses of
the four pairs that make each vector, with other names and numbers filled in), served, and asked about the same tasks
as the steered user, whose vectors have seen the four pairs as they stand. Fidelity is `traitbasis eval fidelity`'s.

Sizes are samples of all traits for SFT (traits and neutral ones in turn), and of its own trait for an adapter.

    python experiments/data_efficiency.py                           # embedded model, 2 cores: about an hour
    python experiments/data_efficiency.py --sizes 4,64,1000,13000   # a GPU
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from common import table, versions, write_json
from paper_table import HERE, Collection, hold, run, shown, train

from traitbasis.collect import read_conditions
from traitbasis.dialogue_tasks import read_tasks
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import EvaluationError, TraitBasisError
from traitbasis.files import write_whole
from traitbasis.pairs import PAPER_TRAITS


def main(
    model: Annotated[str, typer.Option(help="The customer's model.")] = DEFAULT_MODEL,
    sizes: Annotated[str, typer.Option(help="Samples, with commas.")] = "4,16,64",
    traits: Annotated[str, typer.Option(help="With commas.")] = ",".join(PAPER_TRAITS),
    tasks: Annotated[int, typer.Option(min=2, help="How many of the shipped tasks.")] = 6,
    turns: Annotated[int, typer.Option(min=1, help="Customer turns of a dialogue.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest customer turn.")] = 48,
    seed: Annotated[int, typer.Option(help="Of seeds and random directions.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Of each training, and (times jobs) of serving and reading.")] = 1,
    serve_options: Annotated[str, typer.Option(help="More for traitbasis serve.")] = "--dtype bfloat16",
    concurrency: Annotated[int, typer.Option(min=1, help="Dialogues held at the same time.")] = 24,
    folder: Annotated[Path, typer.Option(help="Where the work lies.")] = HERE / "results" / "data_efficiency",
    out_file: Annotated[Path, typer.Option("--out")] = HERE / "results" / "data_efficiency.json",
) -> None:
    names, counts = traits.split(","), [int(size) for size in sizes.split(",")]
    settings = {"model": model, "traits": names, "tasks": tasks, "turns": turns, "max_tokens": max_tokens, "seed": seed}
    keep = folder / "settings.json"
    if keep.is_file() and json.loads(keep.read_text()) != settings:
        raise EvaluationError(f"{folder} holds a run with other settings ({keep}); delete it, or take another --folder")
    write_whole(keep, json.dumps(settings, indent=1))
    every, known = (
        [Collection("whole", ("steered", "prompted", "sft", "lora"), read_conditions(names, ["medium"]), turns)],
        read_tasks(),
    )
    serving: dict[str, Any] = {
        "trials": 1, "seed": seed, "max_tokens": max_tokens, "concurrency": concurrency, "model": model,
        "options": (*serve_options.split(), "--threads", str(threads * jobs)),
    }  # fmt: skip
    found: dict[tuple[str, int], dict[str, Any]] = {}
    trainings: dict[str, Any] = {}
    for size in (0, *counts):  # 0: those that are not trained
        here = folder / str(size)
        if size:
            train(here, model, names, size, size, threads, jobs)
            records = sorted((here / "models").rglob("train.json"))
            trainings |= {f"{size}/{path.parent.name}": _losses(path) for path in records}
        for method in ("sft", "lora") if size else ("steered", "prompted"):
            files = hold(method, every, known, known[:tasks], here / "dialogues", **serving)
            found[method, size] = _fidelity(here, method, files, model, names, threads * jobs)
            print(f"{method}, {size} samples: {shown(found[method, size]['of_traits'])}", flush=True)
    rows = [{"method": method, "samples": size or None, **row} for (method, size), row in found.items()]
    made_by = {"command": "python experiments/data_efficiency.py", "settings": settings, "versions": versions()}
    content = {"made_by": made_by, "rows": rows, "trainings": trainings}
    write_json(out_file, content)
    header = ["method", "samples", "fidelity", "first turn", "held-out loss before", "after"]
    print(table(header, [_line(row, trainings) for row in rows]))
    print(f"\nchance: {rows[0]['chance']:.2f}")


def _fidelity(
    folder: Path, method: str, files: list[Path], model: str, traits: list[str], threads: int
) -> dict[str, Any]:
    result = folder / f"{method}.json"
    if not result.is_file():
        command = [sys.executable, "-m", "traitbasis.cli", "eval", "fidelity", *map(str, files), "--model", model,
                   "--dtype", "bfloat16", "--threads", str(threads), "--traits", ",".join(traits),
                   "--cache", str(folder.parent / "scores.jsonl"), "--out", str(result)]  # fmt: skip
        run(command, folder / f"{method}.log")
    (row,) = json.loads(result.read_text(encoding="utf-8"))["rows"]
    return {of: row[of] for of in ("of_traits", "by_trait", "by_turn", "confusion", "chance")}


def _losses(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    return {of: record[of] for of in ("settings", "steps", "losses", "heldout_loss", "data", "base")}


def _line(row: dict[str, Any], trainings: dict[str, Any]) -> list[str]:
    own = {name: one for name, one in trainings.items() if name.startswith(f"{row['samples']}/")}
    mine = [one["heldout_loss"] for name, one in own.items() if name.endswith("/sft") == (row["method"] == "sft")]
    losses = [f"{sum(one[of] for one in mine) / len(mine):.2f}" if mine else "-" for of in ("before", "after")]
    samples = "4 pairs a trait" if row["method"] == "steered" else row["samples"] or "-"
    return [row["method"], str(samples), shown(row["of_traits"]), shown(row["by_turn"][0]), *losses]


if __name__ == "__main__":
    try:
        typer.run(main)
    except TraitBasisError as error:
        sys.exit(f"error: {error}")
