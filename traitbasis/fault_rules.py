"""Faults that need no judge: what calls, their results, the reference actions and the customer's appraisals show.

Calls are held against a task's reference actions as multisets: a reference is done by a call of the same tool with the
same arguments (those that the benchmark compares; free texts such as a hand-over's summary are not compared). What is
left over on either side is a fault. A reference is one right way and not the only one, so reading more than it reads is
no fault, and what changes nothing is minor: critical is what left the data other than they should be, or not known to
be right.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from traitbasis.chat import Turn
from traitbasis.fault_types import RULED, Diagnosis, Ending, Fault, Severity
from traitbasis.outcomes import Episode, Message
from traitbasis.reactive.appraisal import Appraisal

UNSATISFIED: Final = "###UNSATISFIED###"
Appraise = Callable[[Sequence[Turn]], Sequence[Appraisal]]

_HANDS_OVER = "transfer_to_human"
_OWN_WORDS = ("calculate", "think", _HANDS_OVER)  # tools whose arguments are the agent's own words
_READS = ("find_", "get_", "list_", "search_", "check_", "troubleshoot_", *_OWN_WORDS)  # they change nothing
_WITHOUT_REFERENCE = frozenset({"Schema Error", "Friction", "Inconsistent"})
_CLEAR = 0.5  # strength from which an event of the appraisal is a fault
_FRICTION = ("repeated question", "unnecessary question", "rigid refrain", "no progress")
_WHY: Mapping[str, tuple[str, ...]] = {  # reasons to abandon, and the events that speak for each
    "dismissive tone": ("coldness",),
    "ignored emotional cues": ("ignored cue",),
    "procedural friction": (*_FRICTION, "contradiction"),
}
_FAILED = re.compile(r"\s*(?:error\b|unknown action\b)", re.IGNORECASE)
_SCHEMA = re.compile(
    r"unknown action|tool '[^']*' not found|unexpected keyword argument|missing \d+ required|validation error"
    r"|required positional argument|is not callable|unhashable type|(?:indices|object) must be",
    re.IGNORECASE,
)
_NO_JSON = re.compile(
    r"JSONDecodeError|Expecting (?:value|property name|',' delimiter|':' delimiter)|Unterminated string"
)
_CLOSES = re.compile(
    r"anything else|good ?bye|have a (?:great|nice|good|wonderful)|(?:is|are|been|all) (?:now )?(?:all )?"
    r"(?:done|completed?|processed|finished|taken care of|cancell?ed|updated|changed|booked|returned|exchanged)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Reference:
    """An action that the task requires. compare: names of the arguments that count, None for all."""

    name: str
    arguments: Mapping[str, Any]
    compare: tuple[str, ...] | None = None

    def done_by(self, call: Made) -> bool:
        if self.name != call.name:
            return False
        return self.name.startswith(_OWN_WORDS) or not self.other_than(call)

    def other_than(self, call: Made) -> list[str]:
        """The arguments that a call has otherwise."""
        given = call.arguments if isinstance(call.arguments, Mapping) else {}
        names = self.compare if self.compare is not None else tuple(dict.fromkeys((*self.arguments, *given)))
        return [n for n in names if n not in given or n not in self.arguments or self.arguments[n] != given[n]]


@dataclass(frozen=True)
class Made:
    """A call of the agent. turn: index of its message. result: the tool's answer, None where the episode ended."""

    turn: int
    name: str
    arguments: Any
    result: str | None = None

    @property
    def failed(self) -> bool:
        return bool(self.result and _FAILED.match(self.result)) or self.malformed

    @property
    def malformed(self) -> bool:
        broken = self.arguments is not None and not isinstance(self.arguments, Mapping)
        return broken or bool(self.result and _FAILED.match(self.result) and _SCHEMA.search(self.result))

    @property
    def writes(self) -> bool:
        return not self.name.startswith(_READS)

    @property
    def said(self) -> str:
        return _short(f"{self.name}({_json(self.arguments)})")

    def same_as(self, other: Made) -> bool:
        return self.name == other.name and bool(self.arguments == other.arguments)


def diagnose_by_rules(episode: Episode, references: Sequence[Reference] | None, appraise: Appraise) -> Diagnosis:
    """The faults of one failed episode. references: None where they are unknown; then little is looked for."""
    if not episode.messages and not episode.error:
        return Diagnosis(episode, referenced=references is not None)
    calls = calls_of(episode.messages)
    turns, places = talk_of(episode.messages)
    answers = list(zip(places, appraise(turns), strict=True)) if turns else []
    ending = _ending(episode, answers)
    found = [*_schema(episode, calls), *_talked(episode, answers, ending)]
    if references is not None:
        found += _acted(episode, calls, references, ending)
    looked = frozenset(RULED) if references is not None else _WITHOUT_REFERENCE
    return Diagnosis(
        episode, tuple(sorted(found, key=lambda f: f.turn)), looked, ending, referenced=references is not None
    )


