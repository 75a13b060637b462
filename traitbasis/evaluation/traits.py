"""Which trait does a turn, and a dialogue, show? Instruments of the unsteered model, and what any rater says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Judgment:
    """Which traits one rater (an instrument, a judge, a person) finds in a dialogue's customer.

    method, key: of the dialogue (``Dialogue.key``). traits: level (``low``, ``medium``, ``high``, or ``present`` where
    none is said) by named trait; empty when the customer shows none.
    """

    method: str
    key: tuple[str, str, int, str]
    rater: str
    traits: Mapping[str, str]
