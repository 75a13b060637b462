"""The baselines' commands: ``python -m experiments.baselines --help``, from the top of the checkout."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.errors import TraitBasisError
from traitbasis.pairs import PAPER_TRAITS

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Baselines that the method is compared with."
)
out, err = Console(), Console(stderr=True)

Model = Annotated[str, typer.Option(help="Alias (see `traitbasis models`), folder, or hub id.")]
Traits = Annotated[str, typer.Option(help="Traits, with commas.")]
Conditions = Annotated[
    list[str] | None,
    typer.Option("--condition", help="Such as impatience-high+skeptical-low; several times for several."),
]
Folder = Annotated[Path, typer.Option(help="Where a model's baselines lie.")]
Seed = Annotated[int, typer.Option(min=0, help="Another sample.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of torch; by default one for each CPU.")]
HOME = Path("baselines")
_TRAITS = ",".join(PAPER_TRAITS)


@app.command()
def users(condition: Conditions = None, out_file: Annotated[Path, typer.Option("--out")] = HOME / "users.yaml") -> None:
    """Write served users that are told their traits, for `traitbasis serve --users`.

    Example: python -m experiments.baselines users --condition impatience-high --condition impatience-low+skeptical-high
    """
    from .users import pair_sets_of, read_condition, traits_of, write_users

    conditions = [read_condition(spec) for spec in condition or ()]
    _saved(write_users(out_file, conditions, pair_sets_of(traits_of(conditions))))


@app.command("random-basis")
def random_basis(
    model: Model = DEFAULT_MODEL,
    basis: Annotated[Path | None, typer.Option(help="Basis to be like; by default the model's own.")] = None,
    seed: Seed = 0,
    out_file: Annotated[Path, typer.Option("--out")] = HOME / "random.safetensors",
) -> None:
    """Write a basis of random directions with the layers, doses and levels of a real one.

    Example: python -m experiments.baselines random-basis --out random.safetensors && traitbasis serve --basis
    random.safetensors
    """
    from traitbasis.basis import Basis, basis_path
    from traitbasis.model import model_slug

    from .random_basis import random_basis as like

    _saved(like(Basis.load(basis or basis_path(model_slug(model))), seed).save(out_file))


@app.command()
def data(
    samples: Annotated[int, typer.Option(min=1, help="Lines of the file, held-out ones included.")] = 320,
    source: Annotated[
        Literal["pairs", "steered"],
        typer.Option(help="The pairs that make the vectors, or turns of the steered simulator itself."),
    ] = "pairs",
    traits: Traits = _TRAITS,
    prompt: Annotated[
        Literal["plain", "dialogue"],
        typer.Option(help="The instruction alone, or in the prompt of `traitbasis eval collect`."),
    ] = "plain",
    seed: Seed = 0,
    model: Annotated[str, typer.Option(help="Of steered turns.")] = DEFAULT_MODEL,
    basis: Annotated[Path | None, typer.Option(help="Of steered turns; by default the model's own.")] = None,
    best_of: Annotated[int, typer.Option(min=1, help="Steered turns drawn for each sample.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest steered turn.")] = 60,
    dtype: Annotated[str, typer.Option(help="Of steered turns.")] = "fastest",
    threads: Threads = None,
    out_file: Annotated[Path, typer.Option("--out")] = HOME / "data.jsonl",
) -> None:
    """Make a training set. With --source steered it goes on where it was when it was killed.

    Example: python -m experiments.baselines data --source pairs --samples 320
    """
    from .data import pair_samples, steered_samples
    from .users import pair_sets_of

    pair_sets = pair_sets_of(trait.strip() for trait in traits.split(",") if trait.strip())
    if source == "pairs":
        pair_samples(pair_sets, samples, out_file, prompt=prompt, seed=seed)
    else:
        from traitbasis.cpu import set_threads
        from traitbasis.model import load_model
        from traitbasis.simulator import UserSimulator

        set_threads(threads)
        with UserSimulator(load_model(model, dtype=dtype), basis) as simulator, _bar("drawing") as advance:
            steered_samples(
                simulator,
                pair_sets,
                samples,
                out_file,
                prompt=prompt,
                seed=seed,
                best_of=best_of,
                max_tokens=max_tokens,
                done=lambda n: advance(n, samples, ""),
            )
    _saved(out_file)


Data = Annotated[Path, typer.Option(help="Training set.")]
Samples = Annotated[
    int | None, typer.Option(min=1, help="How many to learn from, from the beginning; by default all but --heldout.")
]
Heldout = Annotated[int, typer.Option(min=0, help="Samples behind those, for the held-out loss.")]
Epochs = Annotated[float, typer.Option(min=0.01)]
Rate = Annotated[float, typer.Option("--lr", min=0.0)]
Batch = Annotated[int, typer.Option(min=1)]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(help="Of the products; auto is bfloat16 on a GPU, and on a CPU where that is measured to pay."),
]
Weights = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option(help="Of the weights; bfloat16 for a model that does not fit otherwise."),
]
Checkpointing = Annotated[bool, typer.Option("--checkpointing", help="Activations again instead of kept: less memory.")]
MaxSteps = Annotated[int | None, typer.Option(min=1, help="Stop after so many steps.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda.")]


@app.command()
def sft(
    data: Data = HOME / "data.jsonl",
    model: Model = DEFAULT_MODEL,
    samples: Samples = None,
    heldout: Heldout = 32,
    epochs: Epochs = 2.0,
    lr: Rate = 2e-5,
    batch: Batch = 8,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    weights: Weights = "float32",
    checkpointing: Checkpointing = False,
    max_steps: MaxSteps = None,
    device: Device = "auto",
    threads: Threads = None,
    folder: Folder = HOME,
) -> None:
    """Fine-tune the whole model, told its traits in the instruction; writes FOLDER/sft.

    Example: python -m experiments.baselines sft --samples 256 --epochs 2
    """
    values = {**_settings(locals()), "dtype": _dtype(dtype, model, threads)}
    _train("sft", data, folder / "sft", model, None, values, device)


@app.command()
def lora(
    data: Data = HOME / "data.jsonl",
    traits: Traits = _TRAITS,
    model: Model = DEFAULT_MODEL,
    samples: Samples = None,
    heldout: Heldout = 12,
    epochs: Epochs = 3.0,
    lr: Rate = 5e-4,
    batch: Batch = 8,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapter.")] = 8,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    weights: Weights = "float32",
    checkpointing: Checkpointing = False,
    max_steps: MaxSteps = None,
    device: Device = "auto",
    threads: Threads = None,
    folder: Folder = HOME,
) -> None:
    """Train one adapter a trait, told nothing; writes FOLDER/adapters/TRAIT.

    Example: python -m experiments.baselines lora --traits impatience --samples 64
    """
    values = {**_settings(locals()), "dtype": _dtype(dtype, model, threads)}
    for trait in filter(None, map(str.strip, traits.split(","))):
        _train("lora", data, folder / "adapters" / trait, model, trait, values, device)


@app.command()
def merge(
    condition: Annotated[str, typer.Option(help="Such as impatience-high+skeptical-low.")],
    model: Model = DEFAULT_MODEL,
    folder: Folder = HOME,
    out_folder: Annotated[Path | None, typer.Option("--out", help="By default FOLDER/lora-CONDITION.")] = None,
) -> None:
    """Merge a condition's adapters into the model, for `traitbasis serve --model OUT --basis OUT/basis.safetensors`.

    Example: python -m experiments.baselines merge --condition impatience-high
    """
    from .train import merge as merged
    from .users import condition_name, pair_sets_of, read_condition

    traits = read_condition(condition)
    target = out_folder or folder / f"lora-{condition_name(traits)}"
    adapters = {trait: folder / "adapters" / trait for trait in traits}
    _saved(merged(adapters, traits, target, pair_sets_of(traits or PAPER_TRAITS[:1]), model=model))


@app.command()
def serve(
    method: Annotated[Literal["unsteered", "prompted", "random", "sft", "lora", "steered"], typer.Option()],
    condition: Conditions = None,
    model: Model = DEFAULT_MODEL,
    basis: Annotated[Path | None, typer.Option(help="Of steered and random; by default the model's own.")] = None,
    seed: Seed = 0,
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000,
    folder: Folder = HOME,
) -> None:
    """Serve a method as `traitbasis serve` does; of lora, one condition. Ctrl-C ends it.

    Example: python -m experiments.baselines serve --method sft --condition impatience-high
    """
    from .serve import served
    from .users import read_condition

    conditions = [read_condition(spec) for spec in condition or ("",)]
    if method == "lora" and len(conditions) > 1:
        raise typer.BadParameter("an adapter is merged for one condition; give one")
    with served(method, folder, conditions, model=model, basis=basis, seed=seed, port=port) as endpoints:
        endpoint = next(endpoints)
        out.print(endpoint.url, "with the model ids:", *map(endpoint.model, conditions), sep="\n  ", soft_wrap=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            out.print("ended")


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of ``train.Settings``."""
    names = ("samples", "heldout", "epochs", "lr", "batch", "seed", "weights", "checkpointing", "max_steps", "rank")
    return {name: given[name] for name in names if name in given}


