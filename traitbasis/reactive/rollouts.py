"""Rollouts of an agent under test against state-tracked users: on disk, scored, and as training data.

A file holds one JSON object a line after a header that says what made them; lines are only appended, so a run that was
killed goes on where it was. ``training_lines`` gives them to a GRPO trainer, one prompt's rollouts being one group:

- ``per="rollout"``: prompt and completion as chat messages (the completion's ``user`` messages are the environment's
  and carry no loss), ``r_out``, and for each agent turn ``r_proc`` and ``advantages`` (EIBench, eq. 7).
- ``per="turn"``: the paper's training samples (B.1), one for each agent turn: the prompt is all that was said before,
  the completion the one reply, ``advantage`` its A.

``prompt`` and ``completion`` are TRL's conversational prompt-completion form. A number by which every token of a
completion is weighed is what TRL's ``GRPOTrainer`` calls ``inputs["advantages"]`` and verl's actor update
``batch["advantages"]`` (there broadcast over the response mask); ``uid`` is verl's name for the group. Neither reads
rewards off a file as they are: both draw their own rollouts, and computing advantages is the step to replace.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError
from traitbasis.files import append_whole, write_whole
from traitbasis.metrics.estimate import Estimate, mean_over_tasks
from traitbasis.reactive.affect import (
    ALPHA,
    SCENES,
    SIGMA_MIN,
    WEIGHT,
    Anchors,
    Ending,
    Scene,
    State,
    decides_to_stop,
    direct_advantages,
    follow,
    outcome,
    process_rewards,
    trace_advantages,
    turn_advantages,
)
from traitbasis.reactive.appraisal import Appraisal, appraise
from traitbasis.reactive.scenarios import Scenario

FORMAT = "traitbasis.rollouts/1"
Credit = Literal["centred", "direct", "none"]  # eq. 7, eq. 5, eq. 4 alone
Per = Literal["turn", "rollout"]


@dataclass(frozen=True)
class Exchange:
    """One turn: what the agent said, what the customer answered, its state after it, and why, which stays private.

    customer: empty where the dialogue ended with the agent's word.
    """

    agent: str
    customer: str
    state: State
    reason: str = ""


@dataclass(frozen=True)
class Rollout:
    """One dialogue. scenario: its id; rollouts of one scenario are a group. number: which of the group. prompt: chat
    messages that the agent was given first (``Scenario.prompt``). ended: see ``affect.decides_to_stop``."""

    scenario: str
    scene: Scene
    number: int
    anchors: Anchors
    prompt: tuple[Mapping[str, str], ...]
    exchanges: tuple[Exchange, ...]
    ended: Ending = "turns"

    @property
    def key(self) -> tuple[str, int]:
        return self.scenario, self.number

    @property
    def states(self) -> list[State]:
        """The start, and the state after each agent turn."""
        return [self.anchors.start, *(exchange.state for exchange in self.exchanges)]

    @property
    def process(self) -> list[float]:
        """``r_proc`` of each agent turn (eq. 3)."""
        return process_rewards(self.states)

    def outcome(self, weight: float = WEIGHT) -> float:
        """``r_out`` (eq. 2)."""
        return outcome(self.states[-1], self.anchors, weight)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What came after the prompt, as the agent sees it: itself the assistant. Ends with its own last message."""
        said = [(("assistant", exchange.agent), ("user", exchange.customer)) for exchange in self.exchanges]
        flat = [{"role": role, "content": text} for turn in said for role, text in turn]
        return flat[:-1]  # what the customer says to the last turn is nobody's input

    @property
    def record(self) -> dict[str, Any]:
        return {
            "scenario": self.scenario,
            "scene": self.scene,
            "number": self.number,
            "anchors": self.anchors.record,
            "prompt": [dict(message) for message in self.prompt],
            "exchanges": [
                {"agent": turn.agent, "customer": turn.customer, "state": turn.state.record, "reason": turn.reason}
                for turn in self.exchanges
            ],
            "ended": self.ended,
        }

    @classmethod
    def from_record(cls, record: Any) -> Rollout:
        """Raises ReactionError naming the field that is missing, unknown or of another kind."""
        fields = _object(
            record, "a rollout", ("scenario", "scene", "number", "anchors", "prompt", "exchanges"), "ended"
        )
        turns = _list(fields["exchanges"], "exchanges")
        if not turns:
            raise ReactionError("a rollout's exchanges are empty; there is nothing to score")
        exchanges = tuple(map(_exchange, turns))
        if not all(exchange.customer for exchange in exchanges[:-1]):
            raise ReactionError("a rollout goes on after an exchange in which the customer says nothing")
        if fields["scene"] not in SCENES:
            raise ReactionError(f"a rollout's scene is {fields['scene']!r:.40}; known: {', '.join(SCENES)}")
        if fields.get("ended", "turns") not in get_args(Ending):
            raise ReactionError(f"a rollout's ended is {fields['ended']!r:.40}; known: {', '.join(get_args(Ending))}")
        if type(fields["number"]) is not int:
            raise ReactionError(f"a rollout's number is {fields['number']!r:.40}; it must be a whole number")
        messages = [_object(message, "a message", ("role", "content")) for message in _list(fields["prompt"], "prompt")]
        return cls(
            scenario=_text(fields, "scenario"),
            scene=fields["scene"],
            number=fields["number"],
            anchors=Anchors.from_record(fields["anchors"]),
            prompt=tuple({name: _text(message, name) for name in message} for message in messages),
            exchanges=exchanges,
            ended=fields.get("ended", "turns"),
        )


