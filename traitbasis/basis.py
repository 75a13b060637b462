"""The basis ``P_B``: one column per trait, each at its own layer, with the scale that makes intensity 1.0 "medium".

A column is a row of a trait vector; a request's intensities x become coefficients ``c = x * s`` and, per layer, one
float32 sum ``sum_i c_i P_i`` (contract 5). Until automatic selection and calibration exist, the layer is the middle of
the stack and the scale gives every trait the same default dose.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from traitbasis.errors import ArtifactError
from traitbasis.model import LanguageModel
from traitbasis.spec import Traits, parse_traits
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


@dataclass(frozen=True)
class Column:
    """One trait of a basis.

    layer: the decoder layer it is added at. scale: s, the coefficient of intensity 1.0. layer_norm: mean norm of a
    response token's hidden state at that layer. provenance: of the trait vector the column was taken from.
    """

    trait: str
    layer: int
    scale: float
    layer_norm: float
    aliases: tuple[str, ...]
    provenance: Provenance

    def __post_init__(self) -> None:
        if type(self.layer) is not int or self.layer < 0:
            raise ArtifactError(f"layer {self.layer!r} of column {self.trait!r} is no layer number")
        for name, value in (("scale", self.scale), ("layer_norm", self.layer_norm)):
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ArtifactError(f"{name} {value!r} of column {self.trait!r} is not a positive number")


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
        """Intensities by trait. Raises TraitSpecError for a trait that is not in this basis."""
        aliases = {alias: column.trait for column in self.columns for alias in column.aliases}
        return parse_traits(traits, self.traits, aliases)

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
        doses = [0.0]
        for z, addition in self.additions(intensities).items():
            # Each trait measured the layer's norm on its own pairs; those that are asked for count.
            norms = [c.layer_norm for c in self.columns if c.layer == z and intensities.get(c.trait)]
            doses.append(float(addition.norm()) * len(norms) / sum(norms))
        return max(doses)

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
        return {"columns": [asdict(column) for column in self.columns]}


def build_basis(
    vectors: Sequence[TraitVector],
    *,
    layer: int | Mapping[str, int] | None = None,
    dose: float | Mapping[str, float] = DEFAULT_DOSE,
) -> Basis:
    """Choose each trait's layer and scale and stack the columns.

    layer: for all traits or by trait; the middle of the stack where not given. dose: of intensity 1.0, for all or by
    trait. Raises ArtifactError for no vectors, mixed models, a layer that does not exist, a dose that is not positive.
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
        if not 0 < size < float("inf"):
            raise ArtifactError(f"dose {size} for {vector.trait} is not a positive number")
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
    for column in columns:  # a pair file that was copied keeps its aliases
        names = {column.trait, *column.aliases}
        for other in columns:
            if other.trait != column.trait and (shared := names & {other.trait, *other.aliases}):
                raise ArtifactError(
                    f"{min(shared)!r} would name several traits: {column.trait}, {other.trait}; change `trait` or "
                    "`aliases` in their pair files"
                )
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
