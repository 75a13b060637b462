"""The basis ``P_B``: one column per trait, each at its own layer, with the scale that makes intensity 1.0 "medium".

A column is a row of a trait vector; a request's intensities x become coefficients ``c = x * s`` and, per layer, one
float32 sum ``sum_i c_i P_i`` (contract 5). Where nothing was measured, the layer is the middle of the stack and the
scale gives every trait the same default dose; calibration stores with a column what its levels are, and the dose beyond
which text is damaged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from importlib import resources
from math import inf
from pathlib import Path
from sys import float_info
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from traitbasis.errors import ArtifactError
from traitbasis.model import LanguageModel
from traitbasis.spec import LEVELS, MAX_INTENSITY, Traits, parse_traits
from traitbasis.trait_vector import (
    Provenance,
    TraitVector,
    check_finite,
    provenance_from,
    read_safetensors,
    write_safetensors,
)

_FORMAT = "traitbasis.basis/1"

# |s P| over the mean response-token norm of the layer.
DEFAULT_DOSE = 0.2
# Keeps arithmetic finite, no more, and cannot be forced: what a model bears of a trait, its calibrated limit says.
MAX_DOSE = 10.0

How = Literal["symmetric", "ordered"]


@dataclass(frozen=True)
class CurvePoint:
    """What was measured of a trait at one dose.

    expression: how much of the trait is in a turn, with its confidence band. facts: share of the facts to be kept that
    are. damage: what the limit bounds.
    """

    dose: float
    expression: float
    expression_low: float
    expression_high: float
    facts: float
    damage: float


@dataclass(frozen=True)
class Orthogonalized:
    """What was done to a column (``composition.orthogonalize``): how, against which traits of its layer, and kept, the
    cosine between the column and its trait's own direction."""

    how: How
    against: tuple[str, ...]
    kept: float

    def __post_init__(self) -> None:
        if self.how not in get_args(How):
            raise ArtifactError(f"a column is orthogonalised by {self.how!r}; known: {', '.join(get_args(How))}")
        if not self.against or not all(isinstance(trait, str) for trait in self.against):
            raise ArtifactError(f"a column is orthogonalised against {self.against!r}, which are no traits")
        if not _is_number(self.kept) or not 0 < self.kept <= 1:
            raise ArtifactError(f"an orthogonalised column kept {self.kept!r} of its direction, not above 0 to 1")


@dataclass(frozen=True)
class Column:
    """One trait of a basis.

    layer: the decoder layer it is added at. scale: s, the coefficient of intensity 1.0. layer_norm: mean norm of a
    response token's hidden state at that layer. provenance: of the trait vector the column was taken from.

    Of calibration: low, high: intensities of these levels; "medium" is 1.0 by definition of the scale. limit: the dose
    beyond which damage passes what was allowed; None where it was not measured. steerable: False for a trait that did
    not screen on this model, which is served only when forced. curve: what was measured, by rising dose.

    orthogonalized: None for the trait's own direction. Levels, limit and curve were measured along that one.

    Raises ArtifactError, naming column, field and value, for what cannot be.
    """

    trait: str
    layer: int
    scale: float
    layer_norm: float
    aliases: tuple[str, ...]
    provenance: Provenance
    low: float = LEVELS["low"]
    high: float = LEVELS["high"]
    limit: float | None = None
    steerable: bool = True
    curve: tuple[CurvePoint, ...] = ()
    orthogonalized: Orthogonalized | None = None

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise ArtifactError(f"layer {self.layer!r} of column {self.trait!r} is no layer number")
        for name in ("scale", "layer_norm", *(("limit",) if self.limit is not None else ())):
            self._check(name, "a positive number", 0, inf)
        self._check("low", "a number between 0 and 1, which is medium", 0, 1)
        self._check("high", f"a number between 1, which is medium, and {MAX_INTENSITY}", 1, MAX_INTENSITY)
        if not isinstance(self.steerable, bool):
            raise ArtifactError(f"steerable {self.steerable!r} of column {self.trait!r} is not true or false")
        before = -inf
        for point in self.curve:
            for name, value in asdict(point).items():
                if not _is_number(value):
                    raise ArtifactError(f"curve of column {self.trait!r} has the {name} {value!r}, which is no number")
            if not before < point.dose:
                raise ArtifactError(
                    f"curve of column {self.trait!r} has dose {point.dose!r} after {before!r}; they must rise"
                )
            before = point.dose

    def _check(self, name: str, what: str, above: float, below: float) -> None:
        value = getattr(self, name)
        if not _is_number(value) or not above < value < below:
            raise ArtifactError(f"{name} {value!r} of column {self.trait!r} is not {what}")

    @property
    def levels(self) -> dict[str, float]:
        """Intensities of the levels, weakest first."""
        return {"low": self.low, "medium": 1.0, "high": self.high}


