"""`traitbasis rephrase`: a benchmark's fixed user turns in the words of a user with traits, nothing lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape

from traitbasis.cli.common import BasisFile, Device, Dtype, Model, Threads, app, finite, load_lm, out, progress, spare
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.entity_audit import Audit
    from traitbasis.rephrase import Settings, Writer
    from traitbasis.static_turns import Record

_USER_KEY = "TRAITBASIS_USER_KEY"


@app.command()
def rephrase(
    source: Annotated[Path, typer.Argument(help="BFCL, OpenAI messages or texts, a record a line.")],
    rephrased: Annotated[Path | None, typer.Argument(help="With --check: the same benchmark, rewritten.")] = None,
    traits: Annotated[
        list[str] | None,
        typer.Option(help="Such as impatience-high; off is the same user without traits. Several write a file each."),
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="JSON lines; with several --traits their names go into the file's.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Rewrite nothing: report what REPHRASED, whoever made it, has lost.")
    ] = False,
    tries: Annotated[int, typer.Option(min=1, help="Draws of a turn until one keeps everything.")] = 12,
    constrain: Annotated[
        bool, typer.Option("--constrain", help="Then as many more that are held to the entities in their order.")
    ] = False,
    meaning: Annotated[
        float, typer.Option(min=0, max=1, help="Least share of a turn's other words that come back, or words alike.")
    ] = 0.25,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many records.")] = None,
    form: Annotated[
        Literal["bfcl", "messages", "text"] | None, typer.Option("--format", help="By default what it looks like.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Other draws.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, callback=finite, help="Of every draw.")] = 0.7,
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    force: Annotated[
        bool, typer.Option("--force", help="Beyond the limit that calibration found, and traits not steerable here.")
    ] = False,
    url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint, instead of a model in this process.")] = "",
    served_model: Annotated[
        str, typer.Option(help="The model id there; {spec} becomes the traits.")
    ] = "steered-user@{spec}",
    api_key: Annotated[
        str, typer.Option(help="Its API key, if it wants one.", envvar=_USER_KEY, show_envvar=True)
    ] = "",
    workers: Annotated[int, typer.Option(min=1, help="Requests to --url at a time.")] = 8,
) -> None:
    """Rewrite a benchmark's user turns under traits, keeping every entity; a run that was stopped goes on.

    Example: traitbasis rephrase BFCL_v4_multi_turn_base.json --traits impatience-high --out impatient.jsonl
    """
    from traitbasis.entity_audit import audit
    from traitbasis.static_turns import read_records

    if check:
        if rephrased is None or traits:
            raise typer.BadParameter("--check takes two files and no --traits: --check original.json rephrased.json")
        spare([out_file], [source, rephrased])
        found = audit(read_records(source, form), read_records(rephrased))
        _show(str(rephrased), found)
        if out_file:
            _write(out_file, found, {"original": source.name, "rephrased": rephrased.name})
        return
    if rephrased is not None or not traits or out_file is None:
        raise typer.BadParameter("give one file with --traits and --out, or two files with --check")
    from traitbasis.rephrase import Settings

    records = read_records(source, form)[:limit]
    settings = Settings(seed=seed, tries=tries, constrain=constrain, meaning=meaning)
    files = {spec: _file(out_file, spec, several=len(traits) > 1) for spec in dict.fromkeys(traits)}
    if url:
        opened = _served(url, served_model, api_key, temperature, workers)
    else:
        opened = _local(model, basis, device, dtype, threads, force, temperature)
    with opened as writer_of:
        writers = {spec: writer_of(spec) for spec in files}  # a trait that is misspelt is told before anything is done
        for spec, path in files.items():
            _rephrase(writers[spec], records, path, settings, source)


def _rephrase(writer: Writer, records: list[Record], path: Path, settings: Settings, source: Path) -> None:
    from traitbasis.entity_audit import audit
    from traitbasis.rephrase import made_with, rephrase_file
    from traitbasis.static_turns import read_records

    turns = sum(len(record.turns) for record in records)
    with progress(f"turns, {writer.spec or 'unsteered'}", turns) as advance:
        rephrase_file(writer, records, path, settings, done=advance)
    found = audit(records, read_records(path, records[0].form if records[0].form != "text" else None))
    _show(f"{writer.spec or 'unsteered'}: {path}", found)
    _write(path.with_name(f"{path.name}.summary.json"), found, {**made_with(writer, settings), "original": source.name})


@contextmanager
def _local(
    model: str, basis: Path | None, device: str, dtype: str, threads: int | None, force: bool, temperature: float
) -> Iterator[Callable[[str], Writer]]:
    lm = load_lm(model, device, dtype, threads=threads)
    from traitbasis.rephrase import LocalWriter
    from traitbasis.simulator import UserSimulator

    with UserSimulator(lm, basis) as user:
        yield lambda spec: LocalWriter(user, spec, force=force, sampling={"temperature": temperature})


@contextmanager
def _served(url: str, model: str, api_key: str, temperature: float, workers: int) -> Iterator[Callable[[str], Writer]]:
    from traitbasis.remote import RemoteModel
    from traitbasis.rephrase import RemoteWriter

    with RemoteModel(url, api_key or None, what="the user") as endpoint:
        yield lambda spec: RemoteWriter(endpoint, model, spec, temperature=temperature, workers=workers)


def _file(path: Path, spec: str, several: bool) -> Path:
    if several and not re.fullmatch(r"[\w.+-]+", spec):
        raise typer.BadParameter(f"{spec!r} cannot go into a file's name; write it as in impatience-high+skeptical-low")
    return path.with_name(f"{path.stem}.{spec.replace('+', '.')}{path.suffix}") if several else path


def _write(path: Path, found: Audit, made_by: Mapping[str, Any]) -> None:
    import json

    from traitbasis.files import write_whole

    write_whole(path, json.dumps({**made_by, **found.record}, indent=2, ensure_ascii=False) + "\n")


def _show(title: str, found: Audit) -> None:
    from rich.table import Table

    table = Table(title=escape(title), show_header=False)
    rows = [
        ("tasks, turns", f"{found.tasks}, {found.turns}"),
        *((f"turns {status.replace('_', ' ')}", str(n)) for status, n in sorted(found.statuses.items())),
        ("turns that differ", str(found.changed)),
        ("entities", str(found.entities)),
        ("entities lost", f"{found.lost:.1%}"),
        ("tasks that lost one", f"{found.tasks_with_loss:.1%}"),
        ("tasks that got one that is not theirs", f"{found.tasks_with_invention:.1%}"),
        ("words a turn", f"{found.words:.1f} → {found.words_after:.1f}"),
        *((f"  lost, {kind}", f"{lost} of {n}") for kind, (n, lost) in found.by_kind.items() if lost),
    ]
    if found.missing_turns or found.missing_tasks:
        rows.append(("missing", f"{found.missing_tasks} tasks, {found.missing_turns} turns"))
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)
    for task, turn, kind, text in found.examples[:5]:
        out.print(escape(f"lost in {task}, turn {turn + 1}: {kind} {text!r}"), soft_wrap=True)
