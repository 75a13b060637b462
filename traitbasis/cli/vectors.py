"""Commands that make vectors and bases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from traitbasis.cli.common import Device, Dtype, Header, Model, app, basis_app, err, load_lm, out, progress
from traitbasis.embedded import DEFAULT_MODEL


@app.command()
def extract(
    trait: Annotated[str, typer.Option(help="A shipped trait, or 'all'.")] = "",
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

    Examples: traitbasis extract --trait impatience; traitbasis extract --pairs mine.yaml --model ./my-model
    """
    from traitbasis.extract import extract as extract_vector
    from traitbasis.pairs import known_traits, load_pairs

    if bool(trait) == (pairs is not None):
        raise typer.BadParameter("give either --trait or --pairs")
    sources = [pairs] if pairs else known_traits() if trait == "all" else [trait]
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
    traits: Annotated[str, typer.Option(help="Traits to take, with commas; by default all.")] = "",
    layer: Annotated[int | None, typer.Option(help="Layer for all traits; by default the middle.")] = None,
    dose: Annotated[float | None, typer.Option(help="Dose of 'medium'; by default the documented one.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File; by default basis.safetensors among the vectors.")
    ] = None,
) -> None:
    """Choose a layer and a scale for each trait vector and stack them into a basis.

    Example: traitbasis basis build --traits impatience,confusion --layer 15
    """
    from traitbasis.basis import DEFAULT_DOSE, build_basis
    from traitbasis.errors import ArtifactError
    from traitbasis.model import model_slug
    from traitbasis.trait_vector import TraitVector

    folder = vectors or Path("vectors") / model_slug(model)
    names = [name.strip() for name in traits.split(",") if name.strip()]
    files = [folder / f"{name}.safetensors" for name in names] or sorted(
        file for file in folder.glob("*.safetensors") if file.name != "basis.safetensors"
    )
    if not files:
        raise ArtifactError(f"no trait vectors in {folder}; make some with: traitbasis extract --trait all")
    basis = build_basis(
        [TraitVector.load(file) for file in files], layer=layer, dose=DEFAULT_DOSE if dose is None else dose
    )
    path = basis.save(out_file or folder / "basis.safetensors")
    _print_basis(basis)
    out.print("saved:", path, soft_wrap=True, markup=False)


@basis_app.command("show")
def basis_show(
    file: Annotated[Path | None, typer.Argument(help="Basis file; by default the model's own.")] = None,
    model: Model = DEFAULT_MODEL,
) -> None:
    """Print a basis: columns, doses, cosines.

    Example: traitbasis basis show
    """
    from traitbasis.basis import Basis, basis_path
    from traitbasis.model import model_slug

    _print_basis(Basis.load(file or basis_path(model_slug(model))))


def _print_basis(basis: Any) -> None:
    title = f"basis {basis.fingerprint} of {basis.model}"
    table = Table("trait", "layer", "scale", "dose of medium", "pairs", title=title)
    for column in basis.columns:
        table.add_row(
            column.trait,
            f"{column.layer}",
            f"{column.scale:.3f}",
            f"{basis.dose({column.trait: 1.0}):.3f}",
            f"{len(column.provenance.pair_ids)}",
        )
    out.print(table)
    cosines = Table("cosine", *basis.traits)
    for trait, row in zip(basis.traits, basis.cosine().tolist(), strict=True):
        cosines.add_row(trait, *(f"{value:+.2f}" for value in row))
    out.print(cosines)