def rollout_of(
    scenario: Scenario, number: int, turns: Sequence[Turn], appraisals: Sequence[Appraisal] | None = None
) -> Rollout:
    """A rollout from the speaker turns of a dialogue, the scenario's opening line among them or not.

    appraisals: of each agent turn, such as a judge's; by default the rules'. What the customer says twice in a row is
    one reply, and so with the agent. Raises ReactionError where the agent says nothing, or there are more or fewer
    appraisals than agent turns.
    """
    said = [turn for turn in turns if turn.speaker in ("agent", "customer") and turn.text.strip()]
    if scenario.opening_line is not None and not (said and said[0].speaker == "customer"):
        said.insert(0, Turn("customer", scenario.opening_line))
    joined = [
        Turn(speaker, "\n\n".join(turn.text for turn in some)) for speaker, some in groupby(said, lambda t: t.speaker)
    ]
    spoken = [place for place, turn in enumerate(joined) if turn.speaker == "agent"]
    if appraisals is None:
        appraisals = [appraise(joined[: place + 1]) for place in spoken]
    if not spoken or len(appraisals) != len(spoken):
        raise ReactionError(f"{scenario.id}: {len(spoken)} agent turns and {len(appraisals)} appraisals; one for each")
    states, reasons = follow(scenario.anchors.start, appraisals, scenario.scene, scenario.sensitivity)
    replies = [joined[place + 1].text if place + 1 < len(joined) else "" for place in spoken]
    exchanges = tuple(
        Exchange(joined[place].text, reply, state, reason)
        for place, reply, state, reason in zip(spoken, replies, states[1:], reasons, strict=True)
    )
    ended = decides_to_stop(states[-1], scenario.anchors, len(spoken)) or "turns"
    return Rollout(scenario.id, scenario.scene, number, scenario.anchors, tuple(scenario.prompt), exchanges, ended)