def references(episodes: Iterable[Episode]) -> dict[tuple[str, str], tuple[Reference, ...]]:
    """Reference actions by domain and task, from whichever episode of the task keeps them: one that broke off keeps
    none."""
    found: dict[tuple[str, str], tuple[Reference, ...]] = {}
    for episode in episodes:
        if (known := _references(episode)) is not None:
            found.setdefault((episode.domain, episode.task), known)
    return found


def calls_of(messages: Sequence[Message]) -> list[Made]:
    """The agent's calls with their results, which follow in the same order. Those of ReAct agents stand in the text."""
    found: list[Made] = []
    waiting: list[int] = []
    for i, message in enumerate(messages):
        if message.speaker == "agent":
            made = [Made(i, call.name, call.arguments) for call in message.calls] or _in_text(i, message.text)
            waiting = list(range(len(found), len(found) + len(made)))
            found += made
        elif message.speaker == "tool" and waiting:
            at = waiting.pop(0)
            found[at] = Made(found[at].turn, found[at].name, found[at].arguments, message.text)
        elif message.speaker == "customer":
            waiting = []
    return found


def talk_of(messages: Sequence[Message]) -> tuple[list[Turn], list[int]]:
    """What was said aloud, agent and customer by turns (what one says in several messages is one turn), and the message
    of each agent turn that answers a customer's."""
    turns: list[Turn] = []
    places: list[int] = []
    for i, message in enumerate(messages):
        if message.speaker not in ("agent", "customer"):
            continue
        text = (_respond(message.text) if message.speaker == "agent" else message.text).strip()
        if not text:
            continue
        if turns and turns[-1].speaker == message.speaker:
            turns[-1] = Turn(message.speaker, f"{turns[-1].text}\n{text}")
            continue
        if message.speaker == "agent" and turns:
            places.append(i)
        turns.append(Turn(message.speaker, text))
    return turns, places


def data_right(episode: Episode) -> bool | None:
    """Whether the harness found its data as they should be; None where it does not say."""
    info = episode.reward_info
    if not isinstance(info, Mapping):
        return None
    inner = info.get("info") if isinstance(info.get("info"), Mapping) else info
    said = inner.get("r_actions") if isinstance(inner, Mapping) else None
    if said is None and isinstance(parts := info.get("breakdown") or info.get("reward_breakdown"), Mapping):
        said = parts.get("DB")
    return None if said is None else bool(said)


# ---- What was done


def _acted(episode: Episode, calls: Sequence[Made], references: Sequence[Reference], ending: Ending) -> Iterator[Fault]:
    done, over, missing = _matched(calls, references)
    last = max(len(episode.messages) - 1, 0)
    harm: Severity = "minor" if data_right(episode) else "critical"
    untold = _untold(episode)
    required = [r for r in missing if not r.name.startswith(_READS) or r.name.startswith(_HANDS_OVER)]
    wrong = _wrong_arguments(over, required)
    undone = len(required) > len(wrong) or bool(untold)
    stop = _stop(episode, ending, "critical" if untold else harm) if undone else None
    if stop:
        yield stop
    missed: Severity = "minor" if stop and stop.source == "user" else "critical"  # what a stop left undone

    found: list[Fault] = []
    for reference in missing:
        if reference in required:
            if id(reference) in wrong:
                call = wrong[id(reference)]
                given = call.arguments if isinstance(call.arguments, Mapping) else {}
                other = "; ".join(
                    f"{name} is {_at(given, name)}, not {_at(reference.arguments, name)}"
                    for name in reference.other_than(call)
                )
                found.append(Fault("Wrong Arguments", "agent", harm, call.turn, _short(f"{call.name}: {other}")))
            else:
                severity = "minor" if missed == "minor" else harm
                found.append(Fault("Missed Action", "agent", severity, last, _short(f"{reference.name} is not done")))
        else:
            found.append(Fault("Missed Action", "agent", "minor", last, _short(f"{reference.name} is not read")))
    for text in untold:
        found.append(Fault("Missed Action", "agent", missed, last, _short(f"the customer is never told {text!r}")))

    taken = {id(call) for call in wrong.values()}
    for call in over:
        if id(call) in taken or call.malformed:
            continue
        if _repeats(call, calls):
            severity = harm if call.writes and not call.failed else "minor"
            found.append(Fault("Repeated Action", "agent", severity, call.turn, f"{call.said} once more"))
        elif call.name.startswith(_HANDS_OVER):
            found.append(Fault("Wrong Transfer", "agent", "critical", call.turn, "the task needs no human"))
        elif call.failed:
            found.append(Fault("Wrong Arguments", "agent", "minor", call.turn, _short(f"{call.said}: {call.result}")))
        elif call.writes:
            found.append(Fault("Extra Action", "agent", harm, call.turn, f"{call.said} is not needed"))

    explained = any(fault.severity == "critical" for fault in found)
    for call in _out_of_order(done):
        severity = "critical" if data_right(episode) is False and not explained else "minor"
        found.append(
            Fault("Wrong Order", "agent", severity, call.turn, f"{call.said} stands out of the required order")
        )
    yield from found


