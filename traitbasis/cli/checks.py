"""Commands that look at a model and a machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.bench import bench_app
from traitbasis.cli.common import (
    BasisFile,
    Device,
    DeviceMap,
    Dtype,
    Model,
    Quantize,
    Threads,
    app,
    err,
    listed,
    load_lm,
    out,
)
from traitbasis.embedded import DEFAULT_MODEL


@app.command()
def models() -> None:
    """List the models that need no hub, and whether they are cached.

    Example: traitbasis models
    """
    from traitbasis.embedded import EMBEDDED, cached_folder

    table = Table("alias", "what it is", "cached")
    for alias, model in EMBEDDED.items():
        folder = cached_folder(alias)
        table.add_row(alias, model.description, str(folder) if folder else f"no ({model.download_mb} MB to fetch)")
    out.print(table)
    out.print("--model also takes a folder with a Hugging Face checkpoint, or a hub id where a hub is reachable.")


@app.command()
def verify(
    model: Annotated[str, typer.Argument(help="Alias, folder, or hub id.")] = DEFAULT_MODEL,
    basis: BasisFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device_map: DeviceMap = None,
) -> None:
    """Check on your model and machine that steering does what it says; exit status 1 when a check fails.

    Without a basis for the model, random directions stand in.

    Example: traitbasis verify ./Llama-3.1-8B-Instruct
    """
    from traitbasis.basis import find_basis
    from traitbasis.errors import ArtifactError
    from traitbasis.verify import verify as run_checks

    lm = load_lm(model, device, dtype, quantize, device_map)
    try:
        found = find_basis(lm, basis)
    except ArtifactError as error:
        if basis is not None:
            raise
        found = None
        err.print(f"{error}\nUsing random directions.", soft_wrap=True, markup=False)
    failed = 0
    for check in run_checks(lm, found):
        mark = {True: "[green]pass[/green]", False: "[red]FAIL[/red]", None: "[dim]  - [/dim]"}[check.passed]
        out.print(f"{mark}  [bold]{check.name}[/bold]: {escape(check.detail)}", soft_wrap=True, highlight=False)
        failed += check.passed is False
    if failed:
        err.print(f"[red]{failed} check{'s' * (failed > 1)} failed on {escape(lm.name)}[/red]")
        raise typer.Exit(1)


@bench_app.command()
def engine(
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    users: Annotated[str, typer.Option(help="Concurrent users, with commas.")] = "1,8,32",
    turns: Annotated[int, typer.Option(min=2, help="Longest conversation.")] = 20,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens of a reply.")] = 32,
    only: Annotated[str, typer.Option(help="Some of the measurements, with commas.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Few repeats: a look, no figures to publish.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the figures as JSON, too.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    quantize: Quantize = None,
    device_map: DeviceMap = None,
    threads: Threads = None,
) -> None:
    """Measure the engine on this machine: throughput, the price of steering, time to first token, against generate.

    Example: traitbasis bench engine --quick --only throughput,steering
    """
    import json

    from traitbasis.basis import find_basis
    from traitbasis.bench import MEASUREMENTS, Workload, made_with, measure
    from traitbasis.files import write_whole

    names = listed(only) or list(MEASUREMENTS)
    counts = [count.strip() for count in users.split(",")]
    if unknown := set(names) - set(MEASUREMENTS):
        raise typer.BadParameter(f"unknown measurement {', '.join(sorted(unknown))}; known: {', '.join(MEASUREMENTS)}")
    if not all(count.isdecimal() and int(count) for count in counts):
        raise typer.BadParameter(f"--users is {users!r}; it takes numbers from 1 on, with commas")
    lm = load_lm(model, device, dtype, quantize, device_map, threads)
    load = Workload(lm, find_basis(lm, basis), tokens)
    figures: dict[str, Any] = {"made_with": made_with(load)}
    measured = measure(load, sorted(map(int, counts)), turns=turns, quick=quick, only=names)
    while True:
        with err.status("measuring"):
            name, found = next(measured, ("", None))
        if not name:
            break
        figures[name] = found
        table = Table(name, "figure")
        for of, figure in _flat(found):
            table.add_row(of, figure)
        out.print(table)
        if out_file:  # after each: a long run that ends early keeps what it has
            write_whole(out_file, json.dumps(figures, indent=1, default=vars) + "\n")
    if out_file:
        out.print("saved:", out_file, soft_wrap=True, markup=False)


def _flat(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, str]]:
    """Rows of a table from nested figures."""
    if isinstance(figures, dict):
        for key, value in figures.items():
            yield from _flat(value, (*path, str(key).replace("_", " ")))
    elif isinstance(figures, list):
        yield " / ".join(path), " ".join(_number(value) for value in figures)
    else:
        yield " / ".join(path), _number(figures)


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
