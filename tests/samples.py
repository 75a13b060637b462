"""Small pair sets and vectors to test with; nothing in here ships."""

from __future__ import annotations

from typing import Any

import torch
import yaml

from traitbasis.basis import Basis, build_basis
from traitbasis.chat import Turn
from traitbasis.contexts import EvaluationContext
from traitbasis.guards import GUARDS
from traitbasis.model import LanguageModel
from traitbasis.pairs import Pair, PairSet
from traitbasis.trait_vector import Provenance, TraitVector


def sample_pair(number: int = 0, **changes: Any) -> dict[str, Any]:
    """A valid pair as YAML would give it, with `changes`."""
    pair: dict[str, Any] = {
        "id": f"pair-{number}",
        "domain": "retail",
        "use": "default",
        "context": [{"system": f"You are customer number {number}."}, {"agent": "How can I help?"}],
        "positive": f"Order W{number} now, I have waited long enough.",
        "negative": f"Order W{number} please, there is no hurry at all.",
        "facts": [f"W{number}"],
    }
    return {**pair, **changes}


def sample_document(*pairs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A valid pair file as a document, with `changes`."""
    document: dict[str, Any] = {
        "trait": "impatience",
        "definition": "Presses for the result.",
        "opposite": "Waits.",
        "aliases": ["impatient"],
        "pairs": list(pairs) or [sample_pair(0), sample_pair(1)],
    }
    return {**document, **changes}


def sample_set(pairs: int = 3, trait: str = "impatience") -> PairSet:
    """A pair set whose responses differ in length, with a longer conversation in every second pair."""
    talk = [{"agent": "Hello."}, {"customer": "Hi, it is about my order."}, {"agent": "Which one?"}]
    made = []
    for i in range(pairs):
        context = [{"system": f"You are customer number {i}."}, *(talk if i % 2 else [{"agent": "How can I help?"}])]
        made.append(
            sample_pair(
                i,
                context=context,
                positive=f"Order W{i} now, I have waited {'long ' * (3 * i)}enough for {trait}.",
                negative=f"Order W{i} please, no hurry {'at all ' * (2 * i)}about it, thank you.",
            )
        )
    return PairSet.model_validate(sample_document(*made, trait=trait, aliases=[f"{trait}_x"]))


def lettered_set(trait: str, letter: str, n: int = 18) -> PairSet:
    """Positives hold a run of `letter`, negatives of o; as many pairs of each use, to extract and to measure with."""
    pairs = []
    for i in range(n):
        sides = [f"W{i} {'abcdefgh'[i % 8] * 4} {mark * 8} it" for mark in (letter, "o")]
        use = ("default", "extra", "heldout")[i % 3]
        pairs.append(sample_pair(i, positive=sides[0], negative=sides[1], use=use))
    return PairSet.model_validate(sample_document(*pairs, trait=trait, aliases=[]))


def sample_contexts(n: int) -> list[EvaluationContext]:
    """Evaluation contexts of one fact each."""
    return [
        EvaluationContext(
            id=f"task-{i}",
            domain="retail",
            context=(Turn("system", f"You bought lamp W{i}."), Turn("agent", "Hi! What is it?")),
            facts=(f"W{i}",),
        )
        for i in range(n)
    ]


def load_pair(pair: dict[str, Any]) -> Pair:
    """A Pair from what ``sample_pair`` gives."""
    return Pair.model_validate(pair)


def to_yaml(document: Any) -> str:
    return str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def sample_vector(
    trait: str = "impatience", seed: int = 0, layers: int = 4, width: int = 8, **changes: Any
) -> TraitVector:
    """A random vector of a model that does not exist; `changes` go to its provenance."""
    generator = torch.Generator().manual_seed(seed)
    provenance: dict[str, Any] = {
        "model": "no-model",
        "model_fingerprint": "0123456789abcdef",
        "template_hash": "f" * 64,
        "as_": "user",
        "span": "response",
        "pair_set_hash": "e" * 64,
        "pair_ids": ("a", "b"),
        "dtype": "float32",
        "traitbasis_version": "0",
        "transformers_version": "5",
        "torch_version": "2",
    }
    return TraitVector(
        trait=trait,
        vector=torch.randn(layers, width, generator=generator),
        layer_norms=torch.rand(layers, generator=generator) * 10 + 5,
        agreement=torch.rand(layers, generator=generator),
        provenance=Provenance(**{**provenance, **changes}),
        aliases=(f"{trait}_x",),
    )


def random_basis(lm: LanguageModel, *traits: str, dose: float = 2.0) -> Basis:
    """Random directions that pass for vectors of `lm`, large enough to change its text."""
    provenance = Provenance(
        model=lm.name,
        model_fingerprint=lm.fingerprint,
        template_hash=lm.template_hash,
        as_="user",
        span="response",
        pair_set_hash="0",
        pair_ids=("a",),
        dtype="float32",
        traitbasis_version="0",
        transformers_version="0",
        torch_version="0",
    )
    vectors = [
        TraitVector(
            trait=trait,
            vector=torch.randn(len(lm.layers), lm.width, generator=torch.Generator().manual_seed(i)),
            layer_norms=torch.ones(len(lm.layers)) * 5,
            agreement=torch.ones(len(lm.layers)),
            provenance=provenance,
            aliases=("skepticism",) if trait == "skeptical" else (),
        )
        for i, trait in enumerate(traits)
    ]
    return build_basis(vectors, dose=dose)


# The others find much to reject in a random model's noise.
MILD_GUARDS = tuple(guard for guard in GUARDS if guard.name in ("empty", "thought"))
