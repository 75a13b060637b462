"""Composability: does a customer with several traits show each of them, and nothing else?

The paper asks people which traits of a mix they see (62.5 % for its method). Here, of every dialogue with two or more
intended traits, a rater says which of all evaluated traits are present, without being told which are intended:

    composability = share of dialogues in which exactly the intended traits are present

and its parts: all intended ones are there; each of them; how many absent ones are found. For the namer a trait is
present when its probability, mean over turns, is above a threshold that dialogues put together from pairs gave
(``quality.py``). *Ranked* needs no threshold: the k traits with the highest probability are the k intended ones; chance
is one in "k of all traits". The *shuffled* figure is what the same findings would reach if mixes were dealt anew within
each task, nan when a method has one mix only.

Percentages do not compare with the paper's: people voted there, on other traits and another scale.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from traitbasis.dialogues import Dialogue
from traitbasis.evaluation.findings import Finding, Findings, asked_of, rated
from traitbasis.metrics.estimate import Estimate, finite, mean, mean_over_tasks


@dataclass(frozen=True)
class Composability:
    """Of one rater and one method.

    exact: exactly the intended traits are present; every: all of them, whatever else is; each: share of intended traits
    present; false: mean number of absent traits found, by_false: how often each. ranked: the k highest are the k
    intended, chance_ranked its chance; nan for raters without an order. shuffled: exact, with mixes dealt anew within
    each task. by_mix: exact, by spec without levels; by_trait: share of the mixes with a trait in which it is present.
    """

    rater: str
    method: str
    dialogues: int
    exact: Estimate
    every: Estimate
    each: Estimate
    false: Estimate
    ranked: Estimate
    chance_ranked: float
    shuffled: Estimate
    by_mix: Mapping[str, Estimate]
    by_trait: Mapping[str, Estimate]
    by_false: Mapping[str, int]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        figures = ("exact", "every", "each", "false", "ranked", "shuffled")
        return {
            "rater": self.rater,
            "method": self.method,
            "dialogues": self.dialogues,
            **{name: getattr(self, name).record for name in figures},
            "chance_ranked": finite(self.chance_ranked),
            "by_mix": {mix: figure.record for mix, figure in self.by_mix.items()},
            "by_trait": {trait: figure.record for trait, figure in self.by_trait.items()},
            "by_false": self.by_false,
        }


@dataclass(frozen=True)
class _Item:
    task: str
    intended: frozenset[str]
    present: frozenset[str]
    ranked: tuple[str, ...]

    @property
    def mix(self) -> str:
        return "+".join(sorted(self.intended))


def composability(
    dialogues: Sequence[Dialogue], raters: Mapping[str, Findings], traits: Sequence[str], *, seed: int = 0
) -> list[Composability]:
    """Composability by rater and method, in that order; dialogues with fewer than two traits are left out.

    raters: findings by rater's name. traits: all that are evaluated. Raises EvaluationError when there is no mix, or
    one of a trait that is not evaluated.
    """
    asked = asked_of("composability", dialogues, traits)
    return [
        _composability(rater, method, [_item(*pair, traits) for pair in pairs], traits, seed)
        for rater, method, pairs in rated(asked, raters)
    ]


def _composability(rater: str, method: str, items: Sequence[_Item], traits: Sequence[str], seed: int) -> Composability:
    def share(value: Callable[[_Item], float], chosen: Iterable[_Item] = items) -> Estimate:
        return mean_over_tasks(((item.task, float(value(item))) for item in chosen), seed)

    def exact(item: _Item) -> float:
        return float(item.present == item.intended)

    def first(item: _Item) -> float:
        return float({*item.ranked[: len(item.intended)]} == item.intended) if item.ranked else math.nan

    ordered = [item for item in items if item.ranked]
    dealt: dict[str, Counter[frozenset[str]]] = defaultdict(Counter)
    for item in items:
        dealt[item.task][item.intended] += 1

    def expected(item: _Item) -> float:
        mixes = dealt[item.task]
        return mixes[item.present] / mixes.total() if len(mixes) > 1 else math.nan

    return Composability(
        rater=rater,
        method=method,
        dialogues=len(items),
        exact=share(exact),
        every=share(lambda item: item.intended <= item.present),
        each=share(lambda item: len(item.intended & item.present) / len(item.intended)),
        false=share(lambda item: len(item.present - item.intended)),
        ranked=share(first, ordered),
        chance_ranked=mean([1 / math.comb(len(traits), len(item.intended)) for item in ordered]),
        shuffled=share(expected),
        by_mix={
            mix: share(exact, [item for item in items if item.mix == mix]) for mix in sorted({i.mix for i in items})
        },
        by_trait={
            trait: share(lambda item, t=trait: t in item.present, [i for i in items if trait in i.intended])  # type: ignore[misc]
            for trait in sorted({trait for item in items for trait in item.intended})
        },
        by_false=dict(Counter(trait for item in items for trait in sorted(item.present - item.intended)).most_common()),
    )


def _item(dialogue: Dialogue, finding: Finding, traits: Sequence[str]) -> _Item:
    present = frozenset(trait for trait in finding.named if trait in traits)
    return _Item(dialogue.task, frozenset(dialogue.traits), present, finding.ranked)
