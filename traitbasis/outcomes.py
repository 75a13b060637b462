"""What runs of a harness wrote down: a header that says what made them, and an episode a line.

``harness.runs`` writes these files and ``drops`` counts in them; this is the format, how it is read, and what may be
compared with what. A drop is only the trait's doing when nothing else differs, so runs with another user, harness or
cap of steps are refused (``compare``): published drops mix the user's model, its prompt and its trait.

A *cell* is one (domain, task, condition, trial). The condition ``unsteered`` has no traits and is every drop's baseline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from traitbasis.errors import HarnessError

FORMAT = "traitbasis.run/1"
UNSTEERED = "unsteered"
ORACLE = "oracle"

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[FiniteFloat, Field(ge=0)]


class _Record(BaseModel):
    """Fields nobody here knows are kept: a later version's files can be read, and a report shows where they come from."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Call(_Record):
    """A tool call, or what stands in its place when the agent's arguments were no JSON object."""

    name: str
    arguments: Any = None


class Message(_Record):
    """One message of an episode. calls: tools the agent called with it."""

    speaker: Literal["system", "agent", "customer", "tool"]
    text: str = ""
    calls: tuple[Call, ...] = ()


class Tokens(_Record):
    prompt: Count = 0
    completion: Count = 0


class Header(_Record):
    """What made a run (contract 11).

    agent: ``kind`` (``llm``, ``oracle``), ``model``, ``url``, ``strategy``, ``temperature``, …; all of it but the url
    says which agent it is. user: what its endpoint says of itself. conditions: traits by name. tasks: ids by domain that
    were planned; without it every task that any condition has is taken for planned. trials: planned of each.
    """

    format: Literal["traitbasis.run/1"] = FORMAT
    harness: str
    harness_version: str
    domains: tuple[str, ...]
    agent: dict[str, Any]
    user: dict[str, Any]
    conditions: dict[str, dict[str, str | float]]
    trials: Annotated[int, Field(ge=1)]
    tasks: dict[str, tuple[str, ...]] | None = None
    seed: int | None = None
    max_steps: int | None = None
    versions: dict[str, Any] = {}
    command: str = ""


class Episode(_Record):
    """One trial of one task under one condition, as it ended.

    success: the task was solved. reward: the harness's own. infrastructure: it says nothing about the agent (an endpoint
    was down, the harness crashed), so no figure of success has it. turns: the customer's. cost: money by side, None
    where unknown. tokens: by side. made_by: the ``traitbasis`` field of the user's first reply. error_type: what kind
    of mistake the agent made, where something has judged it.
    """

    kind: Literal["episode"] = "episode"
    domain: str
    task: str
    condition: str
    traits: dict[str, str | float] = {}
    trial: Count
    reward: FiniteFloat
    success: bool
    error: str | None = None
    infrastructure: bool = False
    ended: str = ""
    steps: Count = 0
    turns: Count = 0
    messages: tuple[Message, ...] = ()
    cost: dict[Literal["agent", "user"], Amount | None] = {}
    tokens: dict[Literal["agent", "user"], Tokens | None] = {}
    seconds: Amount | None = None
    made_by: dict[str, Any] | None = None
    reward_info: Any = None
    error_type: str | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.task, self.condition, self.trial)


class Cell(NamedTuple):
    """What an episode is one of."""

    domain: str
    task: str
    condition: str
    trial: int

    def __str__(self) -> str:
        return f"{self.domain} task {self.task} under {self.condition}, trial {self.trial}"


@dataclass(frozen=True)
class Run:
    """A results file. notes: what a reader should know of it, such as a line that a kill cut off."""

    header: Header
    episodes: tuple[Episode, ...]
    path: Path = Path()
    notes: tuple[str, ...] = ()