class RolloutFile:
    """Rollouts on disk with the header that says what made them; opened again it goes on with what is there.

    One writer at a time: hold ``files.alone`` where another may come. Raises ReactionError for a file with another
    header, or a damaged line; a last line that a kill cut off is dropped.
    """

    def __init__(self, path: str | Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = Path(path), {"format": FORMAT, **header}
        self.rollouts: list[Rollout] = []
        if self.path.is_file():
            found, self.rollouts, whole = _read(self.path)
            if different := sorted(key for key in found.keys() | self.header if found.get(key) != self.header.get(key)):
                raise ReactionError(
                    f"{self.path} holds rollouts that were made with other settings ({', '.join(different)}); "
                    "delete it, or write elsewhere"
                )
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)
        else:
            write_whole(self.path, json.dumps(self.header, ensure_ascii=False) + "\n")
        self.keys = {rollout.key for rollout in self.rollouts}

    def append(self, rollout: Rollout) -> None:
        """Add a rollout and have it on disk. Raises ReactionError where this one is there already."""
        if rollout.key in self.keys:
            raise ReactionError(f"{self.path} has rollout {rollout.number} of {rollout.scenario!r} already")
        append_whole(self.path, json.dumps(rollout.record, ensure_ascii=False) + "\n")
        self.rollouts.append(rollout)
        self.keys.add(rollout.key)


def read_rollouts(paths: Iterable[str | Path]) -> list[Rollout]:
    """Rollouts of several files. Raises ReactionError naming a file that is missing, empty or damaged, and when one
    rollout is there twice: it would count twice in its group."""
    files = [Path(path) for path in paths]
    found, seen = list[Rollout](), dict[tuple[str, int], Path]()
    for path in files:
        if not path.is_file():
            raise ReactionError(f"no rollouts at {path}")
        for rollout in _read(path)[1]:
            if other := seen.get(rollout.key):
                raise ReactionError(f"{other} and {path} both hold rollout {rollout.number} of {rollout.scenario!r}")
            seen[rollout.key] = path
            found.append(rollout)
    if not found:
        raise ReactionError(f"there is no rollout in {', '.join(map(str, files)) or 'no file'}")
    return found