def _matched(
    calls: Sequence[Made], references: Sequence[Reference]
) -> tuple[list[tuple[int, Made]], list[Made], list[Reference]]:
    """Which call does which reference, the calls that do none, and the references that none does. A call that
    succeeded is taken before one that failed."""
    free = list(calls)
    done: list[tuple[int, Made]] = []
    missing: list[Reference] = []
    for i, reference in enumerate(references):
        doing = [call for call in free if reference.done_by(call)]
        if doing:
            call = next((call for call in doing if not call.failed), doing[0])
            free = [other for other in free if other is not call]
            done.append((i, call))
        else:
            missing.append(reference)
    return done, free, missing


def _wrong_arguments(over: Sequence[Made], missing: Sequence[Reference]) -> dict[int, Made]:
    """By the id of a reference that is not done, the call that meant it: the same tool, the fewest other arguments; of
    equals the latest, which stands."""
    free = [call for call in over if not call.malformed]
    found: dict[int, Made] = {}
    for reference in missing:
        meant = [call for call in free if call.name == reference.name]
        if meant:
            call = min(meant, key=lambda call: (call.failed, len(reference.other_than(call)), -call.turn))
            free = [other for other in free if other is not call]
            found[id(reference)] = call
    return found


def _repeats(call: Made, calls: Sequence[Made]) -> bool:
    """Whether the same was called before; for what only reads, with nothing changed since."""
    before = calls[: next(i for i, other in enumerate(calls) if other is call)]
    at = max((i for i, other in enumerate(before) if other.same_as(call)), default=-1)
    return at >= 0 and (call.writes or not any(other.writes and not other.failed for other in before[at:]))


def _out_of_order(done: Sequence[tuple[int, Made]]) -> list[Made]:
    """The fewest changing calls without which the others stand in the reference's order."""
    made = sorted(((call.turn, i, call) for i, call in done if call.writes), key=lambda item: item[:2])
    ends: list[int] = []  # the least last index of an ordered run of each length
    lengths = []
    for _, i, _ in made:
        at = bisect_left(ends, i)
        ends[at : at + 1] = [i]
        lengths.append(at + 1)
    longest, kept = len(ends), set()
    before = float("inf")
    for place in range(len(made) - 1, -1, -1):
        if lengths[place] == longest and made[place][1] < before:
            kept.add(place)
            longest, before = longest - 1, made[place][1]
    return [call for place, (_, _, call) in enumerate(made) if place not in kept]


def _untold(episode: Episode) -> list[str]:
    """What the task wanted told and the harness did not find."""
    info = episode.reward_info
    inner = info.get("info") if isinstance(info, Mapping) and isinstance(info.get("info"), Mapping) else info
    outputs = inner.get("outputs") if isinstance(inner, Mapping) else None
    return [str(text) for text, told in outputs.items() if not told] if isinstance(outputs, Mapping) else []


def _stop(episode: Episode, ending: Ending, severity: Severity) -> Fault | None:
    """The customer stopped before all was done, as the caller knows: the agent's fault where it had taken leave or said
    that all was done, the customer's where the agent was still at it. One that gave up is no early stop but an ending.
    """
    if episode.ended != "user_stop" or ending.abandoned:
        return None
    said = [(i, _respond(m.text)) for i, m in enumerate(episode.messages) if m.speaker == "agent" and m.text.strip()]
    last = max(len(episode.messages) - 1, 0)
    if said and _CLOSES.search(said[-1][1]):
        return Fault("Early Stop", "agent", severity, said[-1][0], _short(f"takes leave: {said[-1][1]!r}"))
    return Fault("Early Stop", "user", severity, last, "the customer stops while the agent is at work")


