"""What the instruments of ``traits.py`` are worth.

Measured on pairs that they are not made from, and on turns that hold a trait's words without the trait.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

from traitbasis.evaluation.namer import Examples, Namer, balanced_accuracy, checking_examples, train_namer
from traitbasis.metrics.classifier import TraitClassifier, train_classifier
from traitbasis.metrics.estimate import finite, mean
from traitbasis.metrics.fidelity import Sides, TraitProbe, auc

_SHOWN = 0.5  # of a probe or classifier: half way between neutral pairs and the trait's
_DRAWS = 120  # of shuffled labels, over all traits
_ASSEMBLED = 300  # dialogues of each kind that are put together from pairs
Assembled: TypeAlias = list[tuple[frozenset[int], Tensor]]  # traits by number, and the dialogue's probabilities


@dataclass(frozen=True)
class Quality:
    """What the instruments are worth, on pairs that they are not made from.

    auc: by instrument (probe, classifier, namer) and trait. The classifier and the namer tell the trait's ``heldout``
    responses from their neutral ones (the namer: from all other responses); the probe, which is made from those, is
    checked on the other pairs. shuffled_auc: by instrument, mean over traits when made from shuffled labels; 0.5 is
    chance.
    accuracy: of the namer, mean over traits and none of the ``heldout`` responses named right; shuffled_accuracy: the
    same with shuffled labels; chance: 1 / labels. neutral: share of neutral responses named none.
    shown, fooled: by instrument, share of a trait's responses, and of neutral turns stuffed with its words, in which
    the trait is found (namer: named; others: expression above a half). fooled["namer: any"]: any trait named.
    threshold: probability above which a trait is present in a dialogue, so that most dialogues of two traits, put
    together from ``default`` pairs, have exactly both. assembled: on such dialogues of ``heldout`` pairs, with none,
    one or two traits, the share named right, in which both rank first, in which exactly what is there is present.
    """

    auc: Mapping[str, Mapping[str, float]]
    shuffled_auc: Mapping[str, float]
    accuracy: float
    shuffled_accuracy: float
    chance: float
    neutral: float
    shown: Mapping[str, float]
    fooled: Mapping[str, float]
    threshold: float
    assembled: Mapping[str, float]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON, which has no nan; four digits."""
        found: dict[str, Any] = _rounded(asdict(self))
        return found

    @property
    def lines(self) -> list[str]:
        """For a person to read under a table."""
        instruments = [
            f"{name} {mean(list(by_trait.values())):.2f} (worst {min(by_trait, key=lambda t: by_trait[t])} "
            f"{min(by_trait.values()):.2f}; shuffled {self.shuffled_auc[name]:.2f})"
            for name, by_trait in self.auc.items()
        ]
        fooled = [f"{name} {share:.2f} of stuffed, {self.shown[name]:.2f} of real turns" for name, share in self._both]
        return [
            f"AUC on other pairs: {', '.join(instruments)}",
            f"single held-out turns named right: {self.accuracy:.2f} (chance {self.chance:.2f}, shuffled labels "
            f"{self.shuffled_accuracy:.2f}); neutral ones named none: {self.neutral:.2f}",
            f"trait found where only its words are: {'; '.join(fooled)}",
            "dialogues put together from held-out turns: "
            + ", ".join(f"{name} {share:.2f}" for name, share in self.assembled.items()),
        ]

    @property
    def _both(self) -> list[tuple[str, float]]:
        return [(name, share) for name, share in self.fooled.items() if name in self.shown]


def measure(
    probes: Mapping[str, TraitProbe],
    classifiers: Mapping[str, TraitClassifier],
    namer: Namer,
    sides: Mapping[str, Sides],
    examples: Examples,
    checking: Mapping[str, Mapping[str, Tensor]],
) -> Quality:
    """Figures of instruments made from `sides`. examples: what the namer was trained on; checking: states of stuffed
    turns, in forms that it was not trained on, by trait and use of the pair."""
    traits = tuple(sides)
    stuffed = {use: {trait: checking[trait][use] for trait in traits} for use in ("default", "heldout")}
    held_out = checking_examples(sides, {}, "heldout")
    none, threshold = len(traits), _threshold(_assemble(namer, sides, "default"))

    def project(trait: str, states: Tensor) -> Tensor:
        probe = probes[trait]
        return states[:, probe.layer] @ probe.direction - probe.offset

    def named(states: Tensor) -> Tensor:
        return namer.probabilities(states).argmax(-1)

    def share(flags: Iterable[Tensor]) -> float:
        return float(torch.cat([flag.float() for flag in flags]).mean())

    score = {trait: classifiers[trait].score for trait in traits}
    shown = {
        "probe": share(project(t, sides[t].positive["default"]) > _SHOWN for t in traits),
        "classifier": share(score[t](sides[t].positive["heldout"]) > _SHOWN for t in traits),
        "namer": share(named(sides[t].positive["heldout"]) == i for i, t in enumerate(traits)),
    }
    fooled = {
        "probe": share(project(t, stuffed["default"][t]) > _SHOWN for t in traits),
        "classifier": share(score[t](stuffed["heldout"][t]) > _SHOWN for t in traits),
        "namer": share(named(stuffed["heldout"][t]) == i for i, t in enumerate(traits)),
        "namer: any": share(named(stuffed["heldout"][t]) != none for t in traits),
    }
    seeds = range(math.ceil(_DRAWS / len(traits)))
    dealt = {use: [_dealt(sides, use, seed) for seed in seeds] for use in ("extra", "heldout")}
    shuffled = [
        train_namer(traits, examples.shuffled(seed), held_out.shuffled(seed), [namer.layer]) for seed in range(10)
    ]
    return Quality(
        auc={
            "probe": {trait: probe.auc for trait, probe in probes.items()},
            "classifier": {trait: classifier.auc for trait, classifier in classifiers.items()},
            "namer": _named_auc(namer, held_out),
        },
        shuffled_auc={
            "probe": mean(
                [
                    TraitProbe.from_sides(t, hand[t], p.as_, p.layer).auc
                    for hand in dealt["heldout"]
                    for t, p in probes.items()
                ]
            ),
            "classifier": mean(
                [train_classifier(t, hand, [c.layer]).auc for hand in dealt["extra"] for t, c in classifiers.items()]
            ),
            "namer": mean([rank for other in shuffled for rank in _named_auc(other, held_out).values()]),
        },
        accuracy=balanced_accuracy(namer, held_out),
        shuffled_accuracy=mean([balanced_accuracy(other, held_out) for other in shuffled]),
        chance=1 / len(namer.labels),
        neutral=share(named(sides[t].negative["heldout"]) == none for t in traits),
        shown=shown,
        fooled=fooled,
        threshold=threshold,
        assembled=_right(_assemble(namer, sides, "heldout"), threshold),
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _rounded(inner) for name, inner in value.items()}
    return finite(value)


