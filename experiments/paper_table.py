"""The paper's table of four dimensions, and what it leaves out: every method, every metric, one command.

Source: "Impatient Users Confuse AI Agents" (TraitBasis, arXiv 2510.04491), table of realism, fidelity, long-range
consistency and composability. The methods are ``experiments/baselines``; what each figure is, is in docs/evaluation.md.
All methods are served by `traitbasis serve` and asked by `traitbasis eval collect`'s code, with the same tasks, agent,
seeds and prompt; the instruments are the model-free ones, so the figures are not comparable with the paper's, which are
people's votes.

It trains SFT and LoRA on the same model, holds three sets of dialogues with each method (whole ones; short ones at low
and high, for the order of levels; and whole ones with every position steered, the paper's plain form), measures them
with the `traitbasis eval` commands, and writes one file. Killed, it goes on where it was.

    python experiments/paper_table.py                   # embedded model, 2 cores: 45 minutes
    python experiments/paper_table.py --model ./Llama-3.1-8B-Instruct --tasks 12 --trials 3 --train-samples 13000 \\
        --serve-options "--dtype bfloat16" --jobs 1      # one GPU
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from baselines.serve import METHODS, Method, served
from common import table, versions, write_json
from rich.console import Console

from traitbasis.collect import Condition, Customer, ScriptedAgent, collect, open_dialogues, read_conditions
from traitbasis.dialogue_tasks import DialogueTask, read_tasks
from traitbasis.dialogues import spec_of
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import EvaluationError
from traitbasis.files import write_whole
from traitbasis.metrics.estimate import Estimate
from traitbasis.pairs import PAPER_TRAITS
from traitbasis.remote import RemoteModel

HERE = Path(__file__).resolve().parent
MIXES = ("impatience+skeptical", "confusion+incoherence")
COMMANDS = ("fidelity", "composability", "consistency", "realism", "conduct")
out = Console()


@dataclass(frozen=True)
class Collection:
    """One kind of dialogues, held with every method that it is for. turns: of the customer, at most."""

    name: str
    methods: tuple[Method, ...]
    conditions: list[Condition]
    turns: int
    positions: str = "generated"

    def of(self, method: Method) -> list[Condition]:
        """Of an unsteered user there is one condition, whatever is asked for."""
        if method == "unsteered":
            return [traits for traits in self.conditions if not traits]
        return self.conditions


def collections(traits: Sequence[str], mixes: Sequence[str], turns: int) -> list[Collection]:
    """Whole dialogues, short ones at the other levels, and whole ones without a clean past."""
    return [
        Collection("whole", METHODS, read_conditions(traits, ["medium"], mixes, neutral=True), turns),
        Collection("levels", METHODS[1:], read_conditions(traits, ["low", "high"]), 3),
        Collection("all-positions", ("steered",), read_conditions(traits, ["medium"]), turns, "all"),
    ]


def hold(
    method: Method,
    every: Sequence[Collection],
    tasks: Sequence[DialogueTask],
    chosen: Sequence[DialogueTask],
    folder: Path,
    *,
    trials: int,
    seed: int,
    max_tokens: int,
    concurrency: int,
    **serving: Any,
) -> list[Path]:
    """All of a method's dialogues; their files. The server runs while there is something to ask."""
    mine = [(one, one.of(method)) for one in every if method in one.methods and one.of(method)]
    conditions = list({spec_of(traits): traits for _, some in mine for traits in some}.values())
    files = {(one.name, spec_of(traits)): _file(folder, method, one, traits) for one, some in mine for traits in some}
    wanted = sorted(set(files.values()))
    finished = folder / f"{method}.done"
    if finished.is_file():
        return wanted
    with served(method, folder.parent / "models", conditions, seed=seed, **serving) as endpoints:
        for endpoint in endpoints:
            here = {spec_of(traits) for traits in endpoint.conditions}
            for one, some in mine:
                asked = [traits for traits in some if spec_of(traits) in here]
                for path in sorted({files[one.name, spec_of(traits)] for traits in asked}):
                    customer = Customer(
                        method,
                        RemoteModel(endpoint.url, None, what="the user endpoint", error=EvaluationError, extra="eval"),
                        endpoint.model_template,
                        one.positions,
                        seed=seed,
                        sampling={"max_tokens": max_tokens},
                    )
                    agent = ScriptedAgent()
                    file = open_dialogues(path, customer, tasks, asked, agent=agent, turns=one.turns)
                    collect(file, customer, chosen, asked, agent=agent, trials=trials, concurrency=concurrency)
    write_whole(finished, "")
    return wanted


