"""The taxonomy of faults, and how a fault and an episode's diagnosis are written down.

Source: tau-Emotion-Bench, appendix C.1, Table 11 (five categories, fifteen types, source, severity, emotional outcome).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from traitbasis.errors import HarnessError
from traitbasis.outcomes import Episode

Source = Literal["agent", "user"]
Severity = Literal["critical", "minor"]
By = Literal["rules", "judge", "harness"]

TYPES: Final[Mapping[str, str]] = {
    "Missed Action": "something that the task requires is not done, or not told",
    "Wrong Order": "actions are done in another order than the task requires",
    "Extra Action": "something is changed that the task does not need changed",
    "Repeated Action": "the same action is done again without need",
    "Misread Intent": "what the customer wants, or what a tool said, is misunderstood",
    "Early Stop": "the conversation ends before the task is done",
    "Wrong Arguments": "the right tool is called with wrong values",
    "Schema Error": "a call names no tool there is, lacks arguments, or gives them wrong types",
    "Hallucination": "something is stated that neither policy, instruction nor tools say",
    "Inconsistent": "a statement or action contradicts an earlier one",
    "Revealed Early": "something is told before the verification that it needs",
    "Policy Breach": "an action or message breaks the domain's policy",
    "Friction": "redundant questions, running in circles, unexplained waiting",
    "Emotional Neglect": "the customer's need for reassurance or empathy is passed over",
    "Wrong Transfer": "the customer is handed to a human without cause",
}
CATEGORIES: Final[Mapping[str, tuple[str, ...]]] = {
    "Missing or Extra Action": ("Missed Action", "Wrong Order", "Extra Action", "Repeated Action"),
    "Incomplete": ("Misread Intent", "Early Stop"),
    "Wrong Tool Call": ("Wrong Arguments", "Schema Error"),
    "Integrity": ("Hallucination", "Inconsistent", "Revealed Early"),
    "Policy & Interaction": ("Policy Breach", "Friction", "Emotional Neglect", "Wrong Transfer"),
}
JUDGED: Final = ("Misread Intent", "Hallucination", "Revealed Early", "Policy Breach", "Emotional Neglect")
RULED: Final = tuple(type_ for type_ in TYPES if type_ not in JUDGED)
REASONS: Final = ("dismissive tone", "ignored emotional cues", "procedural friction", "emotional neglect")


def category_of(type_: str) -> str:
    """Raises HarnessError for a type that is none of the fifteen."""
    for category, types in CATEGORIES.items():
        if type_ in types:
            return category
    raise HarnessError(f"no fault is called {type_!r}; known: {', '.join(TYPES)}")


@dataclass(frozen=True)
class Fault:
    """turn: index among the episode's messages. reason: short. by: who found it."""

    type: str
    source: Source
    severity: Severity
    turn: int
    reason: str
    by: By = "rules"

    def __post_init__(self) -> None:
        category_of(self.type)

    @property
    def record(self) -> dict[str, Any]:
        return {"category": category_of(self.type), **asdict(self)}


@dataclass(frozen=True)
class Ending:
    """The emotional outcome: did the customer abandon the conversation, and the dominant reason, one of ``REASONS`` or
    None where nothing tells."""

    abandoned: bool
    reason: str | None = None
    by: By = "rules"

    @property
    def label(self) -> str:
        return "not abandoned" if not self.abandoned else self.reason or "unclear"


@dataclass(frozen=True)
class Diagnosis:
    """What is wrong with one failed episode. looked: types that were looked for in it. referenced: its reference
    actions are known. unread: a judge was asked and its answer could not be read."""

    episode: Episode
    faults: tuple[Fault, ...] = ()
    looked: frozenset[str] = frozenset()
    ending: Ending = field(default_factory=lambda: Ending(False))
    referenced: bool = True
    unread: bool = False

    @property
    def critical(self) -> frozenset[str]:
        """Types of which the agent made a critical fault."""
        return frozenset(f.type for f in self.faults if f.source == "agent" and f.severity == "critical")

    @property
    def record(self) -> dict[str, Any]:
        return {
            **self.episode.cell._asdict(),
            "faults": [fault.record for fault in self.faults],
            "looked_for": [type_ for type_ in TYPES if type_ in self.looked],
            "ending": asdict(self.ending),
            "referenced": self.referenced,
            "judge_unreadable": self.unread,
        }
