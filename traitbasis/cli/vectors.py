"""Commands that make vectors and bases."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Column, Table

from traitbasis.cli.common import (
    BasisFile,
    Device,
    Dtype,
    Header,
    Model,
    Threads,
    app,
    basis_app,
    err,
    listed,
    load_lm,
    out,
    progress,
)
from traitbasis.embedded import DEFAULT_MODEL

if TYPE_CHECKING:
    from traitbasis.basis import Basis
    from traitbasis.composition import Leakage
    from traitbasis.pairs import PairSet

Pairs = Annotated[list[Path] | None, typer.Option(help="Pair files of traits of your own; several times for several.")]


@app.command()
def extract(
    trait: Annotated[str, typer.Option(help="A shipped trait or emotion, or 'all' traits, or 'emotions'.")] = "",
    pairs: Annotated[Path | None, typer.Option(help="Your own pair file instead.")] = None,
    model: Model = DEFAULT_MODEL,
    n_pairs: Annotated[int | None, typer.Option(help="How many pairs; by default those marked 'default'.")] = None,
    span: Annotated[
        Literal["response", "conversation"],
        typer.Option(help="Tokens to average: the response's, or the whole conversation's (the paper's formula)."),
    ] = "response",
    as_: Header = "user",
    out_folder: Annotated[Path, typer.Option("--out", help="Folder; the file is <model>/<trait>.safetensors.")] = Path(
        "vectors"
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Responses read together.")] = 8,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """Extract trait vectors from contrastive pairs.

    Examples: traitbasis extract --trait impatience; traitbasis extract --trait frustration; traitbasis extract --pairs
    mine.yaml --model ./my-model
    """
    from traitbasis.extract import extract as extract_vector
    from traitbasis.pairs import load_pairs, written_out

    if bool(trait) == (pairs is not None):
        raise typer.BadParameter("give either --trait or --pairs")
    sources = [pairs] if pairs else written_out([trait])
    pair_sets = [load_pairs(source) for source in sources]  # every file is checked before the model is loaded
    chosen = [pair_set.for_extraction(n_pairs) for pair_set in pair_sets]
    for pair_set in pair_sets:
        for word, gap in pair_set.shortcuts().items():
            err.print(
                f"[yellow]{pair_set.trait}: {escape(repr(word))} tells the sides apart by itself "
                f"({gap:+.0%} of positives against negatives); the vector may write the word and not the trait[/yellow]"
            )
    lm = load_lm(model, device, dtype)
    with progress("extracting", 2 * sum(len(pairs) for pairs in chosen)) as advance:
        vectors = [
            extract_vector(lm, pair_set, pairs=pairs, span=span, as_=as_, batch_size=batch_size, progress=advance)
            for pair_set, pairs in zip(pair_sets, chosen, strict=True)
        ]
    for vector in vectors:
        path = vector.save(out_folder / lm.slug / f"{vector.trait}.safetensors")
        middle = vector.n_layers // 2
        table = Table("layer", "response-token norm", "vector norm", "agreement of pairs")
        step = max(1, vector.n_layers // 10)
        for z in sorted({*range(0, vector.n_layers, step), middle, vector.n_layers - 1}):
            table.add_row(
                f"{z}",
                f"{vector.layer_norms[z]:.1f}",
                f"{vector.vector[z].norm():.2f}",
                f"{vector.agreement[z]:+.2f}" if len(vector.provenance.pair_ids) > 1 else "one pair",
                style="bold" if z == middle else None,
            )
        out.print(f"[bold]{vector.trait}[/bold] from {len(vector.provenance.pair_ids)} pairs on {lm.name}")
        out.print(table)
        out.print("saved:", path, soft_wrap=True, markup=False)


@basis_app.command("build")
def basis_build(
    model: Model = DEFAULT_MODEL,
    vectors: Annotated[
        Path | None, typer.Option(help="Folder of trait vectors; by default vectors/<model>.", show_default=False)
    ] = None,
    traits: Annotated[str, typer.Option(help="Traits to take, with commas, in this order; by default all.")] = "",
    layer: Annotated[
        str,
        typer.Option(help="Layer for all traits, or impatience=14,confusion=18; else as selected, else the middle."),
    ] = "",
    dose: Annotated[
        str, typer.Option(help="Dose of 'medium' likewise; else as calibrated or selected, else the documented one.")
    ] = "",
    selection: Annotated[
        Path | None, typer.Option(help="What `traitbasis select` wrote; by default selection.json among the vectors.")
    ] = None,
    orthogonal: Annotated[
        Literal["symmetric", "ordered"] | None,
        typer.Option(help="Make the columns of each layer orthogonal: all alike, or each to those before it."),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="With --orthogonal: load the model and measure what that costs.")
    ] = False,
    pairs: Pairs = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File; by default basis.safetensors among the vectors.")
    ] = None,
) -> None:
    """Choose a layer and a scale for each trait vector and stack them into a basis.

    Layers and doses come from selection.json where there is one, and what `traitbasis calibrate` measured at a layer
    is kept. A trait that was found not steerable is marked; it is served only when forced.

    Examples: traitbasis basis build --traits impatience,confusion --layer 15; traitbasis basis build --orthogonal
    symmetric --measure --out orthogonal.safetensors
    """
    from traitbasis.basis import Basis
    from traitbasis.composition import compose, orthogonalize
    from traitbasis.errors import ArtifactError
    from traitbasis.model import model_slug
    from traitbasis.trait_vector import TraitVector

    if measure and not orthogonal:
        raise typer.BadParameter("--measure measures what --orthogonal costs; give both")
    layers, doses = _by_trait("--layer", layer, int), _by_trait("--dose", dose, float)
    folder = vectors or Path("vectors") / model_slug(model)
    files = [folder / f"{name}.safetensors" for name in listed(traits)] or _trait_vectors(folder)
    if not files:
        raise ArtifactError(f"no trait vectors in {folder}; make some with: traitbasis extract --trait all")
    chosen, before = selection or folder / "selection.json", folder / "basis.safetensors"
    earlier = None
    if before.is_file():
        try:
            earlier = Basis.load(before)
        except ArtifactError as error:
            err.print(f"[yellow]nothing is kept of it: {escape(str(error))}[/yellow]", soft_wrap=True)
    basis, sources = compose(
        [TraitVector.load(file) for file in files],
        selections=chosen if selection or chosen.is_file() else None,
        earlier=earlier,
        layer=layers,
        dose=doses,
    )
    plain = basis
    if orthogonal:
        basis = orthogonalize(basis, orthogonal)
    costs = _preference_costs(plain, basis, model, device, dtype, pairs) if measure else {}
    path = basis.save(out_file or before)
    _print_columns(basis)
    for trait, source in sources.items():
        out.print(f"{trait}: {source}", soft_wrap=True, markup=False, highlight=False)
    for trait, (was, now) in costs.items():
        out.print(
            f"{trait}: at medium its held-out pairs' preference is {now:+.3f} nats a token, {was:+.3f} before",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    _print_grids(basis, None, everything=False)
    out.print("saved:", path, soft_wrap=True, markup=False)


@basis_app.command("show")
def basis_show(
    file: Annotated[Path | None, typer.Argument(help="Basis file; by default the model's own.")] = None,
    model: Model = DEFAULT_MODEL,
    leakage: Annotated[Path | None, typer.Option(help="Leakage table; by default leakage.json beside it.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Small values too, of however many traits.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything as JSON, for programs.")] = False,
    heatmap: Annotated[
        Path | None, typer.Option(help="Write cosines and leakage as a picture: .svg, .png, .pdf.")
    ] = None,
) -> None:
    """Print a basis: columns with their levels, cosines, and what steering one trait does to the others.

    Examples: traitbasis basis show; traitbasis basis show --heatmap basis.svg
    """
    from traitbasis.basis import Basis, basis_path
    from traitbasis.errors import ArtifactError, TraitBasisError
    from traitbasis.model import model_slug

    if heatmap and heatmap.suffix not in (".svg", ".png", ".pdf"):
        raise typer.BadParameter(f"--heatmap {heatmap} must end in .svg, .png or .pdf")
    path = file or basis_path(model_slug(model))
    basis = Basis.load(path)
    try:
        found, problem = _find_leakage(basis, path, leakage, model_slug(model)), ""
    except ArtifactError as error:
        if leakage:
            raise
        found, problem = None, str(error)
    if heatmap:
        try:
            from traitbasis.cli.heatmap import cosine_grid, draw, leakage_grid

            grids = [cosine_grid(basis), *([leakage_grid(found)] if found else [])]
            draw(grids, f"basis {basis.fingerprint} of {basis.model}", heatmap)
        except ImportError as error:
            raise TraitBasisError(f"pictures need matplotlib ({error}): pip install 'traitbasis[plots]'") from error
    if as_json:
        typer.echo(json.dumps(_described(basis, found), indent=1))
        return
    _print_columns(basis)
    _print_grids(basis, found, everything=everything)
    if not found:
        out.print(
            problem or "leakage was not measured; measure it with: traitbasis basis leakage",
            style="yellow",
            soft_wrap=True,
            markup=False,
            highlight=False,
        )
    if heatmap:
        out.print("saved:", heatmap, soft_wrap=True, markup=False)


@basis_app.command("leakage")
def basis_leakage(
    traits: Annotated[str, typer.Option(help="Traits to steer and measure, with commas; by default all.")] = "",
    model: Model = DEFAULT_MODEL,
    basis_file: BasisFile = None,
    pairs: Pairs = None,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each trait.")] = 12,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest turn, in tokens.")] = 40,
    seed: Annotated[int, typer.Option(min=0, help="Another sample of turns.")] = 0,
    contexts: Annotated[
        Path | None, typer.Option(help="Evaluation contexts (YAML); by default those that ship.")
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "fastest",
    threads: Threads = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File; by default leakage.json beside --basis or in vectors/<model>.")
    ] = None,
) -> None:
    """Steer each trait of a basis at its medium and measure every trait, and a random direction.

    Turns are kept in a folder `leakage` beside the table: goes on where it was when it was killed.

    Example: traitbasis basis leakage --traits impatience,skeptical && traitbasis basis show
    """
    from traitbasis.basis import find_basis
    from traitbasis.composition import leakage_steps, measure_leakage
    from traitbasis.contexts import read_contexts
    from traitbasis.select import Selector
    from traitbasis.sweep import Generator

    tasks, names = read_contexts(contexts), listed(traits) or None
    lm = load_lm(model, device, dtype, threads=threads)
    basis = find_basis(lm, basis_file)
    pair_sets = _pair_sets(names or basis.traits, pairs)
    home = basis_file.parent if basis_file else Path("vectors") / lm.slug
    path = out_file or home / "leakage.json"
    with (
        progress("measuring", leakage_steps(basis, names)) as advance,
        Generator(lm, tasks, as_=basis.as_, turns=turns, seed=seed, max_tokens=max_tokens) as generator,
    ):
        selector = Selector(generator, path.parent / "leakage")
        found = measure_leakage(selector, basis, pair_sets, traits=names, progress=advance)
    found.save(path)
    _print_grids(basis, found, everything=False, cosines=False)
    out.print("saved:", path, soft_wrap=True, markup=False)


def _trait_vectors(folder: Path) -> list[Path]:
    """The trait vectors in a folder; a line names what else lies there, but for the basis that is made of them."""
    from traitbasis.trait_vector import TRAIT_VECTOR, kind_of

    files = sorted(file for file in folder.glob("*.safetensors") if file.name != "basis.safetensors")
    others = [file for file in files if kind_of(file) != TRAIT_VECTOR]
    for file in others:
        err.print(f"[yellow]{escape(str(file))} is no trait vector and is left out[/yellow]", soft_wrap=True)
    return [file for file in files if file not in others]


def _by_trait(option: str, text: str, kind: Callable[[str], Any]) -> Any:
    """One number, numbers by trait, or None."""
    parts = [part.split("=") for part in listed(text)]
    try:
        if len(parts) == 1 and len(parts[0]) == 1:
            return kind(parts[0][0])
        found = {trait.strip(): kind(number) for trait, number in parts}
    except ValueError:
        found = {}
    if len(found) < len(parts):
        raise typer.BadParameter(f"{option} is {text!r}; it takes one number for all, or trait=number with commas")
    return found or None


def _pair_sets(traits: Sequence[str], files: Sequence[Path] | None) -> dict[str, PairSet]:
    """Pairs of these traits: from the files, else those that ship."""
    from traitbasis.pairs import has_pairs, load_pairs

    own = {pair_set.trait: pair_set for pair_set in map(load_pairs, files or ())}
    return {**{trait: load_pairs(trait) for trait in traits if has_pairs(trait) and trait not in own}, **own}


def _preference_costs(
    plain: Basis, basis: Basis, model: str, device: str, dtype: str, files: list[Path] | None
) -> dict[str, tuple[float, float]]:
    from traitbasis.composition import preference_cost
    from traitbasis.reading import Reader

    lm = load_lm(model, device, dtype)
    basis.check_model(lm)
    return preference_cost(Reader(lm, basis.as_), plain, basis, _pair_sets(basis.traits, files))


def _find_leakage(basis: Basis, path: Path, given: Path | None, slug: str) -> Leakage | None:
    """The basis's table; None where there is none. Raises ArtifactError for another basis's."""
    from traitbasis.composition import Leakage
    from traitbasis.errors import ArtifactError

    files = [given] if given else [path.parent / "leakage.json", Path("vectors") / slug / "leakage.json"]
    found = [(file, Leakage.load(file)) for file in files if given or file.is_file()]
    for _, leakage in found:
        if leakage.basis == basis.fingerprint:
            return leakage
    for file, leakage in found:
        raise ArtifactError(
            f"{file} is the leakage of another basis ({leakage.basis}, this is {basis.fingerprint}); "
            "measure this one's with: traitbasis basis leakage"
        )
    return None


def _described(basis: Basis, leakage: Leakage | None) -> dict[str, Any]:
    return {
        "fingerprint": basis.fingerprint,
        "model": basis.model,
        "as_": basis.as_,
        "columns": [
            {
                "trait": column.trait,
                "layer": column.layer,
                "scale": column.scale,
                "levels": {
                    name: {"intensity": intensity, "dose": basis.dose({column.trait: intensity})}
                    for name, intensity in column.levels.items()
                },
                "limit": column.limit,
                "steerable": column.steerable,
                "pairs": len(column.provenance.pair_ids),
                "orthogonalized": asdict(column.orthogonalized) if column.orthogonalized else None,
            }
            for column in basis.columns
        ],
        "cosine": basis.cosine().tolist(),
        "leakage": asdict(leakage) if leakage else None,
    }


def _print_columns(basis: Basis) -> None:
    title = f"basis {basis.fingerprint} of {basis.model}; levels: intensity (dose)"
    names = ("layer", "low", "medium", "high", "limit", "steerable", "pairs")
    table = Table(Column("trait", no_wrap=True), *names, title=title, box=SIMPLE_HEAD, padding=0)
    for column in basis.columns:
        table.add_row(
            column.trait,
            f"{column.layer}",
            *(f"{round(x, 2):g} ({basis.dose({column.trait: x}):.3f})" for x in column.levels.values()),
            "none" if column.limit is None else f"{column.limit:.3f}",
            "yes" if column.steerable else "[yellow]no[/yellow]",
            f"{len(column.provenance.pair_ids)}",
        )
    out.print(table)
    changed = [(column, column.orthogonalized) for column in basis.columns if column.orthogonalized]
    if changed:
        table = Table("trait", "made orthogonal to", "left of its own direction (cosine)", box=SIMPLE_HEAD)
        for column, note in changed:
            others = ", ".join(note.against) if len(note.against) <= 4 else f"{len(note.against)} traits of its layer"
            table.add_row(column.trait, f"{others} ({note.how})", f"{note.kept:.3f}")
        out.print(table)
    if any(column.limit is not None for column, _ in changed):
        out.print("levels and limits were measured before the columns were made orthogonal", style="yellow")


def _print_grids(basis: Basis, leakage: Leakage | None, *, everything: bool, cosines: bool = True) -> None:
    from traitbasis.cli.heatmap import cosine_grid, leakage_grid, lines

    grids = [*([cosine_grid(basis)] if cosines else []), *([leakage_grid(leakage)] if leakage else [])]
    for grid in grids:
        for line in lines(grid, out.width, everything=everything):
            out.print(line, soft_wrap=True)
