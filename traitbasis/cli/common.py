"""Consoles, option types and helpers that the commands share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from traitbasis.model import LanguageModel

Number = TypeVar("Number", int, float)

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Simulated users with steered traits, for testing AI agents.",
)
basis_app = typer.Typer(no_args_is_help=True, help="Build and inspect the basis that a simulated user draws on.")
app.add_typer(basis_app, name="basis")

out = Console()
err = Console(stderr=True)

Model = Annotated[str, typer.Option(help="Alias (see `traitbasis models`), folder, or hub id.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (float32 on a CPU, the checkpoint's own elsewhere), fastest (on a CPU bfloat16 where that is "
        "measured to pay), float32, bfloat16, float16."
    ),
]
Quantize = Annotated[str | None, typer.Option(help="8bit or 4bit, by bitsandbytes.")]
DeviceMap = Annotated[
    str | None, typer.Option(help="Spread the model over devices, as accelerate does: auto, balanced, sequential.")
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of torch; by default one for each CPU this process may use.")
]
BasisFile = Annotated[Path | None, typer.Option("--basis", help="Basis file; by default the model's own.")]
Header = Annotated[
    Literal["user", "assistant"],
    typer.Option("--as", help="Template header that the customer's turns stand under."),
]
# The same for `serve` and `chat`, where the basis knows.
HeaderOfBasis = Annotated[
    Literal["user", "assistant"] | None,
    typer.Option("--as", help="Template header of the customer's turns; by default what the basis was made with."),
]


def load_lm(
    model: str,
    device: str,
    dtype: str,
    quantize: str | None = None,
    device_map: str | None = None,
    threads: int | None = None,
    rows: int = 8,
) -> LanguageModel:
    with err.status("importing torch") as status:
        from traitbasis.cpu import set_threads
        from traitbasis.model import load_model

        set_threads(threads)

        def say(message: str) -> None:
            status.update(escape(message))
            if not err.is_terminal:
                err.print(message, soft_wrap=True, markup=False)

        return load_model(
            model, device=device, dtype=dtype, quantize=quantize, device_map=device_map, rows=rows, say=say
        )


def listed(text: str) -> list[str]:
    """What stands between commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def listed_numbers(option: str, text: str, kind: type[Number]) -> list[Number]:
    """Numbers between commas. Raises BadParameter naming the option."""
    try:
        return [kind(part) for part in listed(text)]
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; it takes numbers with commas") from None


def finite(value: float | None) -> float | None:
    """A number as options take it: ``min`` lets inf pass, and in some versions nan. Raises BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to go on with; give a finite one")
    return value


def spare(written: Iterable[Path | None], read: Iterable[Path | None] = (), over: str = "") -> None:
    """Raises BadParameter before a file is written over that a command reads, or that took long to make (dialogues,
    runs, judgments), whichever command line was mistyped. over: the kind that may be, ``judgments``."""
    inputs = {path.resolve() for path in read if path}
    for path in filter(None, written):
        kind = None
        if path.is_file():
            with path.open("rb") as file:
                kind = re.match(rb'\{\s*"format":\s*"traitbasis\.(\w+)/', file.read(200))
        if path.resolve() in inputs or (kind and kind[1] in _COLLECTED and kind[1] != over.encode()):
            holds = f"it holds {kind[1].decode()}" if kind else "it is read"
            raise typer.BadParameter(f"{path} would be written over, and {holds}; write elsewhere")


_COLLECTED = (b"dialogues", b"run", b"judgments", b"sheet")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere."""
    from rich.progress import Progress

    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.advance(task, done)
