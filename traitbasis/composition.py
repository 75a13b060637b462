"""Several traits at once: whose directions overlap, what steering one does to the others, and making them orthogonal.

A cosine says how alike two directions of one layer are; it does not say what the model makes of them. *Leakage* does:
steer trait A alone, measure every trait B in the text. Directions of different layers are no inputs to one sum, the
blocks between them turn the first before it meets the second, so their cosine means little and they are never made
orthogonal to each other; leakage is measured across layers all the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from traitbasis.basis import DEFAULT_DOSE, MAX_DOSE, Basis, Column, How, Orthogonalized, build_basis
from traitbasis.errors import ArtifactError, PairError, TraitBasisError
from traitbasis.files import write_whole
from traitbasis.metrics.likelihood import PairLikelihood
from traitbasis.metrics.turns import Instruments
from traitbasis.pairs import PairSet, pair_set_hash
from traitbasis.reading import Reader
from traitbasis.select import Likely, Selector, best_layers, bootstrap, gains, mean_gain, read_selections
from traitbasis.sweep import UNSTEERED, Cell, Spec, Store, versions
from traitbasis.trait_vector import TraitVector

_LEAKAGE = "traitbasis.leakage/1"
_ORTHOGONAL = 1e-6  # float32 columns are not more orthogonal than this
_DEPENDENT = 1e-3  # of a unit column: what is left beyond it is rounding
_GROUP = 12  # random cells between two steps of the progress bar

Progress = Callable[[int], None]


def compose(
    vectors: Sequence[TraitVector],
    *,
    selections: Mapping[str, Any] | str | Path | None = None,
    earlier: Basis | None = None,
    layer: int | Mapping[str, int] | None = None,
    dose: float | Mapping[str, float] | None = None,
) -> tuple[Basis, dict[str, str]]:
    """A basis of what is known of each trait, and where its layer and dose come from, in words, by trait.

    layer, dose: as in ``build_basis``; they come first. selections: a selection.json, or what
    ``select.read_selections`` made of it; a trait that was found not steerable stands where its preference rises most,
    marked. earlier: a basis whose columns were calibrated; what was measured of a trait at this layer (levels, limit,
    curve) is kept, but for levels when the dose is asked for.

    Raises ArtifactError as ``build_basis`` does, and for a damaged selection of one of the traits; SweepError for a
    file that is no selection.
    """
    chosen = _choices(selections, [vector.trait for vector in vectors])
    columns = {column.trait: column for column in earlier.columns} if earlier else {}
    placed = {
        vector.trait: _place(
            vector,
            chosen.get(vector.trait),
            columns.get(vector.trait),
            layer.get(vector.trait) if isinstance(layer, Mapping) else layer,
            dose.get(vector.trait) if isinstance(dose, Mapping) else dose,
        )
        for vector in vectors
    }
    for option in (layer, dose):
        if isinstance(option, Mapping) and (unknown := option.keys() - placed.keys()):
            raise ArtifactError(f"no vector is given for {', '.join(sorted(unknown))}")
    basis = build_basis(
        vectors,
        layer={trait: place.layer for trait, place in placed.items()},
        dose={trait: place.dose for trait, place in placed.items()},
    )
    known = tuple(replace(column, **placed[column.trait].known) for column in basis.columns)
    return Basis(known, basis.matrix), {trait: place.source for trait, place in placed.items()}


@dataclass(frozen=True)
class _Place:
    """Of one trait. known: fields of its column that were measured before. source: where the choice comes from."""

    layer: int
    dose: float
    known: dict[str, Any]
    source: str


def _place(
    vector: TraitVector, choice: _Choice | None, column: Column | None, layer: int | None, dose: float | None
) -> _Place:
    if column and (column.limit is None or column.provenance != vector.provenance):
        column = None
    at, at_from = _first(
        (layer, "asked"),
        (choice and choice.layer, "selected"),
        (choice and choice.likeliest, "likeliest of a trait that is not steerable"),
        (column and column.layer, "calibrated"),
        (vector.n_layers // 2, "middle"),
    )
    if column and column.layer != at:
        column = None
    # A column that was made orthogonal has kept its vector's length.
    calibrated = column.scale * vector.dose(column.layer) if column else None
    size, size_from = _first(
        (dose, "asked"), (calibrated, "calibrated"), (choice and choice.dose, "selected"), (DEFAULT_DOSE, "default")
    )
    known: dict[str, Any] = {}
    if column:
        known = {"limit": column.limit, "curve": column.curve, "steerable": column.steerable}
    if column and dose is None:
        known |= {"scale": column.scale, "low": column.low, "high": column.high}
    if choice:
        known["steerable"] = choice.layer is not None
    return _Place(at, size, known, f"layer {at_from}, dose {size_from}")


def _first(*choices: tuple[Any, str]) -> tuple[Any, str]:
    return next((value, source) for value, source in choices if value is not None)


@dataclass(frozen=True)
class _Choice:
    """What was selected for a trait. layer, dose: None for one that is not steerable. likeliest: its best layer."""

    layer: int | None
    dose: float | None
    likeliest: int | None


def _choices(selections: Mapping[str, Any] | str | Path | None, traits: Sequence[str]) -> dict[str, _Choice]:
    """The choices for these traits, as far as there are some. Raises ArtifactError for one that cannot be."""
    if selections is None:
        return {}
    name = str(selections) if isinstance(selections, str | Path) else "the selection"
    found: Any = read_selections(selections) if isinstance(selections, str | Path) else selections
    if not isinstance(found, Mapping):
        raise ArtifactError(f"{name} is damaged: its traits are {found!r:.80}; make it with: traitbasis select")
    choices = {}
    for trait in traits:
        if trait in found:
            try:
                choices[trait] = _choice(found[trait])
            except (LookupError, ValueError, TypeError, AttributeError, TraitBasisError) as error:
                why = f"it has no {error}" if isinstance(error, KeyError) else error
                raise ArtifactError(
                    f"{name} is damaged at trait {trait!r}: {why}; make it with: traitbasis select --trait {trait}"
                ) from error
    return choices


def _choice(values: Any) -> _Choice:
    if not isinstance(values, Mapping):
        raise TypeError(f"{values!r:.80} is no selection of a trait")
    layer, dose = values["layer"], values["dose"]
    if layer is not None and (type(layer) is not int or layer < 0):
        raise ValueError(f"layer {layer!r:.80} is no layer number")
    if dose is not None and (type(dose) not in (int, float) or not 0 < dose <= MAX_DOSE):
        raise ValueError(f"dose {dose!r:.80} is not a number above 0 and at most {MAX_DOSE:g}")
    if (layer is None) != (dose is None):
        raise ValueError(f"layer {layer} and dose {dose} do not go together")
    likelihood = [Likely(**likely) for likely in values.get("likelihood", ())]
    if any(type(likely.layer) is not int for likely in likelihood):
        raise ValueError("its likelihood has a layer that is no layer number")
    return _Choice(layer, dose, best_layers(likelihood, 1)[0] if likelihood else None)


def orthogonalize(basis: Basis, how: How = "symmetric") -> Basis:
    """Make the columns of each layer orthogonal to each other; their norms, so their doses, stay.

    symmetric: with the unit columns U of a layer, ``U (U^T U)^(-1/2)``, of all orthonormal sets the nearest to U, and
    the same in any order (Loewdin 1950). ordered: Gram-Schmidt in the order of the traits; the first stays as it is.
    Columns of different layers are left alone (see above), and so are columns that are orthogonal already.

    Levels, limits and curves are kept though they were measured along the traits' own directions: nothing else is
    known. Raises ArtifactError, naming the traits, for columns that are linearly dependent or were changed before.
    """
    if how not in get_args(How):
        raise ArtifactError(f"cannot orthogonalise by {how!r}; known: {', '.join(get_args(How))}")
    columns, matrix = list(basis.columns), basis.matrix.clone()
    for layer in sorted({column.layer for column in columns}):
        at = [i for i, column in enumerate(columns) if column.layer == layer]
        own = matrix[:, at].double()
        norms = own.norm(dim=0)
        unit = own / norms
        gram = unit.T @ unit
        if (gram - torch.eye(len(at))).abs().max() < _ORTHOGONAL:
            continue
        _check_independent(gram, [columns[i] for i in at])
        found = _symmetric(unit, gram) if how == "symmetric" else _ordered(unit)
        for j, i in enumerate(at):
            others = [k for k in at if k != i] if how == "symmetric" else at[:j]
            if others:
                kept = min(round(float(found[:, j] @ unit[:, j]), 6), 1.0)
                note = Orthogonalized(how, tuple(columns[k].trait for k in others), kept)
                columns[i] = replace(columns[i], orthogonalized=note)
                matrix[:, i] = (norms[j] * found[:, j]).float()
    return Basis(tuple(columns), matrix)


def _symmetric(unit: Tensor, gram: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(gram)
    nearest: Tensor = unit @ (vectors * values.rsqrt()) @ vectors.T
    return nearest


def _ordered(unit: Tensor) -> Tensor:
    q, r = torch.linalg.qr(unit)
    upright: Tensor = q * r.diagonal().sign()
    return upright


def _check_independent(gram: Tensor, columns: Sequence[Column]) -> None:
    for column in columns:
        if column.orthogonalized:
            raise ArtifactError(
                f"column {column.trait!r} was made orthogonal to {', '.join(column.orthogonalized.against)} before; "
                "build the basis again from the trait vectors"
            )
    values, vectors = torch.linalg.eigh(gram)
    if values[0] < _DEPENDENT**2:
        weights = vectors[:, 0].abs()
        names = [column.trait for column, w in zip(columns, weights, strict=True) if w > 0.1 * weights.max()]
        raise ArtifactError(
            f"{' and '.join(names)} are linearly dependent at layer {columns[0].layer}; leave one of them out, or put "
            "it at another layer"
        )


def preference_cost(
    reader: Reader, before: Basis, after: Basis, pair_sets: Mapping[str, PairSet]
) -> dict[str, tuple[float, float]]:
    """What orthogonalising costs in the model: preference (``metrics/likelihood.py``, nats per token, mean over the
    trait's held-out pairs) of each changed trait at its medium, before and after."""
    found = {}
    for column in after.columns:
        if column.orthogonalized:
            pairs = PairLikelihood(reader, _held_out(pair_sets, column.trait))
            values = [
                float(pairs.measure(basis.additions({column.trait: 1.0})).preference.mean())
                for basis in (before, after)
            ]
            found[column.trait] = (values[0], values[1])
            reader.forget()
    return found


def _held_out(pair_sets: Mapping[str, PairSet], trait: str) -> Any:
    if trait not in pair_sets:
        raise PairError(f"no contrastive pairs are given for {trait!r}, which the basis has")
    if not (pairs := pair_sets[trait].select("heldout")):
        raise PairError(f"{trait}: no pair is marked 'use: heldout'; nothing independent can measure it")
    return pairs


@dataclass(frozen=True)
class LeakageRow:
    """One steered trait: expression less the unsteered user's, and its 95 % bootstrap interval, by measured trait."""

    gain: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.gain) == len(self.low) == len(self.high):
            raise ArtifactError("a row of a leakage table has an interval missing")


