"""`traitbasis eval realism`, and raters for all four metrics: judges by URL, and people with sheets."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Header, Model, Threads, err, finite, load_lm, out, progress, spare
from traitbasis.cli.evaluate import (
    Dialogues,
    JudgeKey,
    JudgeUrl,
    Judgments,
    Out,
    Pairs,
    Seed,
    Traits,
    choose_pairs,
    eval_app,
    print_agreement,
    save_figures,
)
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.evaluation.judgments import AnyJudgment
    from traitbasis.evaluation.realism import Realism
    from traitbasis.metrics.estimate import Estimate

Kind = Literal["fidelity", "composability", "consistency", "realism"]
KindArgument = Annotated[Kind, typer.Argument(help="Which question is asked.")]


@eval_app.command("realism")
def eval_realism(
    dialogues: Dialogues,
    judgments: Judgments = None,
    model_free: Annotated[
        bool, typer.Option("--model-free/--no-model-free", help="Ask the model-free rater, which loads the model.")
    ] = True,
    reference: Annotated[
        Path | None, typer.Option(help="Turns of real customers, one a line, instead of the pairs' hand-written ones.")
    ] = None,
    traits: Traits = "",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = None,
    as_: Header = "user",
    cache: Annotated[
        Path | None, typer.Option(help="Keep states of turns here (JSONL), so that a killed run goes on.")
    ] = None,
    seed: Seed = 0,
    out_file: Out = None,
) -> None:
    """Which method's customers seem most like real persons: Elo by rater, and how far each is from hand-written turns.

    Example: traitbasis eval realism steered.jsonl prompted.jsonl --judgments judged.jsonl --out realism.json
    """
    from traitbasis.dialogues import read_dialogues
    from traitbasis.errors import EvaluationError
    from traitbasis.evaluation.discriminator import discriminate, hand_written, read_reference
    from traitbasis.evaluation.judgments import Preference, agreement, read_headers, read_judgments, side_of
    from traitbasis.evaluation.realism import (
        FAULTS,
        MARGIN,
        elo_correlations,
        model_free_preferences,
        pairs_of,
        realism,
        score,
    )
    from traitbasis.metrics.estimate import finite
    from traitbasis.sweep import versions

    spare([out_file, cache], [*dialogues, *(judgments or ()), reference])
    headers, found = read_dialogues(dialogues)
    pairs_of(found)  # raises where there is nothing to compare, before a model is loaded
    preferences: list[Preference] = []
    if judgments:
        known = {side_of(dialogue) for dialogue in found}
        preferences = [p for p in read_judgments(judgments, "realism") if {p.first, p.second} <= known]
        if not preferences:
            raise EvaluationError(f"no judgment in {', '.join(map(str, judgments))} is of these dialogues")
    elif not model_free:
        raise typer.BadParameter("without the model-free rater there must be --judgments")
    distance: Mapping[str, Estimate] = {}
    made_by: dict[str, Any] = {"seed": seed, "versions": versions(), "dialogues": headers}
    if model_free:
        read = read_reference(reference) if reference else hand_written(choose_pairs(traits, pairs, found))
        lm = load_lm(model, device, dtype, threads=threads)
        total = len(read) + sum(len(dialogue.said) for dialogue in found)
        with progress("reading turns", total) as advance:
            told = discriminate(lm, found, read, as_=as_, cache=cache, progress=advance, seed=seed)
        distance = told.distance
        preferences += model_free_preferences(found, score(found, told.log_odds))
        made_by |= {
            "model": lm.name,
            "model_fingerprint": lm.fingerprint,
            "as": as_,
            "dtype": lm.dtype_name,
            "reference": str(reference) if reference else "hand-written pair responses",
            "reference_turns": told.reference,
            "faults": FAULTS,
            "margin": MARGIN,
        }
        if len({dialogue.task for dialogue in found}) < 2:
            err.print("[yellow]one task alone: turns are compared by their faults, not with hand-written ones[/yellow]")
    rated = realism(preferences, seed=seed)
    alphas = agreement(preferences, seed=seed)
    correlations = elo_correlations(rated)
    for row in rated:
        out.print(_elo_table(row, distance if row.rater == "model-free" else {}))
        _print_bias(row)
    print_agreement(alphas)
    for (one, other), rho in correlations.items():
        out.print(f"rank correlation of Elo, {one} and {other}: {rho:.2f}", markup=False, highlight=False)
    if out_file is not None:
        if judgments:
            made_by["judgments"] = read_headers(judgments)
        figures = {
            "metric": "realism",
            "raters": {row.rater: row.record for row in rated},
            "distance": {player: value.record for player, value in distance.items()},
            "agreement": {" / ".join(group): value.record for group, value in alphas.items()},
            "elo_rank_correlation": {" / ".join(group): finite(rho) for group, rho in correlations.items()},
            "made_by": made_by,
        }
        save_figures(out_file, figures)


@eval_app.command("judge")
def eval_judge(
    kind: KindArgument,
    dialogues: Dialogues,
    out_file: Annotated[Path, typer.Option("--out", help="Write the judgments here (JSONL); metrics take them.")],
    judge: JudgeUrl = None,
    judge_key: JudgeKey = "",
    traits: Traits = "",
    pairs: Pairs = None,
    compare: Annotated[
        list[Path] | None,
        typer.Option("--with", help="Judgments of others (people, instruments), to report agreement with them."),
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="Answers are kept here, so that a run goes on; by default beside --out.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time, for each judge.")] = 4,
    timeout: Annotated[float, typer.Option(min=1, callback=finite, help="Seconds for one request.")] = 60.0,
) -> None:
    """Ask judges, models behind OpenAI-compatible URLs, about whole dialogues.

    Example: traitbasis eval judge realism a.jsonl b.jsonl --judge http://localhost:9000/v1#MODEL --out judged.jsonl
    """
    if not judge:
        raise typer.BadParameter("give at least one --judge URL#MODEL")
    from traitbasis.dialogues import read_dialogues
    from traitbasis.evaluation.judges import raters_from
    from traitbasis.evaluation.judgments import (
        Preference,
        agreement,
        courses_of,
        judged,
        read_judgments,
        write_judgments,
    )
    from traitbasis.evaluation.realism import pairs_of, realism
    from traitbasis.sweep import versions

    spare([out_file, cache], [*dialogues, *(compare or ())], over="judgments")
    headers, found = read_dialogues(dialogues)
    others = list[Any](read_judgments(compare, kind)) if compare else []
    asked = judged(kind, found)
    matched = pairs_of(asked) if kind == "realism" else []
    total = {"realism": 2 * len(matched), "consistency": len(courses_of(asked))}.get(kind, len(asked))
    sets = [] if kind == "realism" else choose_pairs(traits, pairs, asked)
    kept = cache or out_file.with_suffix(".answers.jsonl")
    raters = raters_from(judge, judge_key or None, kept, concurrency=concurrency, timeout=timeout)
    said: list[AnyJudgment] = []
    for rater in raters:
        with progress(f"asking {rater.name}", total) as advance:
            if kind == "realism":
                said += rater.realism(matched, progress=advance)
            elif kind == "consistency":
                definitions = {pair_set.trait: (pair_set.definition, pair_set.opposite) for pair_set in sets}
                said += rater.consistency(asked, definitions, progress=advance)
            else:
                said += rater.traits(asked, {s.trait: s.definition for s in sets}, progress=advance)
    made_by = {
        "raters": [rater.record for rater in raters],
        "traits": [pair_set.trait for pair_set in sets],
        "versions": versions(),
        "dialogues": headers,
    }
    write_judgments(out_file, kind, said, made_by)
    for rater in raters:
        record = rater.record
        out.print(
            f"{rater.name}: {sum(j.rater == rater.name for j in said)} judgments, {record['asked']} requests, "
            f"{record['unreadable']} unreadable answers",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if kind == "realism":
        for row in realism([judgment for judgment in said if isinstance(judgment, Preference)]):
            _print_bias(row)
    print_agreement(agreement([*said, *others]))
    out.print("saved:", out_file, soft_wrap=True, markup=False)


@eval_app.command("sheet")
def eval_sheet(
    kind: KindArgument,
    dialogues: Dialogues,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the sheet.")],
    items: Annotated[int, typer.Option(min=1, help="Different items; a tenth as many come twice.")] = 40,
    traits: Traits = "",
    pairs: Pairs = None,
    seed: Annotated[int, typer.Option(help="Decides which items are drawn, their sides and their order.")] = 0,
) -> None:
    """Write a blinded sheet for annotators: a page, a spreadsheet, and a key that they must not see.

    Example: traitbasis eval sheet realism steered.jsonl prompted.jsonl --out sheets --items 40
    """
    from traitbasis.dialogues import read_dialogues
    from traitbasis.evaluation.judgments import judged
    from traitbasis.evaluation.sheets import make_sheet

    headers, found = read_dialogues(dialogues)
    sets = [] if kind == "realism" else choose_pairs(traits, pairs, judged(kind, found))
    definitions = {pair_set.trait: (pair_set.definition, pair_set.opposite) for pair_set in sets}
    sheet = make_sheet(kind, found, definitions, items=items, seed=seed, headers=headers)
    table, page, key = sheet.save(out_folder)
    repeats = sum(bool(item.repeats) for item in sheet.items)
    out.print(
        f"{len(sheet.items) - repeats} items of {kind}, and {repeats} of them a second time\n"
        f"for annotators: {page}, or as a spreadsheet {table}\n"
        f"keep from them: {key}\n"
        f"then: traitbasis eval votes {key} VOTES.csv... --out judgments.jsonl",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


@eval_app.command("votes")
def eval_votes(
    key: Annotated[Path, typer.Argument(help="The sheet's .key.json.")],
    votes: Annotated[list[Path], typer.Argument(help="CSVs of the annotators.")],
    out_file: Annotated[Path, typer.Option("--out", help="Write the judgments here (JSONL); metrics take them.")],
) -> None:
    """Turn annotators' files into judgments, as all metrics take them.

    Example: traitbasis eval votes sheets/realism.key.json anna.csv ben.csv --out people.jsonl
    """
    from traitbasis.evaluation.judgments import agreement, write_judgments
    from traitbasis.evaluation.sheets import Sheet, read_votes
    from traitbasis.sweep import versions

    spare([out_file], [key, *votes], over="judgments")
    sheet = Sheet.load(key)
    read = read_votes(sheet, votes)
    said = read.judgments()
    repeated = read.repeated()
    for rater, given in read.answers.items():
        same, twice = repeated[rater]
        again = f", {same} of {twice} repeated ones alike" if twice else ""
        out.print(f"{rater}: {len(given)} of {len(sheet.items)} items{again}", markup=False, highlight=False)
    print_agreement(agreement(said))
    made_by = {
        "sheet": sheet.id,
        "seed": sheet.seed,
        "annotators": {rater: len(given) for rater, given in read.answers.items()},
        "repeated": {rater: {"alike": same, "of": twice} for rater, (same, twice) in repeated.items()},
        "comments": [dict(zip(("annotator", "item", "comment"), said, strict=True)) for said in read.comments],
        "versions": versions(),
        "dialogues": sheet.dialogues,
    }
    write_judgments(out_file, sheet.kind, said, made_by)
    out.print("saved:", out_file, soft_wrap=True, markup=False)


# ---- Shown


def _elo_table(row: Realism, distance: Mapping[str, Estimate]) -> Table:
    title = f"realism by {row.rater}: {row.pairs} pairs, {row.ties} of them ties"
    names = ("method", "Elo [95 %]", "win rate [95 %]", "pairs", *(["realism distance"] if distance else []))
    table = Table(*names, title=escape(title))
    for player in row.ratings.players:
        cells = [format(player.elo, ".0f"), f"{player.win_rate}", f"{player.comparisons}"]
        cells += [f"{distance[player.player]}"] if distance else []
        table.add_row(*map(escape, [player.player, *cells]))
    return table


def _print_bias(row: Realism) -> None:
    if row.ratings.bounded:
        out.print(
            f"[yellow]{escape(row.rater)}: some method never won or never lost; its Elo is bounded by one more tie of "
            "every two methods[/yellow]",
            soft_wrap=True,
        )
    if row.rater == "model-free":
        return
    line = f"{row.rater}: what was shown first was preferred in {row.first} of decided answers"
    if row.twice:
        line += f"; {row.inconsistent} of {row.twice} pairs got another answer in the other order, and are ties"
    style = "yellow" if row.biased else None
    out.print(escape(line + ("; position-biased" if row.biased else "")), style=style, highlight=False, soft_wrap=True)