def _schema(episode: Episode, calls: Sequence[Made]) -> Iterator[Fault]:
    """Calls that no tool can take. Critical when no later call of the tool gets through, or the episode broke off."""
    for call in (call for call in calls if call.malformed):
        later = any(c.name == call.name and not c.failed and c.turn > call.turn for c in calls)
        reason = _short(call.result or f"{call.said}: the arguments are no JSON object")
        yield Fault("Schema Error", "agent", "minor" if later else "critical", call.turn, reason)
    if episode.ended == "error" and _NO_JSON.search(episode.error or ""):  # the call itself is not kept
        at = max(len(episode.messages) - 1, 0)
        yield Fault("Schema Error", "agent", "critical", at, _short(f"a call that is no JSON: {episode.error}"))


# ---- What was said


def _talked(episode: Episode, answers: Sequence[tuple[int, Appraisal]], ending: Ending) -> Iterator[Fault]:
    """Critical where it cost the episode: the customer gave up, or the steps ran out."""
    severity: Severity = "critical" if ending.abandoned or episode.ended == "max_steps" else "minor"
    for at, appraisal in answers:
        strong = [event for event in _FRICTION if appraisal.events.get(event, 0) >= _CLEAR]
        if strong:
            event = max(strong, key=lambda event: appraisal.events[event])
            yield Fault("Friction", "agent", severity, at, _why(appraisal, event))
        if appraisal.events.get("contradiction", 0) >= _CLEAR:
            yield Fault("Inconsistent", "agent", severity, at, _why(appraisal, "contradiction"))


def _ending(episode: Episode, answers: Sequence[tuple[int, Appraisal]]) -> Ending:
    if not any(message.speaker == "customer" and UNSATISFIED in message.text for message in episode.messages):
        return Ending(False)
    sums = {
        reason: sum(appraisal.events.get(event, 0) for _, appraisal in answers for event in events)
        for reason, events in _WHY.items()
    }
    dominant = max(sums, key=lambda reason: sums[reason])
    return Ending(True, dominant if sums[dominant] > 0 else None)


def _why(appraisal: Appraisal, event: str) -> str:
    return _short(f"{event}: {appraisal.reasons[event]}" if event in appraisal.reasons else event)


# ---- Reading


def _references(episode: Episode) -> tuple[Reference, ...] | None:
    """As our drivers keep them, or as tau-bench's and tau2's own results do."""
    info = episode.reward_info if isinstance(episode.reward_info, Mapping) else {}
    checks = info.get("action_checks")
    said = (episode.model_extra or {}).get("reference")
    if said is None:
        said = info.get("actions")
    if said is None and isinstance(checks, list):
        said = [check.get("action") for check in checks if isinstance(check, Mapping)]
    if not isinstance(said, list):
        return None
    found = []
    for action in said:
        if not isinstance(action, Mapping) or not isinstance(action.get("name"), str):
            continue
        arguments = action.get("arguments", action.get("kwargs"))
        compare = action.get("compare_args")
        if action["name"] != "respond" and action.get("requestor", "assistant") == "assistant":
            found.append(
                Reference(
                    action["name"],
                    arguments if isinstance(arguments, Mapping) else {},
                    tuple(map(str, compare)) if isinstance(compare, list) else None,
                )
            )
    return tuple(found)


def _in_text(turn: int, text: str) -> list[Made]:
    """A ReAct agent's call: ``Action:`` and JSON of name and arguments."""
    action = _action(text)
    return [Made(turn, action["name"], action.get("arguments"))] if action and action["name"] != "respond" else []


def _respond(text: str) -> str:
    """What an agent's message says aloud: of a ReAct agent's the content of its answer."""
    action = _action(text)
    if action is None:
        return text
    arguments = action.get("arguments")
    said = arguments.get("content") if action["name"] == "respond" and isinstance(arguments, Mapping) else ""
    return said if isinstance(said, str) else ""


def _action(text: str) -> dict[str, Any] | None:
    _, marked, rest = text.rpartition("Action:")
    if not marked:
        return None
    try:
        found = json.loads(rest[rest.index("{") : rest.rindex("}") + 1])
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("name"), str) else None


def _at(arguments: Mapping[str, Any], name: str) -> str:
    return _json(arguments[name]) if name in arguments else "absent"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _short(text: str, most: int = 240) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 2] + " …"
