"""The artifact: one trait's vector for every decoder layer of one model, with where it came from (contract 7).

A file is safetensors: tensors plus a JSON text of provenance in the metadata. Nothing is unpickled, nothing in it
depends on the time or the machine's paths, so the same extraction writes the same file.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from traitbasis.chat import As, Span
from traitbasis.errors import ArtifactError
from traitbasis.files import write_whole
from traitbasis.model import LanguageModel

TRAIT_VECTOR = "traitbasis.trait_vector/1"
_KEY = "traitbasis"


@dataclass(frozen=True)
class Provenance:
    """What a vector was made from and with."""

    model: str
    model_fingerprint: str
    template_hash: str
    as_: As
    span: Span
    pair_set_hash: str
    pair_ids: tuple[str, ...]
    dtype: str
    traitbasis_version: str
    transformers_version: str
    torch_version: str

    def __post_init__(self) -> None:
        for name, value, choices in (("as_", self.as_, As), ("span", self.span, Span)):
            if value not in get_args(choices):
                raise ArtifactError(f"{name} is {value!r}; known: {', '.join(get_args(choices))}")

    def check_model(self, lm: LanguageModel, what: str) -> None:
        """Raises ArtifactError, naming both models, when `lm` is not the model (or template) this was made on."""
        if self.model_fingerprint != lm.fingerprint:
            raise ArtifactError(
                f"{what} was made on {self.model} (fingerprint {self.model_fingerprint}) and does not fit "
                f"{lm.name} (fingerprint {lm.fingerprint}); extract it again on {lm.name}"
            )
        if self.template_hash != lm.template_hash:
            raise ArtifactError(
                f"{what} was made under another chat template of {self.model} "
                f"({self.template_hash[:12]}, not {lm.template_hash[:12]}); extract it again"
            )


@dataclass(frozen=True, eq=False)
class TraitVector:
    """``P_T``: mean difference of response hidden states, positive minus negative (the paper, section 3).

    vector: ``(layers, d_model)`` float32, row z for the output of decoder block z.
    layer_norms: ``(layers,)`` float32, mean norm of a response token's hidden state; a dose is relative to it.
    agreement: ``(layers,)`` float32, mean cosine between the differences of single pairs; 1 means they all agree.

    Vectors of one model add and scale as values: ``0.5 * impatience + skeptical``, ``-confusion``.
    """

    trait: str
    vector: Tensor
    layer_norms: Tensor
    agreement: Tensor
    provenance: Provenance
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.vector.dim() != 2 or {self.layer_norms.shape, self.agreement.shape} != {self.vector.shape[:1]}:
            raise ArtifactError(f"the tensors of {self.trait} have unexpected shapes; extract it again")
        check_finite(self.vector, f"the vector of {self.trait}")
        check_finite(self.layer_norms, f"layer norms of {self.trait}")
        if not (self.layer_norms > 0).all():
            raise ArtifactError(f"a layer norm of {self.trait} is not positive; extract it again")

    @property
    def n_layers(self) -> int:
        return self.vector.shape[0]

    def dose(self, layer: int, coefficient: float = 1.0) -> float:
        """``|coefficient * vector| / mean response-token norm`` at `layer`."""
        return float(abs(coefficient) * self.vector[layer].norm() / self.layer_norms[layer])

    def at_dose(self, layer: int, dose: float) -> Tensor:
        """The row of `layer`, ``(d_model,)``, as long as `dose` mean response-token norms there."""
        return self.vector[layer] * (dose / self.dose(layer))

    def __mul__(self, factor: float) -> TraitVector:
        return replace(self, trait=f"{factor:g}*{self.trait}", vector=self.vector * factor, aliases=())

    __rmul__ = __mul__

    def __neg__(self) -> TraitVector:
        return self * -1.0

    def __add__(self, other: TraitVector) -> TraitVector:
        for field in ("model_fingerprint", "template_hash", "as_", "span"):
            mine, others = getattr(self.provenance, field), getattr(other.provenance, field)
            if mine != others:
                raise ArtifactError(
                    f"cannot add {self.trait} ({self.provenance.model}) and {other.trait} ({other.provenance.model}): "
                    f"their {field} is {mine} and {others}"
                )
        pair_ids = self.provenance.pair_ids + other.provenance.pair_ids
        provenance = replace(
            self.provenance,
            pair_ids=pair_ids,
            pair_set_hash=f"{self.provenance.pair_set_hash}+{other.provenance.pair_set_hash}",
        )
        return replace(
            self,
            trait=f"{self.trait}+{other.trait}",
            vector=self.vector + other.vector,
            provenance=provenance,
            aliases=(),
        )

    def __sub__(self, other: TraitVector) -> TraitVector:
        return self + -other

    def save(self, path: str | Path) -> Path:
        """Write to `path` (safetensors), by way of a temporary file beside it."""
        tensors = {"vector": self.vector, "layer_norms": self.layer_norms, "agreement": self.agreement}
        description = {"trait": self.trait, "aliases": list(self.aliases), **asdict(self.provenance)}
        return write_safetensors(path, TRAIT_VECTOR, tensors, description)

    @classmethod
    def load(cls, path: str | Path) -> TraitVector:
        """Read a file written by ``save``. Raises ArtifactError when it is missing or not such a file."""
        tensors, description = read_safetensors(path, TRAIT_VECTOR, ("vector", "layer_norms", "agreement"))
        try:
            provenance = provenance_from(description)
            vector = cls(
                trait=description["trait"],
                vector=tensors["vector"],
                layer_norms=tensors["layer_norms"],
                agreement=tensors["agreement"],
                provenance=provenance,
                aliases=tuple(description["aliases"]),
            )
        except (KeyError, TypeError) as error:
            raise ArtifactError(f"{path} has no field {error} in its provenance; extract it again") from error
        except ArtifactError as error:
            raise ArtifactError(f"{path}: {error}") from error
        return vector

    def export_gguf(self, path: str | Path) -> Path:
        """Write a llama.cpp control-vector file (``--control-vector``), by way of a temporary file.

        llama.cpp adds ``direction.N`` to the output of block N and refuses N = 0, so the row of block 0 is not in it.
        Its scale is a raw coefficient, and llama.cpp steers every position: the past is not clean there.
        """
        from gguf import GGUFWriter

        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".gguf-") as scratch:
            temporary = Path(scratch) / path.name
            writer = GGUFWriter(temporary, "controlvector")
            writer.add_string("controlvector.model_hint", self.provenance.model)
            writer.add_uint32("controlvector.layer_count", self.n_layers - 1)
            for layer in range(1, self.n_layers):
                writer.add_tensor(f"direction.{layer}", self.vector[layer].contiguous().numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            temporary.replace(path)
        return path


def check_finite(tensor: Tensor, what: str) -> None:
    """Raises ArtifactError unless `tensor` is float32 and finite."""
    if tensor.dtype != torch.float32:
        raise ArtifactError(f"{what} is {tensor.dtype}, not float32")
    if not torch.isfinite(tensor).all():
        raise ArtifactError(f"{what} is not finite")


def provenance_from(description: Mapping[str, Any]) -> Provenance:
    """Provenance out of a file's description. Raises KeyError for a missing field."""
    values = {field.name: description[field.name] for field in fields(Provenance)}
    return Provenance(**{**values, "pair_ids": tuple(values["pair_ids"])})


def write_safetensors(path: str | Path, kind: str, tensors: Mapping[str, Tensor], description: Any) -> Path:
    """Write float32 tensors and a JSON description, under a temporary name first: never half a file."""
    content = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in tensors.items()}
    # One key: safetensors writes several in a random order, and the same extraction would write different files.
    data = save(content, metadata={_KEY: json.dumps({"format": kind, **description}, sort_keys=True)})
    return write_whole(path, data)


def kind_of(path: str | Path) -> Any:
    """The kind of a file that ``write_safetensors`` made, None for a safetensors file of others. Raises ArtifactError
    for one that is no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            description: Any = json.loads((file.metadata() or {}).get(_KEY, "{}"))
    except (SafetensorError, OSError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from error
    return description.get("format") if isinstance(description, dict) else None


def read_safetensors(path: str | Path, kind: str, names: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and description of a file that ``write_safetensors`` made. Raises ArtifactError otherwise."""
    path = Path(path)
    if not path.is_file():
        raise ArtifactError(f"no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            description: Any = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            found = description.get("format") if isinstance(description, dict) else None
            if found != kind:
                raise ArtifactError(f"{path} is not a {kind} file (its format is {found!r})")
            tensors = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from error
    return tensors, description