def _named_auc(namer: Namer, examples: Examples) -> dict[str, float]:
    probabilities = namer.probabilities(examples.states)
    return {
        trait: auc(probabilities[examples.labels == i, i], probabilities[examples.labels != i, i])
        for i, trait in enumerate(namer.labels[:-1])
    }


def _dealt(sides: Mapping[str, Sides], use: str, seed: int) -> dict[str, Sides]:
    """All responses of one use dealt anew to the sides of all traits. Within a trait would not do: against other
    traits' responses even a mixed half of its own would show something of it."""
    every = [states for side in sides.values() for states in (side.positive[use], side.negative[use])]
    deck = torch.cat(every)[torch.randperm(sum(map(len, every)), generator=torch.Generator().manual_seed(seed))]
    hands = iter(torch.split(deck, [len(states) for states in every]))
    return {
        trait: Sides({**side.positive, use: next(hands)}, {**side.negative, use: next(hands)})
        for trait, side in sides.items()
    }


def _assemble(namer: Namer, sides: Mapping[str, Sides], use: str) -> Assembled:
    """Dialogues put together from single responses: of three turns of one trait, three of none, two each of two."""
    rng, traits = random.Random(use), list(sides)
    positive = [namer.probabilities(side.positive[use]) for side in sides.values()]
    negative = torch.cat([namer.probabilities(side.negative[use]) for side in sides.values()])

    def turns(i: int, n: int) -> list[Tensor]:
        return [positive[i][rng.randrange(len(positive[i]))] for _ in range(n)]

    found: Assembled = []
    for _ in range(_ASSEMBLED):
        one, *other = rng.sample(range(len(traits)), min(2, len(traits)))
        found.append((frozenset(), torch.stack([negative[rng.randrange(len(negative))] for _ in range(3)]).mean(0)))
        found.append((frozenset([one]), torch.stack(turns(one, 3)).mean(0)))
        if other:
            found.append((frozenset([one, *other]), torch.stack([*turns(one, 2), *turns(other[0], 2)]).mean(0)))
    return found


def _threshold(dialogues: Assembled) -> float:
    """The probability above which traits count as present for most dialogues of two to have exactly their own."""
    bounds = []  # a dialogue is right when the threshold is at least the first and below the second
    mixes = [dialogue for dialogue in dialogues if len(dialogue[0]) > 1]
    for traits, names in mixes or dialogues:
        present = [float(p) for i, p in enumerate(names[:-1]) if i in traits]
        absent = [float(p) for i, p in enumerate(names[:-1]) if i not in traits]
        bounds.append((max(absent, default=0.0), min(present, default=1.0)))
    values = sorted({value for pair in bounds for value in pair})
    between = [(low + high) / 2 for low, high in pairwise(values)] or [0.5]
    return max(between, key=lambda t: sum(low <= t < high for low, high in bounds))


def _right(dialogues: Assembled, threshold: float) -> dict[str, float]:
    none = len(dialogues[0][1]) - 1
    found: dict[str, list[float]] = {}
    for traits, names in dialogues:
        count, first = ("none", "one", "two")[len(traits)], names[:-1].topk(len(traits)).indices.tolist()
        present = {i for i, p in enumerate(names[:-1].tolist()) if p > threshold}
        if len(traits) < 2:
            found.setdefault(f"{count} named", []).append(float(int(names.argmax()) == next(iter(traits), none)))
        else:
            found.setdefault(f"{count} ranked first", []).append(float(set(first) == traits))
        found.setdefault(f"exactly {count} present", []).append(float(present == traits))
    return {name: mean(values) for name, values in found.items()}
