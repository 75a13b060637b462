"""TraitBasis: simulated users with steered traits, for testing AI agents.

    from traitbasis import UserSimulator, load_model
    user = UserSimulator(load_model("smollm2-135m-instruct"))
    user.reply(messages, traits={"impatience": "high"}, seed=7)

Names are imported on first use, so that ``import traitbasis`` and ``traitbasis --help`` do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from traitbasis.basis import Basis, build_basis, find_basis
    from traitbasis.engines.base import Sampling
    from traitbasis.errors import TraitBasisError
    from traitbasis.hooks import record, steer
    from traitbasis.model import LanguageModel, load_model
    from traitbasis.pairs import PairSet, known_traits, load_pairs
    from traitbasis.simulator import UserSimulator
    from traitbasis.trait_vector import TraitVector
    from traitbasis.tries import UserTurn

__version__ = "0.1.0"

_HOMES = {
    "Basis": "basis",
    "build_basis": "basis",
    "find_basis": "basis",
    "Sampling": "engines.base",
    "TraitBasisError": "errors",
    "record": "hooks",
    "steer": "hooks",
    "LanguageModel": "model",
    "load_model": "model",
    "PairSet": "pairs",
    "known_traits": "pairs",
    "load_pairs": "pairs",
    "UserSimulator": "simulator",
    "UserTurn": "tries",
    "TraitVector": "trait_vector",
}
__all__ = [
    "Basis",
    "LanguageModel",
    "PairSet",
    "Sampling",
    "TraitBasisError",
    "TraitVector",
    "UserSimulator",
    "UserTurn",
    "build_basis",
    "find_basis",
    "known_traits",
    "load_model",
    "load_pairs",
    "record",
    "steer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'traitbasis' has no attribute {name!r}")
    return getattr(import_module(f"traitbasis.{_HOMES[name]}"), name)