@dataclass(frozen=True)
class LayerLoad:
    """What a request adds at one layer.

    dose: of the composed addition. limit: the dose that this mixture of traits may have there, inf where no trait of it
    has a limit.
    """

    layer: int
    dose: float
    limit: float

    @property
    def share(self) -> float:
        """How much of the limit is used; 1 is all of it."""
        return self.dose / self.limit


@dataclass(frozen=True, eq=False)
class Basis:
    """Columns and their matrix.

    matrix: ``(d_model, k)`` float32, column i for ``columns[i]``. as_: header the customer's turns stand under.
    """

    columns: tuple[Column, ...]
    matrix: Tensor

    def __post_init__(self) -> None:
        if not self.columns:
            raise ArtifactError("a basis needs at least one column")
        check_finite(self.matrix, "the basis matrix")
        if self.matrix.shape[1:] != (len(self.columns),):
            raise ArtifactError(f"basis matrix is {tuple(self.matrix.shape)} for {len(self.columns)} columns")
        names = self.traits
        if len(set(names)) != len(names):
            raise ArtifactError(f"a trait stands twice in the basis: {', '.join(names)}")
        owners: dict[str, str] = {}
        for column in self.columns:  # a pair file that was copied keeps its aliases
            for name in (column.trait, *column.aliases):
                if (owner := owners.setdefault(name, column.trait)) != column.trait:
                    raise ArtifactError(
                        f"{name!r} would name several traits: {owner}, {column.trait}; change `trait` or `aliases` in "
                        "their pair files"
                    )
        for field in ("model_fingerprint", "template_hash", "as_"):
            values = {getattr(column.provenance, field) for column in self.columns}
            if len(values) > 1:
                raise ArtifactError(
                    f"the vectors of a basis must share one {field}: "
                    + ", ".join(f"{c.trait} has {getattr(c.provenance, field)}" for c in self.columns)
                )

    @property
    def traits(self) -> tuple[str, ...]:
        return tuple(column.trait for column in self.columns)

    @property
    def model(self) -> str:
        """Name of the model the vectors were extracted on."""
        return self.columns[0].provenance.model

    @property
    def as_(self) -> Any:
        """Header the customer's turns stand under, as when the vectors were extracted."""
        return self.columns[0].provenance.as_

    @cached_property
    def fingerprint(self) -> str:
        """Identifies columns, layers, scales and values (16 hex digits); goes with every published number."""
        digest = hashlib.sha256(json.dumps(self._description(), sort_keys=True).encode())
        digest.update(self.matrix.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def check_model(self, lm: LanguageModel) -> None:
        """Raises ArtifactError when the basis was made on another model or does not fit its shape."""
        self.columns[0].provenance.check_model(lm, "this basis")
        for column in self.columns:
            if column.layer >= len(lm.layers) or self.matrix.shape[0] != lm.width:
                raise ArtifactError(f"column {column.trait!r} (layer {column.layer}) does not fit {lm.name}")

    def parse(self, traits: Traits) -> dict[str, float]:
        """Intensities by trait, a level's those of its trait. Raises TraitSpecError for a trait that is not in this
        basis."""
        aliases = {alias: column.trait for column in self.columns for alias in column.aliases}
        return parse_traits(traits, self.traits, aliases, self.levels)

    @property
    def levels(self) -> dict[str, dict[str, float]]:
        """Intensities of low, medium and high, by trait."""
        return {column.trait: column.levels for column in self.columns}

    def additions(self, intensities: Mapping[str, float]) -> dict[int, Tensor]:
        """What is added to the residual stream, ``(d_model,)`` float32 by layer; empty when every intensity is 0."""
        sums: dict[int, Tensor] = {}
        for column, direction in zip(self.columns, self.matrix.T, strict=True):
            intensity = intensities.get(column.trait, 0.0)
            if intensity:
                part = intensity * column.scale * direction
                sums[column.layer] = sums[column.layer] + part if column.layer in sums else part
        return sums

    def dose(self, intensities: Mapping[str, float]) -> float:
        """Dose of the composed addition, ``|sum_i c_i P_i| / layer norm``; of several layers the largest."""
        return max((load.dose for load in self.loads(intensities)), default=0.0)

    def loads(self, intensities: Mapping[str, float]) -> tuple[LayerLoad, ...]:
        """Dose and limit of the composed addition at each layer that gets one, lowest layer first.

        The limit is the mean of the limits L_i of the traits asked for there, weighted by their own doses
        ``d_i = |c_i P_i| / norm_i``: the harmonic mean ``sum_i d_i / sum_i (d_i / L_i)``. So traits that push the same
        way use up the sum of what each would use alone, and one without a limit (which counts as infinite) takes
        nothing from the others' and gives them nothing.

        A limit is measured for the positive pole; the negative one has the same by symmetry, unmeasured.
        """
        loads = []
        for z, addition in sorted(self.additions(intensities).items()):
            asked = [
                (column, abs(intensities[column.trait]) * column.scale * float(direction.norm()) / column.layer_norm)
                for column, direction in zip(self.columns, self.matrix.T, strict=True)
                if column.layer == z and intensities.get(column.trait)
            ]
            # Each trait measured the layer's norm on its own pairs; those that are asked for count.
            norm = sum(column.layer_norm for column, _ in asked) / len(asked)
            used = sum(own / column.limit for column, own in asked if column.limit is not None)
            limit = sum(own for _, own in asked) / used if used else inf
            loads.append(LayerLoad(z, float(addition.norm()) / norm, limit))
        return tuple(loads)

    def load_share(self, intensities: Mapping[str, float]) -> float:
        """How much of the damage limit a composed request uses: 1 is all of it, and one trait's is dose over limit.

        Additions of several layers meet in the one residual stream: each is a vector as long as its layer's share, and
        the length of their sum counts, or the longest of them if that is more. So directions at right angles add as
        such, equal ones in full, and what is undone at a later layer was there until then. Traits without a limit use
        nothing. Limits are the positive pole's, taken for the negative one by symmetry (see ``loads``).
        """
        additions, loads = self.additions(intensities), self.loads(intensities)
        if not loads:
            return 0.0
        parts = [load.share * torch.nn.functional.normalize(additions[load.layer], dim=0) for load in loads]
        return max(float(torch.stack(parts).sum(0).norm()), *(load.share for load in loads))

    def known_share(self, intensities: Mapping[str, float]) -> float | None:
        """``load_share`` for a report: None where a trait that is asked for has no limit."""
        unknown = any(column.limit is None and intensities.get(column.trait) for column in self.columns)
        return None if unknown else self.load_share(intensities)

    def cosine(self) -> Tensor:
        """Cosine between columns, ``(k, k)``. Columns at different layers are compared all the same."""
        unit = torch.nn.functional.normalize(self.matrix, dim=0)
        return unit.T @ unit

    def save(self, path: str | Path) -> Path:
        """Write to `path` (safetensors), by way of a temporary file beside it."""
        return write_safetensors(path, _FORMAT, {"matrix": self.matrix}, self._description())

    @classmethod
    def load(cls, path: str | Path) -> Basis:
        """Read a file written by ``save``. Raises ArtifactError when it is missing or not such a file."""
        tensors, description = read_safetensors(path, _FORMAT, ("matrix",))
        try:
            columns = tuple(
                Column(
                    **{
                        **entry,
                        "aliases": tuple(entry["aliases"]),
                        "provenance": provenance_from(entry["provenance"]),
                        "curve": tuple(CurvePoint(**point) for point in entry.get("curve", ())),
                        "orthogonalized": _orthogonalized(entry.get("orthogonalized")),
                    }
                )
                for entry in description["columns"]
            )
            basis = cls(columns, tensors["matrix"])
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path} has an unreadable column ({error}); build the basis again") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}; build the basis again") from error
        return basis

    def _description(self) -> dict[str, Any]:
        return {"columns": [_described(column) for column in self.columns]}


