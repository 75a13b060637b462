"""A customer who reacts: what its conversation has done to it, and what that does to its next turn.

A served user, or a request, says what the customer is (``Reactive``): in an emotion condition, tracked through a
scenario, a support seeker. From the conversation follow its state (``CustomerState``, a fold over the agent's turns)
and what the state does to the next turn (``Reaction``): what the model is told, how strongly the traits are steered, or
a message that is said as it stands. Nothing here generates text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError
from traitbasis.reactive.affect import Ending, Scene, State, decides_to_stop, dose_scale, update
from traitbasis.reactive.appraisal import Appraisal, appraise
from traitbasis.reactive.conditions import Condition
from traitbasis.reactive.dissatisfaction import UNSATISFIED, Dissatisfaction, Patience, feel
from traitbasis.reactive.grounding import Grounding, ground
from traitbasis.reactive.scenarios import Scenario, find_scenario, read_scenarios
from traitbasis.reactive.support import SupportScenario, UserType, scenario, user_prompt

Carry = Literal["text", "traits", "both"]
MAX_TOOL_TEXT = 20_000  # characters of tool results that a state keeps, the latest


class Reactive(BaseModel):
    """What a customer feels with, and how it reacts. Every part may be left out.

    condition: an emotion condition, such as ``frustration.cold.high.skeptical``. carry: whether the model is told it as
    text, has it steered as traits of the basis, or both. unsatisfied: the customer may end the conversation with
    ``###UNSATISFIED###``. scenario: an EIBench scenario, by id or as an object; emotion and relation are tracked.
    coupling: how much a rising negative emotion raises the intensity of the customer's traits (``affect.dose_scale``);
    0 is off. support, user_type: a support seeker's scenario and kind.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    condition: str | None = None
    carry: Carry = "text"
    unsatisfied: bool = False
    scenario: Scenario | None = None
    coupling: Annotated[float, Field(ge=0, le=5, allow_inf_nan=False)] = 0.0
    support: SupportScenario | None = None
    user_type: UserType = "emotion-oriented"

    @field_validator("condition")
    @classmethod
    def _condition_is_known(cls, condition: str | None) -> str | None:
        return None if condition is None else _told(lambda: Condition.parse(condition).name)

    @field_validator("scenario", mode="before")
    @classmethod
    def _scenario_is_known(cls, asked: Any) -> Any:
        return _told(lambda: find_scenario(read_scenarios(), asked)) if isinstance(asked, str) else asked

    @field_validator("support", mode="before")
    @classmethod
    def _support_is_known(cls, asked: Any) -> Any:
        return _told(lambda: scenario(asked)) if isinstance(asked, str) else asked

    @model_validator(mode="after")
    def _parts_fit(self) -> Reactive:
        if self.scenario is not None and self.support is not None:
            raise ValueError("a customer is in a scenario or seeks support, not both; leave one out")
        if self.coupling and self.scenario is None:
            raise ValueError("coupling needs a scenario, whose anchors say what much and little emotion is")
        if self.carry != "text" and self.condition is None:
            raise ValueError(f"carry is {self.carry!r}, and there is no condition to carry")
        return self

    @classmethod
    def read(cls, written: Any) -> Reactive:
        """From JSON or YAML. Raises ReactionError that names the field."""
        if isinstance(written, cls):
            return written
        try:
            return cls.model_validate(written)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"][:2]) or "reactive"
            known = f"; known: {', '.join(cls.model_fields)}" if first["type"] == "extra_forbidden" else ""
            raise ReactionError(f"{where}: {first['msg'].removeprefix('Value error, ')}{known}") from error

    @property
    def feels(self) -> Condition | None:
        return None if self.condition is None else Condition.parse(self.condition)

    @property
    def record(self) -> dict[str, Any]:
        """What differs from a customer who does not react; scenarios by their ids."""
        found = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: getattr(value, "id", value) for name, value in found.items()}


