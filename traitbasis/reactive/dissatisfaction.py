"""A customer's patience and its end: ``###UNSATISFIED###`` (τ-Emotion-Bench, arXiv 2610.19560, 3.1).

The paper leaves it to the model that plays the user when the interaction has become "sufficiently unsatisfactory". Here
it is counted: every event of an appraisal adds its weight times its strength to a level, warmth and progress take some
away, and the customer gives up once the level reaches the threshold. All of it is a fold over the conversation, so the
same conversation ends at the same turn wherever it is read.

Threshold and weights follow the condition (``Patience.of``). They are this project's own: the paper has no numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from traitbasis.chat import Turn, check_choice
from traitbasis.errors import ReactionError
from traitbasis.reactive.appraisal import DEFINITIONS, EVENTS, Appraisal, appraise_all

UNSATISFIED: Final = "###UNSATISFIED###"
STOP: Final = "###STOP###"
Rule = Literal["paper", "code"]

# How much an event of strength 1 moves the level of a customer with no emotion in particular; a threshold is 3.
WEIGHTS: Final[Mapping[str, float]] = {
    "warmth": -0.6,
    "progress": -1.0,
    "repeated question": 1.2,
    "unnecessary question": 0.8,
    "ignored cue": 0.8,
    "no progress": 0.6,
    "contradiction": 1.2,
    "refusal": 0.5,
    "rigid refrain": 1.0,
    "coldness": 1.4,
}
THRESHOLD: Final = 3.0
FIRST_END: Final = 2  # the first agent turn at which a customer can give up

_URGENCY = {"low": 1.2, "moderate": 1.0, "high": 0.7}  # how long the customer bears it
_TRUST = {"trusting": 1.2, "cautious": 1.0, "skeptical": 0.8}
_POLITENESS = {"warm": 1.15, "neutral": 1.0, "cold": 0.85}
_FAMILY = {"anger": 0.8, "fear": 1.0, "disgust": 0.9, "sadness": 1.1, "enjoyment": 1.3}
# What each family minds more, or less, than others do.
_MINDS: Mapping[str, Mapping[str, float]] = {
    "anger": {"repeated question": 1.25, "unnecessary question": 1.25, "rigid refrain": 1.25},
    "fear": {"no progress": 1.25, "contradiction": 1.25, "ignored cue": 1.25},
    "disgust": {"coldness": 1.25, "refusal": 1.25},
    "sadness": {"coldness": 1.25, "ignored cue": 1.5, "refusal": 0.8},
    "enjoyment": {"ignored cue": 0.5, "no progress": 0.8},
}
_SKEPTICS_MIND = {"contradiction": 1.5}
_HURRIED_MIND = {"no progress": 1.5, "unnecessary question": 1.25}


class HasLabels(Protocol):
    """What of a condition patience depends on (``conditions.Condition``)."""

    @property
    def family(self) -> str: ...
    @property
    def politeness(self) -> str: ...
    @property
    def urgency(self) -> str: ...
    @property
    def trust(self) -> str: ...


@dataclass(frozen=True)
class Patience:
    """How much a customer bears. threshold: the level, above 0, at which it gives up. weights: by event, for a strength
    of 1; an event that is not named weighs nothing, a negative weight soothes.

    Raises ReactionError, naming the field, for an unknown event and for what is no finite number.
    """

    threshold: float = THRESHOLD
    weights: Mapping[str, float] = field(default_factory=lambda: dict(WEIGHTS))

    def __post_init__(self) -> None:
        if not _is_number(self.threshold) or self.threshold <= 0:
            raise ReactionError(f"patience's threshold is {self.threshold!r}; it must be a number above 0")
        for event, weight in self.weights.items():
            if event not in DEFINITIONS:
                raise ReactionError(f"patience weighs {event!r}, which is no event; known: {', '.join(EVENTS)}")
            if not _is_number(weight):
                raise ReactionError(f"patience's weight of {event!r} is {weight!r}; it must be a finite number")

    @classmethod
    def of(cls, condition: HasLabels) -> Patience:
        """The patience of a condition. Raises ReactionError for a label that is none.

        The threshold is ``THRESHOLD`` times a factor of each label: who is in a hurry, suspicious, curt or angry bears
        less. The weights are ``WEIGHTS`` times what the family, the skeptical and the hurried mind more than others.
        """
        family = condition.family.casefold()
        threshold = (
            THRESHOLD
            * _factor("family", family, _FAMILY)
            * _factor("politeness", condition.politeness, _POLITENESS)
            * _factor("urgency", condition.urgency, _URGENCY)
            * _factor("trust", condition.trust, _TRUST)
        )
        minds = [_MINDS[family]]
        minds += [_SKEPTICS_MIND] if condition.trust == "skeptical" else []
        minds += [_HURRIED_MIND] if condition.urgency == "high" else []
        weights = {
            event: round(weight * math.prod(mind.get(event, 1.0) for mind in minds), 6)
            for event, weight in WEIGHTS.items()
        }
        return cls(round(threshold, 6), weights)


@dataclass(frozen=True)
class Dissatisfaction:
    """What has come together. level: at least 0. by_event: what each event has added, or taken away. turns: agent turns
    that were felt. ended: the number of the agent turn (1 is the first) at which the customer gave up, or None."""

    level: float = 0.0
    by_event: Mapping[str, float] = field(default_factory=dict)
    turns: int = 0
    ended: int | None = None

    def __post_init__(self) -> None:
        if not _is_number(self.level) or self.level < 0:
            raise ReactionError(f"dissatisfaction's level is {self.level!r}; it must be a number of at least 0")
        for event, amount in self.by_event.items():
            if event not in DEFINITIONS or not _is_number(amount):
                raise ReactionError(
                    f"dissatisfaction's by_event has {event!r}: {amount!r}; it must be a number by event"
                )
        if not _is_count(self.turns):
            raise ReactionError(f"dissatisfaction's turns is {self.turns!r}; it must be a whole number of at least 0")
        if self.ended is not None and not (_is_count(self.ended) and FIRST_END <= self.ended <= self.turns):
            raise ReactionError(
                f"dissatisfaction's ended is {self.ended!r}; it must be null or from {FIRST_END} to {self.turns}"
            )

    @property
    def record(self) -> dict[str, Any]:
        """As JSON can hold it; ``from_record`` reads it."""
        return {"level": self.level, "by_event": dict(self.by_event), "turns": self.turns, "ended": self.ended}

    @classmethod
    def from_record(cls, record: Any) -> Dissatisfaction:
        """Raises ReactionError, naming the field, for anything that ``record`` does not give."""
        if not isinstance(record, Mapping):
            raise ReactionError(f"dissatisfaction must be an object with level, by_event, turns, ended; not {record!r}")
        if missing := [name for name in ("level", "by_event", "turns") if name not in record]:
            raise ReactionError(f"dissatisfaction has no {missing[0]}; it was written by something else, or cut")
        by_event = record["by_event"]
        if not isinstance(by_event, Mapping):
            raise ReactionError(f"dissatisfaction's by_event is {by_event!r}; it must be an object of numbers by event")
        return cls(record["level"], dict(by_event), record["turns"], record.get("ended"))


def feel(state: Dissatisfaction, appraisal: Appraisal, patience: Patience) -> Dissatisfaction:
    """The state after one more agent turn.

    The level never falls below 0: kindness is not saved up. Nobody gives up at the first agent turn that they are
    answered with, however bad, nor at a turn that brings progress. Once ended it stays ended.
    """
    by_event = dict(state.by_event)
    change = 0.0
    for event, strength in appraisal.events.items():
        amount = patience.weights.get(event, 0.0) * strength
        change += amount
        by_event[event] = round(by_event.get(event, 0.0) + amount, 6)
    level, turns = max(0.0, round(state.level + change, 6)), state.turns + 1
    ended = state.ended
    if ended is None and turns >= FIRST_END and level >= patience.threshold and not appraisal["progress"]:
        ended = turns
    return Dissatisfaction(level, by_event, turns, ended)


def fold(turns: Sequence[Turn], patience: Patience) -> Dissatisfaction:
    """The state after a whole conversation, appraised by the rules."""
    state = Dissatisfaction()
    for appraisal in appraise_all(turns):
        state = feel(state, appraisal, patience)
    return state


def implied_turns(patience: Patience, event: str, strength: float = 1.0) -> int | None:
    """How many agent turns with one and the same fault and nothing else end the episode; None when it never ends.

    At least 2. Raises ReactionError for an unknown event or a strength that is none.
    """
    Appraisal({event: strength})  # is it an event's?
    step = round(patience.weights.get(event, 0.0) * strength, 6)
    if step <= 0 or event == "progress":
        return None
    return max(FIRST_END, math.ceil(patience.threshold / step - 1e-9))


def reward(success: bool, ended: bool, succeeded_before: bool = False, rule: Rule = "paper") -> Literal[-1, 0, 1]:
    """An episode's reward: 1 when the task was solved, 0 when not, −1 when the customer gave up.

    ended: the customer sent ``UNSATISFIED``. succeeded_before: the task was solved by then. rule: ``paper``: −1 only
    when it comes before success, after it the task counts; ``code``, as published: −1 always, whatever became of it.
    Raises RequestError for another rule.
    """
    check_choice("rule", rule, Rule)
    if ended and (rule == "code" or not succeeded_before):
        return -1
    return 1 if success else 0


def ended_by(text: str) -> str | None:
    """The token by which a customer's message ends the episode, or None; of both, UNSATISFIED wins."""
    return next((token for token in (UNSATISFIED, STOP) if token in text), None)


def _factor(name: str, label: str, factors: Mapping[str, float]) -> float:
    if label not in factors:
        raise ReactionError(f"a condition's {name} is {label!r}; known: {', '.join(factors)}")
    return factors[label]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
