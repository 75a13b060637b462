"""The persona in the instruction: users of ``traitbasis serve`` who are told a trait, and steered by nothing.

A prompted user and a tuned one (``train.sft``) are told the same words, so that they differ in the model alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import yaml

from traitbasis.dialogues import spec_of
from traitbasis.errors import TraitSpecError
from traitbasis.files import write_whole
from traitbasis.pairs import PairSet, load_pairs
from traitbasis.users import ServedUser

LEVEL_WORDS = {"low": "slightly", "medium": "clearly", "high": "very strongly"}
NEUTRAL = "neutral"


def read_condition(spec: str) -> dict[str, str]:
    """Level by trait of a text such as ``impatience-high+skeptical-low``; none for "" and ``neutral``.

    Raises TraitSpecError for what is no trait and level: only levels have words.
    """
    if spec in ("", NEUTRAL):
        return {}
    traits: dict[str, str] = {}
    for part in spec.split("+"):
        trait, _, level = part.rpartition("-")
        if not trait or level not in LEVEL_WORDS or trait in traits:
            raise TraitSpecError(
                f"cannot read {part!r} in the condition {spec!r}; write each trait once with low, medium or high, such "
                "as impatience-high+skeptical-low, or neutral"
            )
        traits[trait] = level
    return traits


def condition_name(traits: Mapping[str, str]) -> str:
    """A condition as a part of names, which take no "+": ``impatience-high.skeptical-low``, or ``neutral``."""
    return spec_of(traits).replace("+", ".") or NEUTRAL


def persona(traits: Mapping[str, str], pair_sets: Mapping[str, PairSet]) -> dict[str, str]:
    """What a customer of these traits is told: the pair file's definition by trait, and how much of it."""
    told = {}
    for trait, level in sorted(traits.items()):
        definition = " ".join(pair_sets[trait].definition.split()).rstrip(".")
        told[trait.replace("_", " ")] = f"({LEVEL_WORDS[level]}, in every message): {definition}"
    return told


def prompted_user(traits: Mapping[str, str], pair_sets: Mapping[str, PairSet]) -> ServedUser:
    """The served user ``prompted-<condition>``; ``about`` is the line that is added to its instruction."""
    return _user(traits, pair_sets, "prompted")


def write_users(
    path: Path,
    conditions: Iterable[Mapping[str, str]],
    pair_sets: Mapping[str, PairSet],
    kind: Literal["prompted", "lora"] = "prompted",
) -> Path:
    """Write a users file for ``traitbasis serve --users``: ``<kind>-<condition>`` for each condition.

    Among the prompted there is always a neutral one. A user of the kind ``lora`` is told nothing; its name says which
    adapters are served.
    """
    every = ({}, *conditions) if kind == "prompted" else tuple(conditions)
    users = {user.name: user for user in (_user(traits, pair_sets, kind) for traits in every)}
    written = {"users": [user.model_dump(exclude_defaults=True) for user in users.values()]}
    return write_whole(path, yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=110))


def pair_sets_of(traits: Iterable[str]) -> dict[str, PairSet]:
    """The shipped pairs by trait. Raises PairError for a trait that has none, naming those that have."""
    return {trait: load_pairs(trait) for trait in dict.fromkeys(traits)}


def traits_of(conditions: Sequence[Mapping[str, str]]) -> list[str]:
    """Every trait of some conditions, once, by name."""
    return sorted({trait for condition in conditions for trait in condition})


def _user(traits: Mapping[str, str], pair_sets: Mapping[str, PairSet], kind: str) -> ServedUser:
    told = persona(traits, pair_sets) if kind == "prompted" else {}
    return ServedUser.model_validate({"name": f"{kind}-{condition_name(traits)}", "persona": told})