@dataclass(frozen=True)
class CustomerState:
    """What a conversation has done to its customer.

    turns: agent turns that it has heard: after its own first, or all where the agent is to open. digest: of the
    conversation up to there, so that a state is never applied to another one. states: (a, t) at the start and after
    each agent turn, in a scenario. told: results of the agent's tools that a client handed over. appraisal, reason,
    grounding: of the last agent turn. ending: why the customer ends the dialogue, once it does.
    """

    turns: int = 0
    digest: str = ""
    dissatisfaction: Dissatisfaction | None = None
    states: tuple[State, ...] = ()
    told: tuple[str, ...] = ()
    appraisal: Appraisal = field(default_factory=Appraisal)
    reason: str = ""
    grounding: Grounding | None = None
    ending: Ending | None = None

    @property
    def record(self) -> dict[str, Any]:
        """As JSON; ``from_record`` reads it."""
        return {
            "turns": self.turns,
            "digest": self.digest,
            "dissatisfaction": self.dissatisfaction and self.dissatisfaction.record,
            "states": [[state.a, state.t] for state in self.states],
            "told": list(self.told),
            "appraisal": self.appraisal.record,
            "reason": self.reason,
            "grounding": self.grounding and self.grounding.record,
            "ending": self.ending,
        }

    @classmethod
    def from_record(cls, record: Any) -> CustomerState:
        """Raises ReactionError for what ``record`` does not give."""
        try:
            known = {name: record[name] for name in cls.__dataclass_fields__}
            return cls(
                **known
                | {
                    "dissatisfaction": known["dissatisfaction"]
                    and Dissatisfaction.from_record(known["dissatisfaction"]),
                    "states": tuple(State(a, t) for a, t in known["states"]),
                    "told": tuple(map(str, known["told"])),
                    "appraisal": Appraisal.from_record(known["appraisal"]),
                    "grounding": known["grounding"] and Grounding.from_record(known["grounding"]),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ReactionError(f"this is no customer's state: {type(error).__name__} {error}") from error


@dataclass(frozen=True)
class Reaction:
    """What a customer's state does to its next turn.

    instruction: told to the model with the harness's own. whole: it is a full instruction, where the harness has none.
    says: the message as it stands, nothing is generated. traits: the condition's intensities, added to those asked for.
    scale: of all intensities. how: the customer it is of.
    """

    how: Reactive
    state: CustomerState
    instruction: str = ""
    whole: bool = False
    says: str | None = None
    traits: Mapping[str, float] = field(default_factory=dict)
    scale: float = 1.0

    @property
    def record(self) -> dict[str, Any]:
        """For the reply: what the customer felt and why, without what only the next fold needs."""
        state = {name: value for name, value in self.state.record.items() if name not in ("digest", "told")}
        return {**self.how.record, **state, "scale": round(self.scale, 4), "said_as_it_stands": self.says is not None}


def react(
    turns: Sequence[Turn], how: Reactive, state: CustomerState | None = None, *, tool_results: Sequence[str] = ()
) -> Reaction:
    """What the customer's next turn is made with.

    turns: the whole conversation, the agent's last turn at its end. state: of an earlier turn of the same conversation,
    which saves folding it again and holds earlier tool results; another conversation's is not used. tool_results: what
    the agent's tools have said since, which the customer does not see, but which a reply can be grounded in.
    """
    state = follow(turns, how, state, tool_results)
    spoken = any(turn.speaker == "customer" for turn in turns)
    parts, says, scale = list[str](), None, 1.0
    condition = how.feels
    if how.scenario:
        parts.append(how.scenario.simulated_user_profile.text)
        parts.append(mood(state.states[-1], how.scenario.scene))
        if state.ending:
            parts.append("Your next message is your last one here: end the conversation with it.")
        scale = dose_scale(state.states[-1], how.scenario.anchors, how.coupling)
        if not spoken:
            says = how.scenario.opening_line
    if how.support:
        parts.append(user_prompt(how.support, how.user_type, turns, state.grounding))
    if condition and how.carry != "traits":
        # One wording for an episode: its instruction stays while its turns grow.
        system = [turn.text for turn in turns if turn.speaker == "system"]
        parts.append(condition.instruction(int(_digest([system, condition.name])[:12], 16)))
    if how.unsatisfied and state.dissatisfaction and state.dissatisfaction.ended:
        says = UNSATISFIED
    return Reaction(
        how,
        state,
        "\n\n".join(parts),
        whole=bool(how.scenario or how.support),
        says=says,
        traits=condition.traits() if condition and how.carry != "text" else {},
        scale=scale,
    )


def follow(
    turns: Sequence[Turn], how: Reactive, state: CustomerState | None = None, tool_results: Sequence[str] = ()
) -> CustomerState:
    """The fold: the state after the last agent turn. Arguments as for ``react``."""
    heard = _heard(turns, opener=bool(how.scenario and how.scenario.scene == "Charm"))
    begun = state if state and state.turns <= len(heard) and state.digest == _of(turns, heard[: state.turns]) else None
    told = _latest([*(state.told if state else ()), *tool_results])
    if begun is None:
        begun = CustomerState(
            dissatisfaction=Dissatisfaction() if how.unsatisfied else None,
            states=(how.scenario.anchors.start,) if how.scenario else (),
        )
    patience = Patience.of(how.feels) if how.feels else Patience()
    dissatisfaction, states = begun.dissatisfaction, list(begun.states)
    appraisal, reason, ending = begun.appraisal, begun.reason, begun.ending
    for number, end in list(enumerate(heard, 1))[begun.turns :]:
        appraisal = appraise(turns[: end + 1])
        if dissatisfaction:
            dissatisfaction = feel(dissatisfaction, appraisal, patience)
        if how.scenario:
            after, reason = update(states[-1], appraisal, how.scenario.scene, how.scenario.sensitivity)
            states.append(after)
            ending = ending or decides_to_stop(after, how.scenario.anchors, number)
    grounding = None
    if how.support and any(turn.speaker == "agent" for turn in turns):
        grounding = ground(turns, given=[*how.support.latent, *told])
    return CustomerState(
        len(heard), _of(turns, heard), dissatisfaction, tuple(states), told, appraisal, reason, grounding, ending
    )


_FEELING: Mapping[Scene, str] = {
    "Support": "low and worn out", "Defense": "angry", "Repair": "hurt and angry", "Charm": "on your guard",
}  # fmt: skip
_BY_EMOTION = (
    "You are not {} any more",
    "You are a little {}",
    "You are {}",
    "You are very {}",
    "You are {} beyond bearing",
)
_BY_RELATION = (
    "you want nothing to do with the other person",
    "you keep the other person at a distance",
    "you are undecided about the other person",
    "you have begun to trust the other person",
    "you trust the other person and like talking to them",
)  # fmt: skip


def mood(state: State, scene: Scene) -> str:
    """A state in words, in five bands an axis, for the customer's model alone."""
    emotion, relation = (min(int(value // 20), 4) for value in (state.a, state.t))
    return f"Right now: {_BY_EMOTION[emotion].format(_FEELING[scene])}, and {_BY_RELATION[relation]}. Let it show."


def _heard(turns: Sequence[Turn], opener: bool) -> list[int]:
    """Places of the agent turns that answer the customer, of several in a row the last. opener: where the agent is to
    open the conversation, its first turn counts as well."""
    found, spoken = list[int](), opener
    for place, turn in enumerate(turns):
        if turn.speaker == "agent" and spoken:
            if found and all(between.speaker == "agent" for between in turns[found[-1] : place]):
                found.pop()
            found.append(place)
        spoken = spoken or turn.speaker == "customer"
    return found


def _of(turns: Sequence[Turn], heard: Sequence[int]) -> str:
    until = heard[-1] + 1 if heard else 0
    return _digest([[turn.speaker, turn.text] for turn in turns[:until]])


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


def _latest(texts: Sequence[str]) -> tuple[str, ...]:
    """The last of them that fit."""
    kept, room = list[str](), MAX_TOOL_TEXT
    for text in reversed(texts):
        if (room := room - len(text)) < 0:
            break
        kept.append(text)
    return tuple(reversed(kept))


def _told(find: Any) -> Any:
    """For pydantic, which takes no error but its own."""
    try:
        return find()
    except ReactionError as error:
        raise ValueError(str(error)) from error