def _file(folder: Path, method: Method, one: Collection, traits: Condition) -> Path:
    """A file for each model that is served: merged adapters are another model for every condition."""
    name = f".{spec_of(traits) or 'neutral'}" if method == "lora" else ""
    return folder / one.name / f"{method}{name}.jsonl"


def train(
    folder: Path, model: str, traits: Sequence[str], samples: int, adapter_samples: int, threads: int, jobs: int
) -> None:
    """SFT and LoRA by the commands of ``experiments.baselines``; what is trained already is left."""
    baselines = [sys.executable, "-m", "experiments.baselines"]
    names, home = ",".join(traits), folder / "models"
    data = home / "data.jsonl"
    # Of an adapter's trait there have to be enough, and some that are held out.
    lines = max(samples + 32, (adapter_samples + 12) * len(traits) * 2)
    where = ["--model", model, "--data", str(data), "--folder", str(home), "--threads", str(threads)]
    if not data.is_file():
        run([*baselines, "data", "--source", "pairs", "--samples", str(lines), "--traits", names,
              "--prompt", "dialogue", "--out", str(data)], folder / "data.log")  # fmt: skip
    tuning = {
        "sft": [*baselines, "sft", "--samples", str(samples), *where],
        "lora": [*baselines, "lora", "--samples", str(adapter_samples), "--traits", names, *where],
    }
    with ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(run, command, folder / f"{name}.log", **_KEEP_MEMORY) for name, command in tuning.items()
        ]
        for done in running:
            done.result()


def measure(folder: Path, model: str, traits: Sequence[str], threads: int) -> dict[str, Any]:
    """Every `traitbasis eval` command over all dialogues, as its file; commands that are done are left."""
    whole, levels, plain = (sorted((folder / "dialogues" / name).glob("*.jsonl")) for name in _SETS)
    reading = ["--model", model, "--dtype", "bfloat16", "--threads", str(threads), "--traits", ",".join(traits)]
    scores, states = folder / "scores.jsonl", folder / "states.jsonl"
    wanted: dict[str, list[str]] = {
        "fidelity": [*map(str, [*whole, *levels]), *reading, "--cache", str(scores)],
        "composability": [*map(str, whole), *reading, "--cache", str(scores)],
        "consistency": [*map(str, [*whole, *plain]), *reading, "--cache", str(scores),
                        "--plot", str(folder / "consistency.svg")],
        "realism": [*map(str, whole), *reading, "--cache", str(states)],
        "conduct": [*map(str, whole)],
    }  # fmt: skip
    found = {}
    for name, arguments in wanted.items():
        result = folder / f"{name}.json"
        if not result.is_file():
            command = [sys.executable, "-m", "traitbasis.cli", "eval", name, *arguments, "--out", str(result)]
            run(command, folder / f"{name}.log")
        found[name] = json.loads(result.read_text(encoding="utf-8"))
    return found


_SETS = ("whole", "levels", "all-positions")


# glibc gives the logits of every training step back to the kernel, and half of a step is then page faults.
_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}


def run(command: Sequence[str], log: Path, **variables: str) -> None:
    """Run a command, its output in a log. Raises EvaluationError with the log's end when it fails."""
    with log.open("ab") as file:
        path = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        environment = {
            **os.environ,
            **variables,
            "PYTHONPATH": path,
        }  # for experiments.baselines, from wherever this is called
        done = subprocess.run([*command], stdout=file, stderr=subprocess.STDOUT, env=environment)
    if done.returncode:
        end = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise EvaluationError(f"{' '.join(command)} failed; {log} ends with:\n{end}")


@dataclass
class Clock:
    """Seconds by step, kept on disk, so that a run that was killed still says how long it took."""

    path: Path

    def __call__(self, step: str, seconds: float) -> None:
        known = self.read()
        known[step] = round(known.get(step, 0.0) + seconds, 1)
        write_whole(self.path, json.dumps(known, indent=1))
        out.print(f"{step}: {seconds:.0f} s", highlight=False)

    def read(self) -> dict[str, float]:
        return dict(json.loads(self.path.read_text())) if self.path.is_file() else {}