def _described(column: Column) -> dict[str, Any]:
    """Fields of a column but for those that stand at their default: a basis that knows nothing of calibration keeps its
    file and its fingerprint."""
    defaults = {field.name: field.default for field in fields(Column) if field.default is not MISSING}
    return {
        name: value
        for name, value in asdict(column).items()
        if name not in defaults or getattr(column, name) != defaults[name]
    }


def _orthogonalized(values: Mapping[str, Any] | None) -> Orthogonalized | None:
    return None if values is None else Orthogonalized(**{**values, "against": tuple(values["against"])})


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= float_info.max


def build_basis(
    vectors: Sequence[TraitVector],
    *,
    layer: int | Mapping[str, int] | None = None,
    dose: float | Mapping[str, float] = DEFAULT_DOSE,
) -> Basis:
    """Choose each trait's layer and scale and stack the columns.

    layer: for all traits or by trait; the middle of the stack where not given. dose: of intensity 1.0, for all or by
    trait. Raises ArtifactError for no vectors, mixed models, a layer that does not exist, a dose that is
    not above 0 and at most ``MAX_DOSE``.
    """
    for option in (layer, dose):
        if isinstance(option, Mapping) and (unknown := option.keys() - {vector.trait for vector in vectors}):
            raise ArtifactError(f"no vector is given for {', '.join(sorted(unknown))}")
    columns, directions = [], []
    for vector in vectors:
        z = layer.get(vector.trait) if isinstance(layer, Mapping) else layer
        z = vector.n_layers // 2 if z is None else z
        if not 0 <= z < vector.n_layers:
            raise ArtifactError(f"layer {z} for {vector.trait} does not exist; layers are 0 to {vector.n_layers - 1}")
        size = dose.get(vector.trait, DEFAULT_DOSE) if isinstance(dose, Mapping) else dose
        if not 0 < size <= MAX_DOSE:
            raise ArtifactError(f"dose {size} for {vector.trait} is not a number above 0 and at most {MAX_DOSE:g}")
        if not vector.vector[z].norm() > 0:
            raise ArtifactError(f"the vector of {vector.trait} is zero at layer {z}")
        columns.append(
            Column(
                trait=vector.trait,
                layer=z,
                scale=size / vector.dose(z),
                layer_norm=float(vector.layer_norms[z]),
                aliases=vector.aliases,
                provenance=vector.provenance,
            )
        )
        directions.append(vector.vector[z])
    if not columns:
        raise ArtifactError("a basis needs at least one trait vector")
    return Basis(tuple(columns), torch.stack(directions, dim=1))


def basis_path(model_slug: str) -> Path:
    """Where a model's basis is: ``vectors/<model>/basis.safetensors`` here, else among the vectors that ship.

    Raises ArtifactError when there is none, saying how to make one.
    """
    name = f"{model_slug}/basis.safetensors"
    for path in (Path("vectors") / name, Path(str(resources.files("traitbasis.vectors"))) / name):
        if path.is_file():
            return path
    raise ArtifactError(
        f"there is no basis for {model_slug}; make one with `traitbasis extract --trait all --model …` and then "
        "`traitbasis basis build --model …`"
    )


def find_basis(lm: LanguageModel, path: str | Path | None = None) -> Basis:
    """Load the basis at `path`, by default the model's own. Raises ArtifactError when it is another model's."""
    basis = Basis.load(path or basis_path(lm.slug))
    basis.check_model(lm)
    return basis
