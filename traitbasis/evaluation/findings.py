"""What one rater finds in one dialogue: the form in which instruments, judges and people are measured alike."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from traitbasis.dialogues import Dialogue
from traitbasis.errors import EvaluationError
from traitbasis.evaluation.judgments import LEVELS, Judgment, Side, judged, player_of, side_of
from traitbasis.evaluation.namer import NONE
from traitbasis.evaluation.traits import TurnScore, names_of, strength_of

NAMER = "namer"  # the package's own rater
SEVERAL = "several"  # named where one was asked for


@dataclass(frozen=True)
class Finding:
    """named: level by trait (``low``, ``medium``, ``high``, ``present``).

    strength: by trait, on the rater's own scale, which only orders dialogues; nan where unknown. ranked: traits, the
    strongest first; empty without an order. by_turn: what each customer turn is named, alone; course: by trait, the
    strength of each; empty where turns are not rated.
    """

    named: Mapping[str, str]
    strength: Mapping[str, float] = field(default_factory=dict)
    ranked: tuple[str, ...] = ()
    by_turn: tuple[str, ...] = ()
    course: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def label(self, traits: Iterable[str]) -> str:
        """The one of `traits` that is named, the strongest where there is one; else "none" or "several"."""
        levels = {trait: rank(self.named[trait]) for trait in traits if trait in self.named}
        if len(levels) > 1 and min(levels.values()) > 0:
            levels = {trait: level for trait, level in levels.items() if level == max(levels.values())}
        return next(iter(levels), NONE) if len(levels) < 2 else SEVERAL


Findings: TypeAlias = Mapping[Side, Finding]


def rank(level: str) -> float:
    """1, 2, 3 for low, medium, high; 0 for ``present``, which says nothing of how much."""
    return LEVELS.index(level) + 1.0 if level in LEVELS else 0.0


def asked_of(
    kind: Literal["fidelity", "composability"], dialogues: Iterable[Dialogue], traits: Iterable[str]
) -> list[Dialogue]:
    """The dialogues that a metric is about. Raises EvaluationError without any, or when one has a trait that is not
    among those evaluated."""
    asked = judged(kind, dialogues)
    if missing := sorted({trait for dialogue in asked for trait in dialogue.traits} - {*traits}):
        raise EvaluationError(f"dialogues have {', '.join(missing)}, which is not evaluated; add it to the traits")
    return asked


def rated(
    dialogues: Sequence[Dialogue], raters: Mapping[str, Findings]
) -> Iterator[tuple[str, str, list[tuple[Dialogue, Finding]]]]:
    """By rater and method, in that order, the dialogues that were rated, each with its finding; none without any."""
    methods = sorted({player_of(side_of(dialogue)) for dialogue in dialogues})
    for rater, findings in raters.items():
        for method in methods:
            of_method = [d for d in dialogues if player_of(side_of(d)) == method and side_of(d) in findings]
            if of_method:
                yield rater, method, [(dialogue, findings[side_of(dialogue)]) for dialogue in of_method]


def named_findings(dialogues: Sequence[Dialogue], scores: Sequence[Sequence[TurnScore]]) -> Findings:
    """The namer's, for fidelity: one trait or none. A dialogue in which nothing is said is left out."""
    return {
        side: Finding(
            named={top: "present"} if (top := _top(names)) != NONE else {},
            strength={trait: strength_of(turns, trait) for trait in names if trait != NONE},
            by_turn=tuple(_top(turn.names) for turn in turns),
            course={trait: [strength_of([turn], trait) for turn in turns] for trait in names if trait != NONE},
        )
        for side, names, turns in _said(dialogues, scores)
    }


def present_findings(
    dialogues: Sequence[Dialogue], scores: Sequence[Sequence[TurnScore]], threshold: float
) -> Findings:
    """The namer's, for composability: every trait whose mean probability is above `threshold`."""
    found = {}
    for side, names, _ in _said(dialogues, scores):
        traits = {trait: p for trait, p in names.items() if trait != NONE}
        found[side] = Finding(
            named={trait: "present" for trait, p in traits.items() if p > threshold},
            strength=traits,
            ranked=tuple(sorted(traits, key=lambda trait: -traits[trait])),
        )
    return found


def judged_findings(judgments: Iterable[Judgment]) -> dict[str, Findings]:
    """Findings by rater. A trait that is not named has strength 0."""
    found: dict[str, dict[Side, Finding]] = defaultdict(dict)
    for judgment in judgments:
        strength = {trait: rank(level) or math.nan for trait, level in judgment.traits.items()}
        found[judgment.rater][judgment.method, judgment.key] = Finding(judgment.traits, defaultdict(float, strength))
    return dict(found)


def as_judgments(rater: str, findings: Findings) -> list[Judgment]:
    """Back again, as agreement between raters is computed from them."""
    return [Judgment(method, key, rater, dict(finding.named)) for (method, key), finding in findings.items()]


def _said(
    dialogues: Sequence[Dialogue], scores: Sequence[Sequence[TurnScore]]
) -> Iterable[tuple[Side, dict[str, float], Sequence[TurnScore]]]:
    for dialogue, turns in zip(dialogues, scores, strict=True):
        names = names_of(turns)
        if names and not math.isnan(names[NONE]):
            yield side_of(dialogue), names, turns


def _top(names: Mapping[str, float]) -> str:
    """The likeliest label; empty for a turn that says nothing."""
    return "" if math.isnan(names[NONE]) else max(names, key=lambda label: names[label])
