"""Trait specs: what a caller may write for "which traits, how much".

The text form is ``impatience-high+skeptical-0.5``; ``{"impatience": "high", "skeptical": 0.5}`` says the same.
An intensity is a level or a finite number: 1.0 is "medium", 0 is off, a negative number is the opposite pole.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from decimal import Decimal
from typing import Any

from traitbasis.errors import TraitSpecError

# Intensities of the levels for a trait that was not calibrated: fixed fractions of its column's scale.
LEVELS = {"off": 0.0, "none": 0.0, "low": 0.5, "medium": 1.0, "high": 1.5}
_NOTHING = ("off", "none")  # as a whole spec: unsteered
MAX_INTENSITY = 1000  # far beyond any use; keeps sums finite
Traits = str | Mapping[str, Any] | None
_TINY = 1e-9  # what is smaller is written with an exponent

_PART = re.compile(r"^(?P<trait>[A-Za-z][A-Za-z0-9_]*)(?:-(?P<intensity>-?(?:[0-9.]+e-[0-9]+|[A-Za-z0-9.]+)))?$")


def parse_traits(
    traits: Traits,
    known: Collection[str],
    aliases: Mapping[str, str] | None = None,
    levels: Mapping[str, Mapping[str, float]] | None = None,
) -> dict[str, float]:
    """Intensities by trait name, off ones left out, in a fixed order.

    known: the traits there are. aliases: other spellings, such as ``{"skepticism": "skeptical"}``. levels: intensities
    by level, by trait; ``LEVELS`` where it says nothing. A trait without an intensity in a text spec is "medium"; an
    empty spec, "off" and "none" are unsteered. Raises TraitSpecError for an unknown trait (naming the known ones), a
    trait given twice, or an intensity that is no level and no finite number.
    """
    if traits is None or (isinstance(traits, str) and traits.strip().casefold() in ("", *_NOTHING)):
        return {}
    if isinstance(traits, str):
        items: list[tuple[str, Any]] = []
        for part in traits.split("+"):
            match = _PART.match(part.strip())
            if match is None:
                raise TraitSpecError(
                    f"cannot read {part!r} in trait spec {traits!r}; write trait-level or trait-number joined by '+', "
                    "such as impatience-high+skeptical-0.5"
                )
            items.append((match["trait"], match["intensity"] or "medium"))
    elif isinstance(traits, Mapping):
        items = list(traits.items())
    else:
        raise TraitSpecError(f"traits must be a text spec or a mapping, not {traits!r}")

    intensities: dict[str, float] = {}
    for name, value in items:
        trait = str(name).strip().casefold()
        trait = trait if trait in known else (aliases or {}).get(trait, trait)
        if trait not in known:
            raise TraitSpecError(f"unknown trait {name!r}; known: {', '.join(sorted(known)) or 'none'}")
        if trait in intensities:
            raise TraitSpecError(f"trait {trait!r} is given twice")
        intensities[trait] = _intensity(trait, value, {**LEVELS, **(levels or {}).get(trait, {})})
    return {trait: intensities[trait] for trait in sorted(intensities) if intensities[trait] != 0}


def format_traits(intensities: Mapping[str, float]) -> str:
    """The text form of parsed intensities; empty when there are none."""
    return "+".join(f"{trait}-{_digits(value)}" for trait, value in intensities.items())


def _digits(value: float) -> str:
    """The shortest decimal that reads back as `value`; with an exponent only where there would be very many zeros."""
    text = repr(float(value))
    return text if 0 < abs(value) < _TINY else f"{Decimal(text):f}".removesuffix(".0")


def _intensity(trait: str, value: Any, levels: Mapping[str, float]) -> float:
    if value is None:
        return 0.0
    if isinstance(value, str):
        text = value.strip().casefold()
        if text in levels:
            return levels[text]
        with suppress(ValueError):
            value = float(text)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_INTENSITY:
        raise TraitSpecError(
            f"intensity {value!r} of trait {trait!r} is no level ({', '.join(levels)}) and no number from "
            f"-{MAX_INTENSITY} to {MAX_INTENSITY}"
        )
    return float(value)