def _dtype(dtype: str, model: str, threads: int | None) -> str:
    """What ``auto`` is for this model here."""
    import torch

    from traitbasis.cpu import faster_dtype, set_threads

    set_threads(threads)
    if dtype != "auto" or torch.cuda.is_available():
        return "bfloat16" if dtype == "auto" else dtype
    return str(faster_dtype(1024, rows=256)).removeprefix("torch.")


def _train(
    method: Literal["sft", "lora"],
    data: Path,
    folder: Path,
    model: str,
    trait: str | None,
    values: dict[str, Any],
    device: str,
) -> None:
    from .data import read_samples
    from .train import Settings, train
    from .users import pair_sets_of

    names = [trait] if trait else read_samples(data)[0]["traits"]
    with _bar(f"training {trait or method}") as advance:
        record = train(
            method,
            data,
            folder,
            pair_sets_of(names),
            model=model,
            trait=trait,
            settings=Settings(**values),
            device=device,
            told=lambda step, steps, loss: advance(1, steps, f"loss {loss:.3f}"),
        )
    losses, held = record["losses"], record["heldout_loss"]
    out.print(
        f"{trait or method}: {record['data']['samples']} samples, {record['steps']} steps, "
        f"loss {losses[0]['loss']:.3f} -> {losses[-1]['loss']:.3f}, held-out {held['before']} -> {held['after']}, "
        f"{record['tokens_per_second']:.0f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    _saved(folder)


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, nothing elsewhere; told steps that are done, of how many, and a note."""
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def advance(done: int, total: int, note: str) -> None:
            progress.update(task, total=total, advance=done, description=f"{what} {note}".strip())

        yield advance


def _saved(path: Path) -> None:
    out.print("saved:", path, soft_wrap=True, markup=False)


if __name__ == "__main__":
    try:
        app()
    except (TraitBasisError, OSError) as error:  # OSError names the file itself
        err.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(1)
