"""Commands that choose by measurement: the layer of a trait, and the doses of its levels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Header, Model, Threads, app, err, listed, listed_numbers, out
from traitbasis.cli.work import Setup, Work, team
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from torch import Tensor

    from traitbasis.basis import Basis, Column
    from traitbasis.contexts import EvaluationContext
    from traitbasis.pairs import PairSet
    from traitbasis.select import Selection

Trait = Annotated[str, typer.Option(help="Shipped traits and emotions, with commas; 'all' traits; 'emotions'.")]
Pairs = Annotated[list[Path] | None, typer.Option(help="Your own pair file instead; several times for several.")]
Contexts = Annotated[Path | None, typer.Option(help="Evaluation contexts (YAML); by default those that ship.")]
Seed = Annotated[int, typer.Option(min=0, help="Another sample of turns.")]
Folder = Annotated[Path, typer.Option("--out", help="Folder of vectors; everything goes to <model>/ in it.")]
Doses = Annotated[str, typer.Option(help="Doses to try, with commas: in sizes of the hidden state.")]
Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Processes, each with its own model; by default one a core for a small model on a CPU."),
]
Tokens = Annotated[int, typer.Option(min=8, help="Longest turn, in tokens.")]


@app.command()
def select(
    trait: Trait = "",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    layers: Annotated[
        str, typer.Option(help="Where turns are written: auto (the most promising), all, or numbers with commas.")
    ] = "auto",
    candidates: Annotated[int, typer.Option(min=1, help="How many layers 'auto' takes.")] = 3,
    doses: Doses = "0.1,0.2,0.3",
    turns: Annotated[int, typer.Option(min=2, help="Turns at each layer and dose.")] = 10,
    max_tokens: Tokens = 40,
    seed: Seed = 0,
    contexts: Contexts = None,
    report: Annotated[Path | None, typer.Option(help="Write what was found as one HTML file, too.")] = None,
    judge_url: Annotated[
        str, typer.Option(help="URL of an OpenAI-compatible judge, a third instrument (extra `judge`).")
    ] = "",
    judge_model: Annotated[str, typer.Option(help="The judge's model there.")] = "",
    judge_key: Annotated[
        str, typer.Option(help="Its API key, if it wants one.", envvar="TRAITBASIS_JUDGE_KEY", show_envvar=True)
    ] = "",
    folder: Folder = Path("vectors"),
    as_: Header = "user",
    device: Device = "auto",
    dtype: Dtype = "fastest",
    threads: Threads = None,
    jobs: Jobs = None,
) -> None:
    """Choose each trait's layer and dose by measurement: expression, facts, damage, on tasks that are in no pair.

    Goes on where it was when it was killed. Repeatable with a seed on one machine, dtype and number of threads.

    Example: traitbasis select --trait impatience --report impatience.html
    """
    from traitbasis.errors import PairError
    from traitbasis.pairs import file_hash
    from traitbasis.select import read_selections, save_selections
    from traitbasis.sweep import versions

    if bool(judge_url) != bool(judge_model):
        raise typer.BadParameter("a judge needs both --judge-url and --judge-model")
    pair_sets, tasks, tried = _pair_sets(trait, pairs), _contexts(contexts), listed_numbers("--doses", doses, float)
    for pair_set in pair_sets:
        if not pair_set.select("heldout"):
            raise PairError(f"{pair_set.trait}: no pair is marked 'use: heldout'; nothing independent can measure it")
    drawn = {"contexts": tasks, "as_": as_, "turns": turns, "seed": seed, "max_tokens": max_tokens}
    setup = Setup("selection", model, folder, device, dtype, threads, drawn)
    with team(setup, jobs, len(pair_sets)) as work:
        where = {"auto": None, "all": [*range(work.depth)]}
        options: dict[str, Any] = {
            "layers": where[layers] if layers in where else listed_numbers("--layers", layers, int),
            "candidates": candidates,
            "doses": tried,
        }
        if judge_url:
            options["judge"] = judge_url, judge_model, judge_key or None
        home, made_by = work.home, {**work.settings, **versions()}
        path = home / "selection.json"
        if path.is_file():
            read_selections(path)  # complain before the work
        by_trait = {pair_set.trait: {**made_by, "pairs": file_hash(pair_set)} for pair_set in pair_sets}
        selections: dict[str, Selection] = {}
        for selection in work.each("selecting", _select_one, [(pair_set, options) for pair_set in pair_sets]):
            selections[selection.trait] = selection
            save_selections([selection], path, by_trait)
            _tell(selection)
    found = [selections[pair_set.trait] for pair_set in pair_sets]
    _print_selections(found)
    out.print("saved:", path, soft_wrap=True, markup=False)
    if report:
        from traitbasis.report import write_report
        from traitbasis.sweep import BASELINES, read_cells

        cells = {s.trait: read_cells(home / "selection" / f"{s.trait}.jsonl")[1] for s in found}
        shared = read_cells(home / "selection" / f"{BASELINES}.jsonl")[1]
        write_report(report, found, cells, shared, {p.trait: p for p in pair_sets}, made_by, contexts=tasks)
        out.print("report:", report, soft_wrap=True, markup=False)


@app.command()
def calibrate(
    trait: Trait = "all",
    pairs: Pairs = None,
    model: Model = DEFAULT_MODEL,
    doses: Doses = "0.05,0.1,0.15,0.2,0.25,0.3,0.4,0.5,0.7",
    turns: Annotated[int, typer.Option(min=2, help="Turns at each dose.")] = 12,
    max_tokens: Tokens = 40,
    seed: Seed = 1,
    contexts: Contexts = None,
    folder: Folder = Path("vectors"),
    as_: Header = "user",
    device: Device = "auto",
    dtype: Dtype = "fastest",
    threads: Threads = None,
    jobs: Jobs = None,
) -> None:
    """Measure what low, medium and high are for each trait at its selected layer, and write the basis.

    'all' means every trait that was selected. One that was found not steerable gets a column that is served only when
    forced. Columns of other traits that the basis has already stay as they are.

    Example: traitbasis select --trait all && traitbasis calibrate
    """
    from filelock import FileLock

    from traitbasis.basis import Basis
    from traitbasis.calibrate import with_columns
    from traitbasis.errors import SweepError
    from traitbasis.model import model_slug
    from traitbasis.pairs import file_hash, has_pairs
    from traitbasis.select import read_selection, read_selections

    home, tasks, tried = folder / model_slug(model), _contexts(contexts), listed_numbers("--doses", doses, float)
    chosen = read_selections(home / "selection.json")
    if trait == "all" and not pairs:
        if own := sorted(trait for trait in chosen if not has_pairs(trait)):
            err.print(f"[yellow]left alone: {escape(', '.join(own))}; give their files with --pairs[/yellow]")
        trait = ",".join(sorted(filter(has_pairs, chosen)))
    pair_sets = _pair_sets("" if pairs else trait, pairs)
    for pair_set in pair_sets:
        if pair_set.trait not in chosen:
            raise SweepError(f"no layer was selected for {pair_set.trait}; run `traitbasis select` for it first")
        if chosen[pair_set.trait].get("made_by", {}).get("pairs") != file_hash(pair_set):
            raise SweepError(f"the pairs of {pair_set.trait} have changed since its selection; run `traitbasis select`")
    asked = [(pair_set, read_selection(chosen[pair_set.trait]), tried) for pair_set in pair_sets]
    drawn = {"contexts": tasks, "as_": as_, "turns": turns, "seed": seed, "max_tokens": max_tokens}
    with team(Setup("calibration", model, folder, device, dtype, threads, drawn), jobs, len(pair_sets)) as work:
        for name in (pair_set.trait for pair_set in pair_sets):
            if (made_on := chosen[name]["made_by"].get("model_fingerprint")) != work.settings["model_fingerprint"]:
                raise SweepError(
                    f"{name} was selected on another model (fingerprint {made_on}, and this is "
                    f"{work.settings['model_fingerprint']}); run `traitbasis select` on this one"
                )
        made = {
            found.trait: (found, row, notes) for found, row, notes in work.each("calibrating", _calibrate_one, asked)
        }
    path = home / "basis.safetensors"
    with FileLock(home / ".basis.lock"):
        before = Basis.load(path) if path.is_file() else None
        basis = with_columns(before, {p.trait: made[p.trait][:2] for p in pair_sets})
        basis.save(path)
    _print_levels(basis, {name: notes for name, (_, _, notes) in made.items()})
    out.print("saved:", path, soft_wrap=True, markup=False)


def _select_one(work: Work, pair_set: PairSet, options: dict[str, Any], progress: Callable[[float], None]) -> Selection:
    from traitbasis.metrics.judge import Judge

    if isinstance(asked := options.get("judge"), tuple):  # a judge itself cannot go to another process
        options = {**options, "judge": Judge(*asked, cache=work.home / "selection" / "judge.jsonl")}
    selector = work.selector(**options)
    selector.progress = lambda done: progress(done / selector.steps)
    return selector.select(pair_set)


def _calibrate_one(
    work: Work, pair_set: PairSet, selection: Selection, doses: list[float], progress: Callable[[float], None]
) -> tuple[Column, Tensor, str]:
    from traitbasis.calibrate import calibrate as measure
    from traitbasis.calibrate import column
    from traitbasis.select import best_layers

    selector = work.selector(folder="calibration")
    vector = selector.vector(pair_set)
    layer = best_layers(selection.likelihood, 1)[0] if selection.layer is None else selection.layer
    levels = measure(
        selector, pair_set, layer, selection.screening, doses=doses, progress=lambda done: progress(done / len(doses))
    )
    notes = [] if selection.steerable else ["only when forced"]
    notes += ["no damage at the largest dose"] if levels.capped else []
    notes += [] if levels.rises else ["expression does not rise over its levels"]
    return column(levels, vector, layer, selection.steerable), vector.vector[layer], "; ".join(notes)


def _pair_sets(traits: str, files: list[Path] | None) -> list[PairSet]:
    from traitbasis.pairs import load_pairs, written_out

    if bool(traits) == bool(files):
        raise typer.BadParameter("give either --trait or --pairs")
    return [load_pairs(source) for source in files or written_out(listed(traits))]


def _contexts(path: Path | None) -> list[EvaluationContext]:
    from traitbasis.contexts import read_contexts

    return read_contexts(path)


def _tell(selection: Selection) -> None:
    """A line as soon as a trait is done."""
    where = f"layer {selection.layer}, dose {selection.dose}" if selection.steerable else selection.reason
    err.print(f"{escape(selection.trait)}: {escape(where)}", highlight=False, soft_wrap=True)


def _print_selections(selections: list[Selection]) -> None:
    table = Table("trait", "layer", "dose", "expression", "over random", "prompt-only", "facts", "unsteered", "AUC")
    for selection in selections:
        chosen = next((s for s in selection.summaries if (s.layer, s.dose) == (selection.layer, selection.dose)), None)
        cells = (
            [f"{chosen.layer}", f"{chosen.dose:g}", f"{chosen.gain:+.2f} [{chosen.low:+.2f}, {chosen.high:+.2f}]"]
            if chosen
            else [f"{selection.layer}", f"{selection.dose:g}", "[yellow]costs facts[/yellow]"]
            if selection.steerable
            else ["", "", "[yellow]not steerable[/yellow]"]
        )
        lead = f"{chosen.over_random:+.2f}" if chosen and chosen.over_random is not None else ""
        table.add_row(
            selection.trait,
            *cells,
            lead,
            f"{selection.prompted.gain:+.2f}",
            f"{chosen.facts:.2f}" if chosen else "",
            f"{selection.prompted.facts_unsteered:.2f}",
            f"{max(selection.screening.auc):.2f}",
        )
    out.print(table)
    for selection in selections:
        if not selection.steerable:
            out.print(
                f"{selection.trait} is not steerable on this model: {selection.reason}", soft_wrap=True, markup=False
            )


def _print_levels(basis: Basis, notes: dict[str, str]) -> None:
    table = Table("trait", "layer", "low", "medium", "high", "limit", "", title="doses")
    for column in basis.columns:
        medium = basis.dose({column.trait: 1.0})
        doses = [f"{intensity * medium:.3f}" for intensity in column.levels.values()]
        limit = "not calibrated" if column.limit is None else f"{column.limit:.3f}"
        note = notes.get(column.trait, "" if column.steerable else "only when forced")
        table.add_row(column.trait, f"{column.layer}", *doses, limit, note)
    out.print(table)
