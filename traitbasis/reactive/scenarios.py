"""Scenarios for users whose state is tracked: who meets whom, about what, and where success and failure lie.

A file is YAML with one list, ``scenarios``; ``data/scenarios.yaml`` ships. An entry has EIBench's components (3.2.1):
the ``simulated_user_profile`` is told to the customer, the ``model_profile`` to the agent under test, the customer says
the ``opening_line`` but in Charm, where the agent opens, and the anchors are what ``affect.outcome`` scores by.

What the paper says of anchors is checked: their order, multiples of five, gaps, and that each lies where Table 3 finds
those of its scene. It prints means and deviations but neither its gaps nor its ranges, so ``GAPS`` and ``DEVIATIONS``
are ours.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError
from traitbasis.pairs import PairLoader, Strict, Text, words
from traitbasis.reactive.affect import SCENES, Anchors, Scene

# Table 3: mean and standard deviation of a and t on the training split.
TABLE_3: dict[Scene, dict[str, tuple[tuple[float, float], tuple[float, float]]]] = {
    "Charm": {"start": ((34, 13), (17, 8)), "succeed": ((6, 4), (57, 6)), "fail": ((75, 10), (1, 3))},
    "Defense": {"start": ((75, 14), (16, 11)), "succeed": ((30, 7), (46, 7)), "fail": ((97, 6), (0, 2))},
    "Repair": {"start": ((77, 10), (10, 5)), "succeed": ((28, 6), (50, 10)), "fail": ((97, 6), (0, 1))},
    "Support": {"start": ((75, 9), (46, 14)), "succeed": ((33, 8), (82, 7)), "fail": ((97, 6), (9, 7))},
}
STEP = 5
DEVIATIONS = 2.0  # an anchor lies at most so many deviations from its scene's mean, rounded outwards to STEP
GAPS = {"succeed": 10.0, "fail": 5.0}  # from the start, on either axis: less is a success within one kind word
ALIKE = 0.5  # two scenarios with a larger share of common words are one told twice

_ID = r"^[a-z0-9]+(?:-[a-z0-9]+)*$"
_PLAYABLE = 80  # words: less is a caption and not somebody to play


class UserProfile(Strict):
    """What the simulated user is told of itself."""

    role: Text
    background: Text
    speaking_style: Text
    rules: Annotated[tuple[Text, ...], Field(min_length=1)]
    goal: Text

    @property
    def text(self) -> str:
        rules = "\n".join(f"- {rule}" for rule in self.rules)
        return (
            f"You are {self.role}.\n\n{self.background}\n\nHow you talk: {self.speaking_style}\n\n"
            f"How you react:\n{rules}\n\nWhat you want: {self.goal}"
        )


class ModelProfile(Strict):
    """What the agent under test is told."""

    role: Text
    known_facts: Annotated[tuple[Text, ...], Field(min_length=1)]
    goal: Text

    @property
    def text(self) -> str:
        facts = "\n".join(f"- {fact}" for fact in self.known_facts)
        return f"Your role: {self.role}.\n\nWhat you know:\n{facts}\n\nYour goal: {self.goal}"


class Scenario(Strict):
    """One situation. sensitivity: scales what the agent's turns do to this customer (``affect.update``)."""

    model_config = ConfigDict(arbitrary_types_allowed=True)  # Anchors

    id: Annotated[str, Field(pattern=_ID)]
    scene: Scene
    setting: Text
    relationship: Text
    simulated_user_profile: UserProfile
    model_profile: ModelProfile
    opening_line: Text | None = None
    anchors: Anchors
    sensitivity: Annotated[float, Field(gt=0, le=5)] = 1.0

    @field_validator("anchors", mode="before")
    @classmethod
    def _anchors_are_read(cls, anchors: Any) -> Anchors:
        try:
            return anchors if isinstance(anchors, Anchors) else Anchors.from_record(anchors)
        except ReactionError as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _who_opens(self) -> Scenario:
        if self.scene == "Charm" and self.opening_line is not None:
            raise ValueError("in Charm the agent opens; leave opening_line out")
        if self.scene != "Charm" and self.opening_line is None:
            raise ValueError(f"in {self.scene} the user opens; write an opening_line")
        return self

    @property
    def opening(self) -> tuple[Turn, ...]:
        """What the customer's side of a conversation begins with: its profile, then its first line if it opens."""
        system = Turn("system", self.simulated_user_profile.text)
        return (system, Turn("customer", self.opening_line)) if self.opening_line else (system,)

    @property
    def prompt(self) -> list[dict[str, str]]:
        """What the agent under test gets first, as chat messages; it is the assistant."""
        ask = f"{self.model_profile.text}\n\nAnswer as this person would speak: one turn, no stage directions."
        if self.opening_line is None:
            return [{"role": "system", "content": f"{ask} You open the conversation."}]
        return [{"role": "system", "content": ask}, {"role": "user", "content": self.opening_line}]


