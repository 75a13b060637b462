"""Commands that put people in the loop: a blinded sheet of turns, and the votes that come back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Model, app, listed_numbers, out
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.metrics.estimate import Estimate
    from traitbasis.votes import LayerVotes, Votes

annotate_app = typer.Typer(no_args_is_help=True, help="Let people rate turns of a layer sweep, blind, and read votes.")
app.add_typer(annotate_app, name="annotate")


@annotate_app.command("sheet")
def annotate_sheet(
    trait: Annotated[str, typer.Option(help="A shipped trait.")] = "",
    pairs: Annotated[Path | None, typer.Option(help="Your own pair file instead.")] = None,
    model: Model = DEFAULT_MODEL,
    sweep: Annotated[
        Path | None,
        typer.Option(
            help="The sweep's turns; by default vectors/<model>/selection/<trait>.jsonl. Unsteered turns may stand in "
            "baselines.jsonl beside it."
        ),
    ] = None,
    contexts: Annotated[Path | None, typer.Option(help="Contexts of the sweep; by default those that ship.")] = None,
    layers: Annotated[str, typer.Option(help="Layers, with commas; by default all of the sweep.")] = "",
    dose: Annotated[str, typer.Option(help="Dose, or several with commas.")] = "0.2",
    turns_per_layer: Annotated[int, typer.Option(min=1, help="Turns of each layer and dose, and unsteered.")] = 10,
    seed: Annotated[int, typer.Option(help="Decides which turns are drawn, and their order.")] = 0,
    out_folder: Annotated[Path, typer.Option("--out", help="Folder of the sheet.")] = Path("annotation"),
) -> None:
    """Write a blinded sheet of turns for annotators: a page, a spreadsheet, and a key that they must not see.

    Example: traitbasis annotate sheet --trait impatience --layers 8,12,16 --out sheets
    """
    if bool(trait) == (pairs is not None):
        raise typer.BadParameter("give either --trait or --pairs")
    wanted = listed_numbers("--layers", layers, int) or None
    doses = listed_numbers("--dose", dose, float)
    from traitbasis.annotate import make_sheet
    from traitbasis.contexts import read_contexts
    from traitbasis.errors import AnnotationError
    from traitbasis.model import model_slug
    from traitbasis.pairs import load_pairs
    from traitbasis.sweep import read_cells

    pair_set = load_pairs(pairs or trait)
    file = sweep or Path("vectors") / model_slug(model) / "selection" / f"{pair_set.trait}.jsonl"
    header, cells = read_cells(file)
    baselines = file.with_name("baselines.jsonl")
    if not any(cell.condition == "unsteered" for cell in cells) and baselines.is_file():
        other, more = read_cells(baselines)
        for name in ("model_fingerprint", "template_hash", "as_", "contexts_hash"):
            if header.get(name) != other.get(name):
                raise AnnotationError(
                    f"{baselines} and {file} are of different sweeps: "
                    f"{name} is {other.get(name)!r} and {header.get(name)!r}"
                )
        cells = [*cells, *more]
    sheet = make_sheet(
        cells,
        pair_set,
        contexts=read_contexts(contexts),
        layers=wanted,
        dose=doses,
        turns_per_layer=turns_per_layer,
        seed=seed,
        sweep=header,
    )
    table, page, key = sheet.save(out_folder)
    out.print(
        f"{len(sheet.items)} turns to rate for {pair_set.trait}\n"
        f"for annotators: {page}, or as a spreadsheet {table}\n"
        f"keep from them: {key}\n"
        f"then: traitbasis annotate read {key} VOTES.csv...",
        soft_wrap=True,
        markup=False,
        highlight=False,
    )


@annotate_app.command("read")
def annotate_read(
    key: Annotated[Path, typer.Argument(help="The sheet's .key.json, or the folder that holds it.")],
    votes: Annotated[list[Path], typer.Argument(help="CSVs of the annotators.")],
    selection: Annotated[
        Path | None, typer.Option(help="The automatic choice; by default vectors/<model>/selection.json, if there.")
    ] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Write the figures as JSON, too.")] = None,
) -> None:
    """Read votes: what people saw at each layer, how far they agree, and which layer they choose.

    Example: traitbasis annotate read sheets/impatience.key.json anna.csv ben.csv --out votes.json
    """
    from traitbasis.votes import automatic_choice, read_votes

    read = read_votes(key, votes)
    automatic = automatic_choice(read.sheet, selection)
    _print_votes(read)
    _print_choice(read, automatic)
    if out_file is not None:
        out.print("saved:", read.save(out_file, automatic), soft_wrap=True, markup=False)


def _print_votes(votes: Votes) -> None:
    sheet = votes.sheet
    title = f"{sheet.trait} on {sheet.sweep.get('model', 'an unnamed model')}, sheet {sheet.id}"
    table = Table("layer", "dose", "mean rating (95 %)", "usable (95 %)", "turns", "votes", title=escape(title))
    choice = votes.choice()
    for row in votes.by_layer():
        table.add_row(
            "unsteered" if row.layer is None else f"{row.layer}",
            "" if row.layer is None else f"{row.dose:g}",
            _figure(row.rating),
            _figure(row.usable),
            f"{row.turns}",
            f"{row.votes}",
            style="bold" if row is choice else None,
        )
    out.print(table)
    for name, given in votes.given().items():
        out.print(f"{name}: {given} of {len(sheet.items)} turns", markup=False, highlight=False)
    for of, alpha in votes.alpha.items():
        scale = "ordinal" if of == "rating" else "nominal"
        undefined = "undefined: no turn has two votes, or all votes are the same"
        figure = undefined if alpha.value != alpha.value else _figure(alpha)
        out.print(f"Krippendorff's alpha of {of} ({scale}): {figure}", highlight=False, soft_wrap=True)


def _print_choice(votes: Votes, automatic: tuple[int, float] | None) -> None:
    choice = votes.choice()
    if choice is None:
        out.print("[yellow]the votes choose no layer: none is nearly as usable as the unsteered control[/yellow]")
    else:
        out.print(f"the votes choose {_place(choice)}, rated {_figure(choice.rating)}", highlight=False, soft_wrap=True)
    if automatic is None:
        out.print("no automatic choice to compare with; `traitbasis select` makes one")
        return
    layer, dose = automatic
    seen = votes.of(layer, dose)
    doses = ", ".join(f"{row.dose:g}" for row in votes.by_layer() if row.layer == layer)
    rated = f"rated {_figure(seen.rating)}, usable {_figure(seen.usable)}" if seen else "which is not on the sheet"
    if doses and not seen:
        rated += f"; of that layer it has dose {doses}"
    out.print(f"the automatic choice is layer {layer} at dose {dose:g}, {rated}", highlight=False, soft_wrap=True)
    if choice is not None:
        verdict = _verdict(choice, votes.agrees(layer, dose), layer, dose, compared=seen is not None)
        out.print(verdict, highlight=False, soft_wrap=True)


def _verdict(choice: LayerVotes, agrees: bool | None, layer: int, dose: float, *, compared: bool) -> str:
    """compared: whether people saw the layer at the automatic choice's dose."""
    if agrees is None:
        return f"[yellow]people saw nothing of layer {layer}: the choices cannot be compared[/yellow]"
    if choice.layer != layer:
        return f"[yellow]they do not agree: layer {choice.layer} by votes, layer {layer} by measurement[/yellow]"
    if agrees:
        return f"[green]they agree on layer {layer}{'' if compared else '; doses cannot be compared'}[/green]"
    doses = f"{choice.dose:g} by votes, {dose:g} by measurement"
    return f"[yellow]they agree on layer {layer}, not on the dose: {doses}[/yellow]"


def _place(row: LayerVotes) -> str:
    return f"layer {row.layer} at dose {row.dose:g}"


def _figure(estimate: Estimate) -> str:
    if estimate.value != estimate.value:
        return "-"
    if estimate.low != estimate.low:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"
