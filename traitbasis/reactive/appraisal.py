"""What an agent's turn does to the customer: events with a strength, read off the conversation by rules.

The rules read the text alone (``cues.py``), so the same conversation always gives the same events, on any machine and
without a model. How often they are right, on turns labelled by hand, stands in ``docs/reactive.md``. A judge behind a
URL can be asked instead (``JudgeAppraiser``); rules never stand in for a judge that failed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError

DEFINITIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "warmth": "the agent names the customer's feeling, apologises for something, thanks in its own words, reassures",
        "progress": "the agent does or confirms a step, or gives a new fact, option or instruction",
        "repeated question": "the agent asks again what it has asked before",
        "unnecessary question": "the agent asks for what the customer has said already without being asked",
        "ignored cue": "the customer's last turn shows distress, and the agent says nothing of it",
        "no progress": "nothing is new in the turn: no fact, no action, no question",
        "contradiction": "the agent says something else than before: a number, a date, what is possible or done",
        "refusal": "the agent declines what the customer wants",
        "rigid refrain": "the agent says the same line again, nearly word for word",
        "coldness": "the agent is dismissive, blaming or sarcastic",
    }
)
EVENTS: Final = tuple(DEFINITIONS)


@dataclass(frozen=True)
class Appraisal:
    """What one agent turn does. events: strength by name, above 0 and at most 1, only those present. reasons: by the
    same names, short, with the words that gave it away."""

    events: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, strength in self.events.items():
            if name not in DEFINITIONS:
                raise ReactionError(f"an appraisal has the event {name!r}; known: {', '.join(EVENTS)}")
            if isinstance(strength, bool) or not isinstance(strength, int | float) or not math.isfinite(strength):
                raise ReactionError(f"an appraisal's {name!r} is {strength!r}; it must be a number above 0, at most 1")
            if not 0 < strength <= 1:
                raise ReactionError(f"an appraisal's {name!r} is {strength}; it must be above 0 and at most 1")
        if unknown := sorted(set(self.reasons) - set(self.events)):
            raise ReactionError(f"an appraisal gives a reason for {unknown[0]!r}, which is none of its events")
        # In one order, and nobody else's mapping: a frozen value does not change.
        for part, value in (("events", self.events), ("reasons", self.reasons)):
            object.__setattr__(self, part, MappingProxyType({name: value[name] for name in EVENTS if name in value}))

    def __getitem__(self, event: str) -> float:
        """Strength of an event, 0 where it is not there. Raises ReactionError for an unknown name."""
        if event not in DEFINITIONS:
            raise ReactionError(f"no event is called {event!r}; known: {', '.join(EVENTS)}")
        return self.events.get(event, 0.0)

    @property
    def record(self) -> dict[str, Any]:
        """As JSON can hold it; ``from_record`` reads it."""
        return {"events": dict(self.events), "reasons": dict(self.reasons)}

    @classmethod
    def from_record(cls, record: Any) -> Appraisal:
        """Raises ReactionError, naming the field, for anything that ``record`` does not give."""
        if not isinstance(record, Mapping):
            raise ReactionError(f"an appraisal must be an object with events and reasons, not {record!r}")
        events, reasons = record.get("events"), record.get("reasons", {})
        if not isinstance(events, Mapping) or not all(isinstance(name, str) for name in events):
            raise ReactionError(f"an appraisal's events must be an object of strengths by name, not {events!r}")
        if not isinstance(reasons, Mapping) or not all(isinstance(text, str) for text in reasons.values()):
            raise ReactionError(f"an appraisal's reasons must be an object of texts by event, not {reasons!r}")
        return cls(events, reasons)


def appraise(turns: Sequence[Turn]) -> Appraisal:
    """What the last agent turn does to the customer, given all before it."""
    raise NotImplementedError


def appraise_all(turns: Sequence[Turn]) -> list[Appraisal]:
    """``appraise`` for each agent turn that answers a customer turn, in order."""
    raise NotImplementedError
