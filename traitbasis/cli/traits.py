"""The trait library: what it holds, and how a trait of one's own begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from traitbasis.cli.common import BasisFile, Model, app, err, out
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.pair_check import PairState, Report


@app.command()
def traits(
    model: Model = DEFAULT_MODEL,
    basis: BasisFile = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a table for a document.")] = False,
) -> None:
    """List the traits that ship, and what a model's basis knows of each: screening, layer, doses of its levels, limit.

    Example: traitbasis traits
    """
    from traitbasis.basis import Basis, basis_path
    from traitbasis.errors import ArtifactError
    from traitbasis.model import model_slug
    from traitbasis.pairs import known_traits, load_pairs
    from traitbasis.select import read_selection, read_selections

    screened: dict[str, str] = {}
    try:
        path = basis or basis_path(model_slug(model))
        found = Basis.load(path)
        beside = path.with_name("selection.json")
        for trait, chosen in (read_selections(beside) if beside.is_file() else {}).items():
            screening = read_selection(chosen).screening
            screened[trait] = f"AUC {max(screening.auc):.2f}, agreement {max(screening.agreement):.2f}"
    except ArtifactError as error:
        if basis:
            raise
        found = None
        err.print(str(error), soft_wrap=True, markup=False)
    columns = {} if found is None else {column.trait: column for column in found.columns}
    rows = []
    for pair_set in sorted(map(load_pairs, known_traits()), key=lambda one: (one.family or "", one.trait)):
        column = columns.get(pair_set.trait)
        state = "not in the basis"
        if column and found:
            medium = found.dose({column.trait: 1.0})
            doses = " / ".join(f"{intensity * medium:.2f}" for intensity in column.levels.values())
            limit = "" if column.limit is None else f", limit {column.limit:.2f}"
            state = f"layer {column.layer}, {doses}{limit}" + ("" if column.steerable else "; not steerable")
        known = screened.get(pair_set.trait, "")
        rows.append((pair_set.family or "", pair_set.trait, pair_set.definition, pair_set.opposite, known, state))
    heads = ("family", "trait", "what it does", "opposite pole", "screening", "doses of low / medium / high")
    if markdown:
        print("\n".join(f"| {' | '.join(row)} |" for row in (heads, ("---",) * len(heads), *rows)))
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*map(escape, row))
    out.print(table)


@app.command("new-trait")
def new_trait(
    name: Annotated[str, typer.Argument(help="The trait's name; with --check or --watch also a pair file.")],
    out_file: Annotated[Path | None, typer.Option("--out", help="The pair file; by default NAME.yaml.")] = None,
    like: Annotated[
        str | None,
        typer.Option("--from", help="Take the contexts of this shipped trait, with its replies as comments."),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only report on the file; exit status 1 until ready.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Report again whenever the file is saved; begins it if it is not there.")
    ] = False,
) -> None:
    """Begin the pair file of a new trait: contexts and facts are there, you write two replies to each.

    Four pairs make the trait's vector and eight more, held out, measure it. docs/new-trait.md leads through it.

    Examples: traitbasis new-trait bashful --watch; traitbasis new-trait bashful.yaml --check
    """
    from traitbasis.pair_check import check_pair_file
    from traitbasis.scaffold import write_scaffold

    is_file = name.endswith((".yaml", ".yml"))
    if is_file and out_file:
        raise typer.BadParameter("give the trait's name and --out, or the file alone")
    if check and watch:
        raise typer.BadParameter("give either --check or --watch")
    file = Path(name) if is_file else out_file or Path(f"{name}.yaml")
    if not check and not (watch and file.exists()):
        write_scaffold(Path(name).stem if is_file else name, file, like)
        out.print("written:", file, soft_wrap=True, markup=False)
    if watch:
        _watch(file)
    elif check:
        report = check_pair_file(file)
        _show(report)
        raise typer.Exit(0 if report.ready else 1)
    else:
        out.print("next: fill it in, beside: traitbasis new-trait", file, "--watch", soft_wrap=True, markup=False)


def _watch(file: Path) -> None:
    """Report on a file whenever it is saved, until Ctrl-C."""
    from traitbasis.errors import PairError
    from traitbasis.pair_check import changes, check_pair_file

    ready = False
    try:
        for _ in changes(file):
            try:
                report = check_pair_file(file)
            except PairError:  # it is just being replaced; the next look finds it
                continue
            ready = report.ready
            out.clear()
            _show(report)
            out.print("checked again when the file is saved; Ctrl-C ends", style="dim")
    except KeyboardInterrupt:
        raise typer.Exit(0 if ready else 1) from None


def _show(report: Report) -> None:
    if report.pairs:
        table = Table("line", Column("pair", overflow="fold"), "use", "turn", "words", "state")
        for pair in report.pairs:
            words = "/".join(str(count) if count else "-" for count in pair.words)
            table.add_row(str(pair.line), escape(pair.id), escape(pair.use), pair.turn, words, _state(pair))
        out.print(table)
    for finding in report.findings:
        if not (finding.unfinished and finding.pair):  # the table says it
            style = "yellow" if finding.unfinished else "red"
            out.print(f"{report.path}: {finding}", style=style, soft_wrap=True, markup=False, highlight=False)
    if report.ready:
        out.print(
            f"[green]ready:[/green] {report.done('default')} default pairs make the vector, {report.done('heldout')} "
            f"held-out ones measure it.\nnext: traitbasis extract --pairs {escape(str(report.path))}",
            soft_wrap=True,
            highlight=False,
        )
    else:
        from traitbasis.pair_check import ENOUGH

        have = ", ".join(f"{report.done(use)} of {count} {use} pairs" for use, count in ENOUGH.items())
        out.print(f"not ready: {have} are done; mistakes: {report.mistakes}", style="bold", highlight=False)


def _state(pair: PairState) -> str:
    missing = f"write {'both sides' if len(pair.missing) == 2 else pair.missing[0]}" if pair.missing else ""
    mistakes = f"[red]{pair.mistakes} mistake{'s' * (pair.mistakes > 1)}[/red]" if pair.mistakes else ""
    return ", ".join(part for part in (missing, mistakes) if part) or "[green]done[/green]"