@dataclass(frozen=True)
class Leakage:
    """Steer A at its medium, measure B: ``rows[a].gain[b]``; 1 is as far as from negative to positive responses.

    traits: steered and measured. random: what a random direction does to B, at B's own layer and dose. basis: its
    fingerprint. made_by: model, seed, contexts, versions.
    """

    basis: str
    traits: tuple[str, ...]
    rows: tuple[LeakageRow, ...]
    random: LeakageRow
    made_by: Mapping[str, Any]

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.traits) or any(
            len(row.gain) != len(self.traits) for row in (*self.rows, self.random)
        ):
            raise ArtifactError(f"a leakage table of {len(self.traits)} traits has other rows or columns")

    def save(self, path: str | Path) -> Path:
        """Write as JSON, by way of a temporary file beside it."""
        return write_whole(path, json.dumps({"format": _LEAKAGE, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Leakage:
        """Read a file written by ``save``. Raises ArtifactError when it is missing or not such a file."""
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
            if content.pop("format") != _LEAKAGE:
                raise ArtifactError("it is of another format")
            return cls(
                **{
                    **content,
                    "traits": tuple(content["traits"]),
                    "rows": tuple(map(_row, content["rows"])),
                    "random": _row(content["random"]),
                }
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArtifactError) as error:
            raise ArtifactError(
                f"cannot read the leakage table {path}: {error}; make it with: traitbasis basis leakage"
            ) from error


def _row(values: Mapping[str, Any]) -> LeakageRow:
    return LeakageRow(**{name: tuple(value) for name, value in values.items()})


def measure_leakage(
    selector: Selector,
    basis: Basis,
    pair_sets: Mapping[str, PairSet],
    *,
    traits: Sequence[str] | None = None,
    progress: Progress = lambda done: None,
) -> Leakage:
    """Steer each trait at its medium and measure all of them, on the generator's contexts, turn by turn beside the
    unsteered user.

    Instruments are the selector's; a classifier that would be trained on pairs its trait's vector was made from is left
    out. traits: by default all of the basis. progress: told how many of ``leakage_steps`` are done. Turns are kept in
    the selector's folder, by basis: an earlier call that was killed is gone on with.

    Raises ArtifactError for another model's basis, PairError for a trait without held-out pairs.
    """
    generator = selector.generator
    basis.check_model(generator.lm)
    columns = _columns(basis, traits)
    for column in columns:
        _held_out(pair_sets, column.trait)
    instruments: dict[str, Any] = {}
    for column in columns:
        instruments |= _independent(selector, column, pair_sets[column.trait])
        progress(1)
    steered = {_medium(basis, "steered", column): basis.additions({column.trait: 1.0}) for column in columns}
    store = Store(selector.folder / f"leakage-{basis.fingerprint}.jsonl", generator.settings)
    # The texts do not depend on who measures them: scores of expression are not stored.
    cells = generator.cells([*steered], store, steered.__getitem__, {}, done=progress)
    (plain,) = selector.baselines([UNSTEERED], instruments)
    randoms: dict[Spec, Cell] = {}
    wanted = list(dict.fromkeys(_medium(basis, "random", column) for column in columns))
    for start in range(0, len(wanted), _GROUP):
        group = wanted[start : start + _GROUP]
        randoms.update(zip(group, selector.baselines(group, instruments), strict=True))
        progress(len(group))
    rows = [_against(selector.scored(cell, instruments), plain, [*instruments]) for cell in cells]
    control = [_against(randoms[_medium(basis, "random", column)], plain, [column.trait]) for column in columns]
    return Leakage(
        basis.fingerprint,
        tuple(instruments),
        tuple(rows),
        LeakageRow(*(tuple(getattr(row, name)[0] for row in control) for name in ("gain", "low", "high"))),
        {
            **generator.settings,
            "pairs": {trait: pair_set_hash(pair_sets[trait].pairs) for trait in instruments},
            **versions(),
        },
    )


def leakage_steps(basis: Basis, traits: Sequence[str] | None = None) -> int:
    """Steps of ``measure_leakage``: instruments, steered cells, random cells."""
    columns = _columns(basis, traits)
    return 2 * len(columns) + len({_medium(basis, "random", column) for column in columns})


def _columns(basis: Basis, traits: Sequence[str] | None) -> list[Column]:
    if unknown := set(traits or ()) - set(basis.traits):
        raise ArtifactError(f"the basis has no {', '.join(sorted(unknown))}; it has {', '.join(basis.traits)}")
    return [column for column in basis.columns if traits is None or column.trait in traits]


def _medium(basis: Basis, condition: Any, column: Column) -> Spec:
    dose = round(basis.dose({column.trait: 1.0}), 4)
    return Spec(condition, column.trait if condition == "steered" else None, column.layer, dose)


def _independent(selector: Selector, column: Column, pair_set: PairSet) -> Instruments:
    ((trait, (probe, classifier)),) = selector.instruments(pair_set).items()
    trained_on = {pair.id for pair in pair_set.select("extra")}
    return {trait: (probe, None if trained_on & set(column.provenance.pair_ids) else classifier)}


def _against(cell: Cell, plain: Cell, traits: Sequence[str]) -> LeakageRow:
    gain, low, high = [], [], []
    for trait in traits:
        difference = mean_gain(gains(cell, trait, plain))
        below, above = bootstrap(difference)
        gain.append(round(float(difference.mean()), 4))
        low.append(round(below, 4))
        high.append(round(above, 4))
    return LeakageRow(tuple(gain), tuple(low), tuple(high))