def made_by(folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """What stands behind the figures (contract 11): settings, trainings, and the digests of all dialogues."""
    records = sorted((folder / "models").rglob("train.json"))
    return {
        "command": "python experiments/paper_table.py",
        "settings": settings,
        "versions": versions(),
        "trainings": {
            str(path.parent.relative_to(folder / "models")): json.loads(path.read_text()) for path in records
        },
        "dialogues": {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in _transcripts(folder)
        },
    }


def _transcripts(folder: Path) -> list[Path]:
    return sorted((folder / "dialogues").rglob("*.jsonl"))


def publish(folder: Path, target: Path) -> None:
    """All dialogues as one compressed file beside the figures: each of them can be read, and measured again."""
    lines = b"".join(
        json.dumps({"file": str(path.relative_to(folder))}).encode() + b"\n" + path.read_bytes()
        for path in _transcripts(folder)
    )
    write_whole(target, gzip.compress(lines, mtime=0))


def main(
    model: Annotated[str, typer.Option(help="The customer's model, tuned and steered alike.")] = DEFAULT_MODEL,
    traits: Annotated[str, typer.Option(help="With commas.")] = ",".join(PAPER_TRAITS),
    mixes: Annotated[str, typer.Option(help="With commas.")] = ",".join(MIXES),
    tasks: Annotated[int, typer.Option(min=2, help="How many of the shipped tasks.")] = 6,
    trials: Annotated[int, typer.Option(min=1, help="Dialogues of each task and condition.")] = 1,
    turns: Annotated[int, typer.Option(min=10, help="Customer turns of a whole dialogue.")] = 10,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest customer turn.")] = 48,
    train_samples: Annotated[int, typer.Option(min=4, help="For SFT.")] = 192,
    adapter_samples: Annotated[int, typer.Option(min=4, help="For each LoRA adapter.")] = 32,
    seed: Annotated[int, typer.Option(help="Of seeds and random directions.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings, and servers, at the same time.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Of each training, and (times jobs) of the reading.")] = 1,
    serve_options: Annotated[str, typer.Option(help="More for traitbasis serve.")] = "--dtype bfloat16 --threads 1",
    concurrency: Annotated[int, typer.Option(min=1, help="Dialogues held at the same time with one server.")] = 24,
    folder: Annotated[Path, typer.Option(help="Where the work lies.")] = HERE / "results" / "paper_table",
    out_file: Annotated[Path, typer.Option("--out")] = HERE / "results" / "paper_table.json",
) -> None:
    names, mixed = traits.split(","), [mix for mix in mixes.split(",") if mix]
    settings = {name: value for name, value in locals().items() if name in _SETTINGS}
    if not mixed:
        raise typer.BadParameter("--mixes is empty; composability is about mixes, such as impatience+skeptical")
    every, known = collections(names, mixed, turns), read_tasks()
    if tasks > len(known):
        raise typer.BadParameter(f"--tasks is {tasks}; {len(known)} ship")
    folder.mkdir(parents=True, exist_ok=True)
    keep = folder / "settings.json"
    if keep.is_file() and json.loads(keep.read_text()) != settings:
        raise EvaluationError(f"{folder} holds a run with other settings ({keep}); delete it, or take another --folder")
    write_whole(keep, json.dumps(settings, indent=1))
    clock = Clock(folder / "seconds.json")

    begun = time.monotonic()
    train(folder, model, names, train_samples, adapter_samples, threads, jobs)
    clock("training", time.monotonic() - begun)
    begun = time.monotonic()
    options = tuple(serve_options.split())
    with ThreadPoolExecutor(jobs) as pool:
        running = {
            pool.submit(
                hold, method, every, known, known[:tasks], folder / "dialogues",
                trials=trials, seed=seed, max_tokens=max_tokens, concurrency=concurrency, model=model, options=options,
            ): method
            for method in sorted(METHODS, key=lambda method: (method != "lora", method != "steered"))  # longest first
        }  # fmt: skip
        for done in as_completed(running):
            done.result()
            out.print(f"{running[done]}: dialogues done", highlight=False)
    clock("dialogues", time.monotonic() - begun)
    begun = time.monotonic()
    figures = measure(folder, model, names, threads * jobs)
    clock("measuring", time.monotonic() - begun)

    found = {"made_by": made_by(folder, settings), "seconds": clock.read(), "figures": figures}
    write_json(out_file, found)
    publish(folder, out_file.with_suffix(".dialogues.jsonl.gz"))
    for line in summary(figures):
        print(line)


_SETTINGS = (
    "model",
    "traits",
    "mixes",
    "tasks",
    "trials",
    "turns",
    "max_tokens",
    "train_samples",
    "adapter_samples",
    "seed",
)


# Columns of the second table: figures of `traitbasis eval conduct`, as they are called there.
CONDUCT = (
    "facts told", "told first", "invents", "proper", "early", "never", "mixed", "role flips", "broken", "repeats",
    "distinct-3", "polite", "frustrated", "words", "varies within",
)  # fmt: skip


def summary(figures: dict[str, Any]) -> Iterator[str]:
    """The tables as Markdown: the paper's four dimensions, then conduct, then what the instruments are worth."""
    fidelity, mixes = ({row["method"]: row for row in figures[name]["rows"]} for name in ("fidelity", "composability"))
    course = {
        (row["method"], row["neutral"]): row
        for row in figures["consistency"]["rows"]
        if row["trait"] == "all traits" and row["rater"] == "instruments"
    }
    elo, distance = figures["realism"]["raters"]["model-free"]["methods"], figures["realism"]["distance"]
    rows = []
    for method in METHODS:
        named, mixed = fidelity.get(method, {}), mixes.get(method, {})
        lasting, null = course.get((method, False), {}), course.get((method, True), {})
        rows.append(
            [
                method,
                shown(elo.get(method, {}).get("elo"), ".0f"),
                shown(distance.get(method)),
                *(shown(named.get(of)) for of in ("named", "of_traits", "level")),
                *(shown(lasting.get(of)) for of in ("consistent", "escalate")),
                shown(null.get("consistent")),
                *(shown(mixed.get(of)) for of in ("exact", "ranked")),
            ]
        )
    yield "\n## The paper's four dimensions, by model-free instruments\n"
    yield table(
        ["method", "realism Elo", "told from people", "fidelity", "without neutral", "levels in order", "consistent",
         "escalates", "consistent, neutral user", "composability", "mix ranked first"],
        rows,
    )  # fmt: skip
    some, some_mix = next(iter(fidelity.values())), next(iter(mixes.values()))
    yield f"\nchance: fidelity {some['chance']:.2f}, levels 0.50, mix ranked first {some_mix['chance_ranked']:.2f}"
    if guessed := [one for one in figures["consistency"]["yardsticks"] if not one["calibrated"]]:
        yield (
            f"consistency: {guessed[0]['neutral']} long neutral dialogues are too few to set threshold and tolerance, "
            f"by default {guessed[0]['threshold']:g} and {guessed[0]['tolerance']:g} (take more --tasks)"
        )
    yield "\n## Conduct\n"
    # Dialogues with a trait where a method has them: its neutral ones are a group of their own.
    groups = {group["method"]: group["figures"] for group in reversed(figures["conduct"]["groups"])}
    yield table(
        ["method", *CONDUCT],
        [[method, *(shown(groups.get(method, {}).get(of)) for of in CONDUCT)] for method in METHODS],
    )
    yield "\n## A clean past and a steered one\n"
    for one in figures["consistency"]["comparisons"]:
        told = {name: shown(three["difference"], "+.2f") for name, three in one["figures"].items()}
        of = ", ".join(f"{name} {told[name]}" for name in told)
        yield f"- {one['method']}, {one['trait']} ({one['pairs']} pairs), steered past less clean past: {of}"


def shown(figure: Mapping[str, float | None] | None, spec: str = ".2f") -> str:
    """An estimate's record as text; a dash where there is none."""
    if not figure:
        return "-"
    return format(Estimate(**{of: math.nan if value is None else value for of, value in figure.items()}), spec)


if __name__ == "__main__":
    try:
        typer.run(main)
    except EvaluationError as error:
        sys.exit(f"error: {error}")