class _File(Strict):
    scenarios: Annotated[tuple[Scenario, ...], Field(min_length=1)]


def shipped_scenarios() -> Path:
    """The file that comes with the package."""
    return Path(str(resources.files("traitbasis.reactive") / "data" / "scenarios.yaml"))


def read_scenarios(path: str | Path | None = None) -> list[Scenario]:
    """Scenarios of a file, by default those that ship.

    Raises ReactionError naming the file, the scenario and the field; two with one id are refused. What is merely
    doubtful ``check_scenarios`` reports.
    """
    file = Path(path or shipped_scenarios())
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), PairLoader)
    except OSError as error:
        raise ReactionError(f"cannot read scenarios from {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ReactionError(f"{file} is no valid YAML: {error}") from error
    try:
        found = list(_File.model_validate(document).scenarios)
    except ValidationError as error:
        raise ReactionError("\n".join(_explain(file, document, detail) for detail in error.errors())) from error
    if twice := [name for name, number in Counter(scenario.id for scenario in found).items() if number > 1]:
        raise ReactionError(f"{file}: two scenarios have the id {twice[0]!r}; give each its own")
    return found


def find_scenario(scenarios: Iterable[Scenario], name: str) -> Scenario:
    """The scenario with this id. Raises ReactionError naming those there are."""
    by_id = {scenario.id: scenario for scenario in scenarios}
    if name not in by_id:
        raise ReactionError(f"no scenario {name!r}; known: {', '.join(by_id)}")
    return by_id[name]


def anchor_problems(anchors: Anchors, scene: Scene) -> list[str]:
    """What is wrong with anchors whose order is right: no multiple of five, too near the start, far from Table 3's."""
    found = []
    for name in ("start", "succeed", "fail"):
        for axis in ("a", "t"):
            value, start = getattr(getattr(anchors, name), axis), getattr(anchors.start, axis)
            low, high = allowed_range(scene, name, axis)
            if value % STEP:
                found.append(f"{name} {axis} is {value:g}; anchors are multiples of {STEP}")
            if not low <= value <= high:
                found.append(f"{name} {axis} is {value:g}; in {scene} it lies from {low:g} to {high:g}")
            if name != "start" and abs(value - start) < GAPS[name]:
                found.append(f"{name} {axis} is {value:g}, less than {GAPS[name]:g} from the start's {start:g}")
    return found


def allowed_range(scene: Scene, anchor: str, axis: str) -> tuple[float, float]:
    """Where an anchor may lie: Table 3's mean ± ``DEVIATIONS``, outwards to multiples of five, within [0, 100]."""
    mean, deviation = TABLE_3[scene][anchor]["at".index(axis)]
    low = math.floor((mean - DEVIATIONS * deviation) / STEP) * STEP
    high = math.ceil((mean + DEVIATIONS * deviation) / STEP) * STEP
    return max(0.0, float(low)), min(100.0, float(high))


def check_scenarios(scenarios: Sequence[Scenario]) -> list[str]:
    """Problems, each with its scenario's id in front; empty when all is well.

    Anchors (``anchor_problems``), profiles too short to play, and scenarios that are told twice.
    """
    found = []
    for scenario in scenarios:
        found += [f"{scenario.id}: anchors: {problem}" for problem in anchor_problems(scenario.anchors, scenario.scene)]
        told = len(words(scenario.simulated_user_profile.text))
        if told < _PLAYABLE:
            found.append(f"{scenario.id}: simulated_user_profile has {told} words; {_PLAYABLE} are needed to play it")
    told_by = [(scenario.id, _content_words(scenario)) for scenario in scenarios]
    for (one, ours), (other, theirs) in combinations(told_by, 2):
        share = len(ours & theirs) / len(ours | theirs) if ours | theirs else 1.0
        if share > ALIKE:
            found.append(f"{other}: it has {share:.0%} of its words in common with {one}; keep one of them")
    return found


def count_by_scene(scenarios: Iterable[Scenario]) -> dict[Scene, int]:
    """How many there are of each scene, 0 included."""
    counts = Counter(scenario.scene for scenario in scenarios)
    return {scene: counts[scene] for scene in SCENES}


def _content_words(scenario: Scenario) -> set[str]:
    text = f"{scenario.simulated_user_profile.text} {scenario.model_profile.text} {scenario.opening_line or ''}"
    return {word for word in words(text) if len(word) > 3}


def _explain(file: Path, document: Any, detail: Any) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    field, *location = detail["loc"] or ("",)
    if field != "scenarios" or not location or not isinstance(document["scenarios"], list):
        return f"{file} must hold one list, `scenarios:`, with at least one entry: {message}"
    entry = document["scenarios"][location[0]]
    name = entry.get("id") if isinstance(entry, dict) else None
    where = f"scenario {name!r}" if isinstance(name, str) and re.match(_ID, name) else f"number {location[0] + 1}"
    inner = ".".join(map(str, location[1:]))
    return f"{file}: {where}{f', field {inner!r}' if inner else ''}: {message}"