def groups(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    """By scenario, in the order of their numbers. Raises ReactionError where one group has two sets of anchors."""
    found = defaultdict[str, list[Rollout]](list)
    for rollout in rollouts:
        found[rollout.scenario].append(rollout)
    for name, group in found.items():
        if any(rollout.anchors != group[0].anchors for rollout in group):
            raise ReactionError(f"rollouts of {name!r} have different anchors; their outcomes cannot be compared")
        group.sort(key=lambda rollout: rollout.number)
    return dict(sorted(found.items()))


def group_advantages(
    group: Sequence[Rollout],
    *,
    credit: Credit = "centred",
    alpha: float = ALPHA,
    floor: float = SIGMA_MIN,
    weight: float = WEIGHT,
    ddof: Literal[0, 1] = 0,
) -> list[list[float]]:
    """A for each agent turn of each rollout of one scenario. credit: eq. 7, eq. 5, or eq. 4 for every turn alike."""
    if credit not in get_args(Credit):
        raise ReactionError(f"credit is {credit!r:.40}; known: {', '.join(get_args(Credit))}")
    traces = trace_advantages([rollout.outcome(weight) for rollout in group], floor, ddof)
    give = direct_advantages if credit == "direct" else turn_advantages
    used = 0.0 if credit == "none" else alpha
    return [give(trace, rollout.process, used) for trace, rollout in zip(traces, group, strict=True)]


def training_lines(
    rollouts: Iterable[Rollout],
    per: Per = "turn",
    *,
    credit: Credit = "centred",
    alpha: float = ALPHA,
    floor: float = SIGMA_MIN,
    weight: float = WEIGHT,
    ddof: Literal[0, 1] = 0,
) -> Iterator[dict[str, Any]]:
    """Objects for JSON lines, in the order of scenarios, rollouts and turns; see this file's head for their fields."""
    if per not in get_args(Per):
        raise ReactionError(f"per is {per!r:.40}; known: {', '.join(get_args(Per))}")
    for name, group in groups(rollouts).items():
        credits = group_advantages(group, credit=credit, alpha=alpha, floor=floor, weight=weight, ddof=ddof)
        for rollout, advantages in zip(group, credits, strict=True):
            prompt, said = [dict(message) for message in rollout.prompt], rollout.messages
            known = {"uid": name, "scene": rollout.scene, "rollout": rollout.number, "r_out": rollout.outcome(weight)}
            if per == "rollout":
                yield {
                    **known, "prompt": prompt, "completion": said, "r_proc": rollout.process, "advantages": advantages,
                }  # fmt: skip
                continue
            for turn, (process, advantage) in enumerate(zip(rollout.process, advantages, strict=True)):
                yield {
                    **known, "turn": turn + 1, "prompt": prompt + said[: 2 * turn],
                    "completion": [said[2 * turn]], "r_proc": process, "advantage": advantage,
                }  # fmt: skip


def export_training(path: str | Path, lines: Iterable[Mapping[str, Any]]) -> int:
    """Write JSON lines, whole or not at all; how many."""
    written = [json.dumps(line, ensure_ascii=False, allow_nan=False) for line in lines]
    write_whole(path, "".join(f"{line}\n" for line in written))
    return len(written)


def scene_scores(rollouts: Sequence[Rollout], weight: float = WEIGHT) -> dict[str, Estimate]:
    """Mean r_out × 100 by scene and over all, as the paper's leaderboard gives it, with intervals over scenarios."""
    scored = [(rollout.scene, rollout.scenario, 100 * rollout.outcome(weight)) for rollout in rollouts]
    found: dict[str, Estimate] = {
        scene: mean_over_tasks((name, score) for its, name, score in scored if its == scene)
        for scene in SCENES
        if any(its == scene for its, *_ in scored)
    }
    return {**found, "all": mean_over_tasks((name, score) for _, name, score in scored)}


def _read(path: Path) -> tuple[dict[str, Any], list[Rollout], int]:
    """Header, rollouts, and how many bytes the whole lines take."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if not whole:
        raise ReactionError(f"{path} holds no rollouts: it has no whole line; delete it, or make another")
    number, found, keys = 1, list[Rollout](), set[tuple[str, int]]()
    try:
        first, *lines = data[:whole].decode("utf-8").split("\n")[:-1]
        header = json.loads(first)
        if header["format"] != FORMAT:
            raise ReactionError(f"its format is {header['format']!r:.40}, not {FORMAT}")
        for number, line in enumerate(lines, 2):  # noqa: B007  (told by the error)
            rollout = Rollout.from_record(json.loads(line))
            if rollout.key in keys:
                raise ReactionError(f"rollout {rollout.number} of {rollout.scenario!r} is there a second time")
            keys.add(rollout.key)
            found.append(rollout)
    except (ReactionError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ReactionError(f"{path} holds no rollouts, or is damaged: line {number}: {error}") from error
    return header, found, whole


def _exchange(record: Any) -> Exchange:
    fields = _object(record, "an exchange", ("agent", "customer", "state"), "reason")
    return Exchange(
        _text(fields, "agent"),
        _text(fields, "customer"),
        State.from_record(fields["state"]),
        _text({"reason": "", **fields}, "reason"),
    )


def _object(record: Any, what: str, needed: tuple[str, ...], *optional: str) -> Mapping[str, Any]:
    if not isinstance(record, Mapping):
        raise ReactionError(f"{what} must be an object with {', '.join(needed)}, not {record!r:.80}")
    if missing := [name for name in needed if name not in record]:
        raise ReactionError(f"{what} has no {missing[0]!r}")
    if unknown := [name for name in record if name not in (*needed, *optional)]:
        raise ReactionError(f"{what} has {unknown[0]!r:.80}, which is none of {', '.join((*needed, *optional))}")
    return record


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ReactionError(f"a rollout's {name} must be a list, not {value!r:.80}")
    return value


def _text(fields: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := fields[name], str):
        raise ReactionError(f"the field {name!r} is {value!r:.80}; it must be text")
    return value
