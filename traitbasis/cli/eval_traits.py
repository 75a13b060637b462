"""`traitbasis eval fidelity` and `eval composability`: are the traits that were asked for the ones that are found?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Header, Model, Threads, out, spare
from traitbasis.cli.evaluate import (
    Cache,
    Dialogues,
    Judgments,
    Out,
    Pairs,
    Reading,
    Seed,
    Traits,
    choose_pairs,
    eval_app,
    print_agreement,
    save_figures,
)
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.dialogues import Dialogue
    from traitbasis.evaluation.composability import Composability
    from traitbasis.evaluation.fidelity import Fidelity
    from traitbasis.evaluation.findings import Findings
    from traitbasis.metrics.estimate import Estimate

WithInstruments = Annotated[
    bool, typer.Option("--instruments/--no-instruments", help="Let the package's namer rate, which loads the model.")
]
Html = Annotated[Path | None, typer.Option(help="Write the tables as a page here.")]


@eval_app.command("fidelity")
def eval_fidelity(
    dialogues: Dialogues,
    judgments: Judgments = None,
    instruments: WithInstruments = True,
    traits: Traits = "",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_: Header = "user",
    cache: Cache = None,
    seed: Seed = 0,
    out_file: Out = None,
    html: Html = None,
) -> None:
    """Is the intended trait the one that is named, of all traits and none, and does a higher level show more of it?

    Example: traitbasis eval fidelity steered.jsonl prompted.jsonl --cache scores.jsonl --out fidelity.json
    """
    from traitbasis.evaluation.fidelity import fidelity

    spare([out_file, html, cache], [*dialogues, *(judgments or ())])
    reading = Reading(model, device, dtype, threads, as_, cache) if instruments else None
    with _page(html):
        rated = _rate("fidelity", dialogues, judgments, traits, pairs, reading, seed)
        rows = fidelity(rated.dialogues, rated.raters, rated.traits, seed=seed)
        out.print(_fidelity_table(rows))
        for row in rows:
            _print_confusion(row)
        _finish("fidelity", rated, rows, out_file, seed)


@eval_app.command("composability")
def eval_composability(
    dialogues: Dialogues,
    judgments: Judgments = None,
    instruments: WithInstruments = True,
    traits: Traits = "",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_: Header = "user",
    cache: Cache = None,
    seed: Seed = 0,
    out_file: Out = None,
    html: Html = None,
) -> None:
    """Of a mix of traits: is each of them found, and nothing else?

    Example: traitbasis eval composability steered.jsonl prompted.jsonl --cache scores.jsonl --out mixes.json
    """
    from traitbasis.evaluation.composability import composability

    spare([out_file, html, cache], [*dialogues, *(judgments or ())])
    reading = Reading(model, device, dtype, threads, as_, cache) if instruments else None
    with _page(html):
        rated = _rate("composability", dialogues, judgments, traits, pairs, reading, seed)
        rows = composability(rated.dialogues, rated.raters, rated.traits, seed=seed)
        out.print(_composability_table(rows))
        out.print(_mix_table(rows))
        _finish("composability", rated, rows, out_file, seed)


# ---- Raters


@dataclass(frozen=True)
class _Rated:
    dialogues: Sequence[Dialogue]
    traits: Sequence[str]
    raters: Mapping[str, Findings]
    notes: Sequence[str]
    made_by: dict[str, Any]


def _rate(
    kind: Literal["fidelity", "composability"],
    paths: Sequence[Path],
    judgments: Sequence[Path] | None,
    traits: str,
    pairs: Sequence[Path] | None,
    reading: Reading | None,
    seed: int,
) -> _Rated:
    """What every rater finds in the dialogues that the metric is about."""
    from traitbasis.dialogues import read_dialogues
    from traitbasis.errors import EvaluationError
    from traitbasis.evaluation.findings import NAMER, judged_findings
    from traitbasis.evaluation.judgments import judged, read_headers, read_judgments, side_of
    from traitbasis.evaluation.transcripts import provenance

    if reading is None and not judgments:
        raise typer.BadParameter("without the instruments there must be --judgments")
    headers, every = read_dialogues(paths)
    found = judged(kind, every)
    pair_sets = choose_pairs(traits, pairs, every)  # so that both metrics share instruments and scores
    made_by = provenance(headers, found, traits=[pair_set.trait for pair_set in pair_sets], seed=seed)
    raters: dict[str, Findings] = {}
    if judgments:
        sides = {side_of(dialogue) for dialogue in found}
        told = [j for j in read_judgments(judgments, kind) if (j.method, j.key) in sides]
        if not told:
            raise EvaluationError(f"no judgment in {', '.join(map(str, judgments))} is of these dialogues")
        raters |= judged_findings(told)
        made_by["judgments"] = read_headers(judgments)
    notes: list[str] = []
    if reading is not None:
        from traitbasis.evaluation.findings import named_findings, present_findings

        made, scores = reading.of(found, pair_sets)
        if kind == "fidelity":
            raters = {NAMER: named_findings(found, scores), **raters}
        else:
            raters = {NAMER: present_findings(found, scores, made.quality.threshold), **raters}
        notes = [f"read by {made.settings['model']} ({made.settings['dtype']}), unsteered", *made.quality.lines]
        made_by |= {"instruments": made.settings, "quality": made.quality.record}
    return _Rated(found, [pair_set.trait for pair_set in pair_sets], raters, notes, made_by)


def _finish(
    metric: str,
    rated: _Rated,
    rows: Sequence[Fidelity] | Sequence[Composability],
    out_file: Path | None,
    seed: int,
) -> None:
    """Agreement, what the instruments are worth, and the file."""
    from traitbasis.evaluation.findings import as_judgments
    from traitbasis.evaluation.judgments import agreement

    said = [judgment for rater, findings in rated.raters.items() for judgment in as_judgments(rater, findings)]
    alphas = agreement(said, seed=seed)
    print_agreement(alphas)
    for line in rated.notes:
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    if out_file is not None:
        agreed = {" / ".join(group): value.record for group, value in alphas.items()}
        figures = [row.record for row in rows]
        save_figures(out_file, {"metric": metric, "rows": figures, "agreement": agreed, "made_by": rated.made_by})


# ---- Shown


@contextmanager
def _page(html: Path | None) -> Iterator[None]:
    """What is printed meanwhile, as a page too."""
    if html is None:
        yield
        return
    from traitbasis.files import write_whole

    out.record = True
    try:
        yield
        page = out.export_html(clear=True, inline_styles=True)
    finally:
        out.record = False
    write_whole(html, page)
    out.print("saved:", html, soft_wrap=True, markup=False)


def _table(title: str, *columns: str) -> Table:
    return Table("rater", "method", "dialogues", *columns, title=title)


def _add(table: Table, row: Fidelity | Composability, *cells: object) -> None:
    table.add_row(*(escape(str(cell)) for cell in (row.rater, row.method, row.dialogues, *cells)))


def _fidelity_table(rows: Sequence[Fidelity]) -> Table:
    table = _table(
        "fidelity [95 %]", "all", "with a trait", "neutral", "chance", "shuffled", "first turn", "levels in order",
        "level named",
    )  # fmt: skip
    for row in rows:
        first: Estimate | str = row.by_turn[0] if row.by_turn else "-"
        levels = f"{row.level} of {row.level_pairs}" if row.level_pairs else "-"
        _add(
            table,
            row,
            row.named,
            row.of_traits,
            row.neutral,
            f"{row.chance:.2f}",
            row.shuffled,
            first,
            levels,
            row.named_level,
        )
    return table


def _print_confusion(row: Fidelity) -> None:
    """Intended in rows, named in columns."""
    named = sorted({name for counts in row.confusion.values() for name in counts})
    table = Table("intended", *map(escape, named), title=escape(f"named by {row.rater}: {row.method}"))
    for intended, counts in row.confusion.items():
        table.add_row(escape(intended), *(str(counts.get(name, "")) for name in named))
    out.print(table)


def _composability_table(rows: Sequence[Composability]) -> Table:
    table = _table(
        "composability [95 %]", "exactly the mix", "all of it", "each trait", "false traits", "ranked first (chance)",
        "shuffled",
    )  # fmt: skip
    for row in rows:
        ranked = "-" if row.chance_ranked != row.chance_ranked else f"{row.ranked} ({row.chance_ranked:.2f})"
        _add(table, row, row.exact, row.every, row.each, row.false, ranked, row.shuffled)
    return table


def _mix_table(rows: Sequence[Composability]) -> Table:
    table = Table("rater", "method", "mix", "exactly the mix [95 %]")
    for row in rows:
        for mix, figure in row.by_mix.items():
            table.add_row(*map(escape, (row.rater, row.method, mix, str(figure))))
    return table
