"""`traitbasis eval consistency` and `eval conduct`: what becomes of a customer over a whole dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Header, Model, Threads, err, out, spare
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
    from traitbasis.evaluation.conduct import Group
    from traitbasis.evaluation.consistency import Comparison, Consistency, Row


@eval_app.command("consistency")
def eval_consistency(
    dialogues: Dialogues,
    least_turns: Annotated[
        int, typer.Option(min=3, help="Leave out dialogues in which the customer says something less often.")
    ] = 10,
    judgments: Judgments = None,
    instruments: Annotated[
        bool, typer.Option("--instruments/--no-instruments", help="Judge by the instruments, which load the model.")
    ] = True,
    traits: Traits = "",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_: Header = "user",
    cache: Cache = None,
    plot: Annotated[Path | None, typer.Option(help="Draw expression by turn here: svg, png or pdf.")] = None,
    seed: Seed = 0,
    out_file: Out = None,
) -> None:
    """Does a trait last over ten turns and more, fade or escalate? Beside what a customer without the trait gets.

    Example: traitbasis eval consistency steered.jsonl prompted.jsonl unsteered.jsonl --plot curves.svg --out FILE
    """
    from traitbasis.dialogues import read_dialogues
    from traitbasis.evaluation.consistency import consistency, expression_of
    from traitbasis.evaluation.judgments import agreement, read_headers, read_judgments
    from traitbasis.evaluation.transcripts import provenance

    spare([out_file, plot, cache], [*dialogues, *(judgments or ())])
    headers, found = read_dialogues(dialogues)
    verdicts = read_judgments(judgments, "consistency") if judgments else []
    if not (instruments or verdicts):
        raise typer.BadParameter("without the instruments there must be --judgments")
    made_by = provenance(headers, found, least_turns=least_turns, seed=seed)
    made_by["judgments"] = read_headers(judgments or ())
    consistency(found, least_turns=least_turns)  # what cannot be measured is said before a model is loaded
    expression = None
    if instruments:
        reading = Reading(model, device, dtype, threads, as_, cache)
        made, scores = reading.of(found, choose_pairs(traits, pairs, found))
        expression = expression_of(scores)
        for line in made.quality.lines:
            out.print(line, markup=False, highlight=False, soft_wrap=True)
        made_by |= {"instruments": made.settings, "quality": made.quality.record}
    measured = consistency(found, expression, verdicts, least_turns=least_turns, seed=seed)
    alphas = agreement(measured.verdicts, seed=seed)
    _print_consistency(measured)
    print_agreement(alphas)
    if plot:
        from traitbasis.evaluation.plots import consistency_figure, save_figure

        out.print("saved:", save_figure(consistency_figure(measured), plot), soft_wrap=True, markup=False)
    if out_file:
        agreed = [{"raters": list(group), "alpha": alpha.record} for group, alpha in alphas.items()]
        save_figures(out_file, {"made_by": made_by, **measured.record, "agreement": agreed})


@eval_app.command("conduct")
def eval_conduct(
    dialogues: Annotated[
        list[Path], typer.Argument(help="Files of dialogues (eval collect), or of harness runs (bench).")
    ],
    by: Annotated[
        Literal["method", "condition"], typer.Option(help="One row a method, or one for each of its conditions.")
    ] = "method",
    seed: Seed = 0,
    out_file: Out = None,
) -> None:
    """Facts told and invented, stopping, role flips, openers, manner, length: off the text, without a model.

    Example: traitbasis eval conduct dialogues/*.jsonl --by condition --out conduct.json
    """
    from traitbasis.evaluation.conduct import DEFINITIONS, conduct
    from traitbasis.evaluation.transcripts import provenance, read_transcripts

    spare([out_file], dialogues)
    headers, found = read_transcripts(dialogues)
    groups = conduct(found, by_condition=by == "condition", seed=seed)
    for part, names in DEFINITIONS.items():
        out.print(_conduct_table(part, [*names], groups))
    if any(group.pairs for group in groups):
        out.print("Δ: paired difference to the unsteered user, same task and trial.", highlight=False)
    if out_file:
        made_by = provenance(headers, found, by=by, seed=seed)
        save_figures(
            out_file, {"made_by": made_by, "definitions": DEFINITIONS, "groups": [group.record for group in groups]}
        )


# ---- Consistency, shown


def _print_consistency(found: Consistency) -> None:
    from traitbasis.evaluation.consistency import LEAST_NEUTRAL

    for rater in dict.fromkeys(row.rater for row in found.rows):
        out.print(_shares_table(rater, [row for row in found.rows if row.rater == rater]))
    for comparison in found.comparisons:
        out.print(_comparison_table(comparison))
        by_turn = ", ".join(f"{point.value.value:+.2f}" for point in comparison.broken)
        out.print(f"broken turns, difference by turn: {by_turn}", highlight=False, soft_wrap=True)
    for yardstick in found.yardsticks:
        if not yardstick.calibrated:
            zero = f"above {yardstick.baseline}'s neutral dialogues" if yardstick.baseline else "raw"
            err.print(
                f"{yardstick.trait}: {yardstick.neutral} long neutral dialogues of {LEAST_NEUTRAL} needed; "
                f"expression is {zero}, the threshold {yardstick.threshold:g} and the tolerance "
                f"{yardstick.tolerance:g} are defaults",
                style="yellow", markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip
    for method, number in sorted(found.short.items()):
        if number:
            err.print(
                f"{method}: {number} dialogues with fewer than {found.least_turns} turns are left out",
                style="yellow", markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _shares_table(rater: str, rows: Sequence[Row]) -> Table:
    from traitbasis.evaluation.consistency import SHARES

    title = f"long-range consistency by {rater}; neutral rows are what a user without the trait gets"
    table = Table("method", "trait", *SHARES, "at the end", "n", title=escape(title))
    for before, row in zip([None, *rows], rows, strict=False):
        if before and before.trait != row.trait:
            table.add_section()
        name = f"{row.method}, neutral" if row.neutral else row.method
        cells = [name, row.trait, *(f"{share}" for share in row.shares.values()), f"{row.end}", f"{row.cases}"]
        table.add_row(*map(escape, cells), style="dim" if row.neutral else None)
    return table


def _comparison_table(found: Comparison) -> Table:
    title = f"{found.method}, {found.trait}: clean past and steered past ({found.pairs} pairs)"
    table = Table("", "clean past", "steered past", "difference", title=escape(title))
    for name, estimates in found.figures.items():
        table.add_row(escape(name), *(escape(f"{estimate}") for estimate in estimates))
    return table


# ---- Conduct, shown


def _conduct_table(part: str, names: Sequence[str], groups: Sequence[Group]) -> Table:
    """A row a figure, since there are more of them than methods."""
    table = Table("", *(escape(group.name) for group in groups), title=part)
    for name in names:
        cells = []
        for group in groups:
            difference = group.differences.get(name)
            known = difference is not None and difference.value == difference.value
            cells.append(escape(f"{group.figures[name]}") + (escape(f"\nΔ {difference:+.2f}") if known else ""))
        table.add_row(name, *cells)
    counts = [f"{group.dialogues} in {group.tasks} tasks" for group in groups]
    table.add_row("dialogues", *counts, style="dim")
    return table
