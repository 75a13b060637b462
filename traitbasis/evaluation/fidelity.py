"""Fidelity: is the trait that was asked for the one that is named?

The paper asks people whether the intended trait and level are recognised. Here, of every dialogue with one intended
trait or none, a rater names one of all evaluated traits or none, without being told which is intended:

    fidelity = share of dialogues that are named as intended

including neutral dialogues (to be named none) and without them. Chance is 1 / (traits + 1). The *shuffled* figure is
what the same names would reach if intended traits were dealt anew within each task: what is left when the rater says
whatever it says without regard to the trait. It is the expected value over all ways to deal them.

Level: of two dialogues of one method, task, trial and trait that differ in the level alone, the share in which the
higher one shows more of it; ties count half and 0.5 is chance. Where turns are rated, a longer dialogue counts as far
as the other goes: what the agent asks later is answered otherwise. It needs no common scale, so raters and methods are
treated alike. Raters who state levels also have the share named with the very level.

Intervals draw tasks again. Raters who name several traits for a dialogue are taken to mean the strongest, and are wrong
when there is none.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traitbasis.dialogues import Dialogue
from traitbasis.evaluation.findings import Finding, Findings, asked_of, rated
from traitbasis.evaluation.judgments import LEVELS
from traitbasis.evaluation.namer import NONE
from traitbasis.metrics.estimate import Estimate, mean, mean_over_tasks


@dataclass(frozen=True)
class Fidelity:
    """Of one rater and one method.

    dialogues: how many were rated. named: share named as intended, of all; of_traits: without neutral ones; neutral: of
    neutral ones alone. by_trait: of each intended trait. chance: 1 / labels. shuffled: with intended traits dealt anew
    within each task; nan where nothing could be dealt otherwise. by_turn: of first, second, ... customer turns read
    alone; empty for raters of whole dialogues. confusion: dialogues by intended and named label. level: share of pairs
    of levels in the right order, of `level_pairs`. named_level: trait and level both as intended, where levels are
    stated.
    """

    rater: str
    method: str
    dialogues: int
    named: Estimate
    of_traits: Estimate
    neutral: Estimate
    by_trait: Mapping[str, Estimate]
    chance: float
    shuffled: Estimate
    by_turn: tuple[Estimate, ...]
    confusion: Mapping[str, Mapping[str, int]]
    level: Estimate
    level_pairs: int
    named_level: Estimate

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rater": self.rater,
            "method": self.method,
            "dialogues": self.dialogues,
            "named": self.named.record,
            "of_traits": self.of_traits.record,
            "neutral": self.neutral.record,
            "by_trait": {trait: figure.record for trait, figure in self.by_trait.items()},
            "chance": round(self.chance, 4),
            "shuffled": self.shuffled.record,
            "by_turn": [figure.record for figure in self.by_turn],
            "confusion": self.confusion,
            "level": self.level.record,
            "level_pairs": self.level_pairs,
            "named_level": self.named_level.record,
        }


@dataclass(frozen=True)
class _Item:
    """A rated dialogue. expected: chance of being right when intended labels are dealt anew within the task."""

    dialogue: Dialogue
    finding: Finding
    intended: str
    named: str
    expected: float = math.nan

    @property
    def right(self) -> float:
        return float(self.intended == self.named)


def fidelity(
    dialogues: Sequence[Dialogue], raters: Mapping[str, Findings], traits: Sequence[str], *, seed: int = 0
) -> list[Fidelity]:
    """Fidelity by rater and method, in that order. Dialogues of mixes are another metric's and are left out.

    raters: findings by rater's name. traits: all that can be named. Raises EvaluationError when no dialogue has one
    intended trait or none, or has one that cannot be named.
    """
    asked = asked_of("fidelity", dialogues, traits)
    return [
        _fidelity(rater, method, _with_expected([_item(*pair, traits) for pair in pairs]), traits, seed)
        for rater, method, pairs in rated(asked, raters)
    ]


def _fidelity(rater: str, method: str, items: Sequence[_Item], traits: Sequence[str], seed: int) -> Fidelity:
    steered = [item for item in items if item.intended != NONE]
    confusion: dict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        confusion[item.intended][item.named] += 1

    def share(chosen: Iterable[_Item], value: Callable[[_Item], float] = lambda item: item.right) -> Estimate:
        return mean_over_tasks(((item.dialogue.task, value(item)) for item in chosen), seed)

    def with_level(item: _Item) -> float:
        return float(item.right and item.finding.named[item.intended] == item.dialogue.traits[item.intended])

    said = [level for item in items for level in item.finding.named.values()]
    states_levels = bool(said) and all(level in LEVELS for level in said)
    pairs = _level_pairs(steered)
    longest = max(len(item.finding.by_turn) for item in items)
    return Fidelity(
        rater=rater,
        method=method,
        dialogues=len(items),
        named=share(items),
        of_traits=share(steered),
        neutral=share(item for item in items if item.intended == NONE),
        by_trait={
            label: share(item for item in steered if item.intended == label)
            for label in sorted({item.intended for item in steered})
        },
        chance=1 / (len(traits) + 1),
        shuffled=share(items, lambda item: item.expected),
        by_turn=tuple(
            share(
                (item for item in items if turn < len(item.finding.by_turn) and item.finding.by_turn[turn]),
                lambda item, turn=turn: float(item.finding.by_turn[turn] == item.intended),  # type: ignore[misc]
            )
            for turn in range(longest)
        ),
        confusion={intended: dict(named) for intended, named in sorted(confusion.items())},
        level=mean_over_tasks(pairs, seed),
        level_pairs=sum(not math.isnan(score) for _, score in pairs),
        named_level=share(steered if states_levels else [], with_level),
    )


def _item(dialogue: Dialogue, finding: Finding, traits: Sequence[str]) -> _Item:
    intended = next(iter(dialogue.traits), NONE)
    return _Item(dialogue, finding, intended, finding.label(traits))


def _with_expected(items: Sequence[_Item]) -> list[_Item]:
    """Items with the expectation of the shuffled figure, where tasks have more than one intended label."""
    of_task: dict[str, Counter[str]] = defaultdict(Counter)
    for item in items:
        of_task[item.dialogue.task][item.intended] += 1
    return [
        _Item(item.dialogue, item.finding, item.intended, item.named, dealt[item.named] / dealt.total())
        if len(dealt := of_task[item.dialogue.task]) > 1
        else item
        for item in items
    ]


def _level_pairs(items: Sequence[_Item]) -> list[tuple[str, float]]:
    """(task, 1 when the higher level shows more, 0 when less, 0.5 when the same), nan where a strength is unknown."""
    alike: dict[tuple[Any, ...], list[_Item]] = defaultdict(list)
    for item in items:
        _, task, trial, positions = item.dialogue.key
        if item.dialogue.traits[item.intended] in LEVELS:
            alike[item.intended, task, trial, positions].append(item)
    found = []
    for (trait, task, *_), group in alike.items():
        group.sort(key=lambda item: LEVELS.index(item.dialogue.traits[trait]))
        for low, high in combinations(group, 2):
            if low.dialogue.traits[trait] == high.dialogue.traits[trait]:
                continue
            turns = min(len(low.finding.course.get(trait, ())), len(high.finding.course.get(trait, ())))
            less, more = _strength(low.finding, trait, turns), _strength(high.finding, trait, turns)
            unknown = math.isnan(less) or math.isnan(more)
            found.append((task, math.nan if unknown else 1.0 if more > less else 0.5 if more == less else 0.0))
    return found


def _strength(finding: Finding, trait: str, turns: int) -> float:
    """Of the first `turns`; of the whole dialogue where turns are not rated."""
    return mean(finding.course[trait][:turns]) if turns else finding.strength[trait]
