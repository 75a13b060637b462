"""Dialogues between a served simulated user and an agent, one file a method.

The customer is whatever an OpenAI-compatible URL serves: steered, prompted, tuned, or somebody else's. It is asked as
tau-bench asks its users: instruction and rules as the system prompt, the agent as ``user``, its own turns as
``assistant``. The prompt, the tasks, the agent and the seeds are the same for every method and condition, so that what
differs is the user alone.

Source of the protocol: tau-bench (arXiv 2406.12045); the words of the prompt are ours.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, get_args

from traitbasis.dialogue_tasks import DialogueTask, tasks_hash
from traitbasis.dialogues import (
    NEUTRAL,
    Dialogue,
    DialogueFile,
    DialogueTurn,
    Ended,
    Level,
    endpoint_seed,
    model_id_of,
    spec_of,
)
from traitbasis.errors import EvaluationError
from traitbasis.files import alone
from traitbasis.remote import RemoteModel, Threads, without_password, without_thoughts

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

STOP = "###STOP###"
Condition = Mapping[str, Level]  # level by trait; empty for a neutral customer

_CUSTOMER = """\
You are a customer who chats with a service agent. This is your part:

{instruction}

Rules:
- Write one short message at a time: what the customer says next, and nothing around it.
- Do not tell everything at once. Give a detail when the agent asks for it.
- Do not make anything up. When you are asked for what your part does not say, answer that you do not know it.
- Do not copy sentences of your part; say things in your own words.
- Keep the chat going until you have what you want. Then generate {stop} as a message of its own, with no other word."""

_AGENT = """\
You are a service agent of {company} and chat with a customer. What {company} does: {domain}.

Rules:
- Write one short message at a time, and no more than two questions in it.
- Ask for what you need to know. Do not make up what the customer has not told you.
- You have no tools: speak as if you could look things up and change them at once.
- Before you change anything, say what you are going to do and ask whether you may.
- When it is done, say so, and ask whether there is anything else."""

# Of what a TraitBasis server says of a turn: what makes one turn differ from the next, and what a dialogue says itself.
_OF_A_TURN = ("spec", "dose", "share_of_limit", "forced", "seed", "tries", "rejected", "failed_guard")
_SELDOM = ("plain", "dropped")
_OF_THE_DIALOGUE = ("user", "traits", "positions", "choices")
_WHO = ("model", "model_fingerprint", "basis")


@dataclass(frozen=True)
class Customer:
    """How the simulated user is asked for.

    method: name of what makes it. model: template of the model id; ``{spec}`` becomes ``impatience-high+skeptical-low``
    and nothing for a neutral customer, ``{name}`` the same with ``.`` for ``+`` and ``neutral``. seed: every task and
    trial gets one of its own from it, the same for all conditions. sampling: ``temperature`` and ``max_tokens``, where
    the endpoint's own are not wanted. force: serve traits beyond their limit (TraitBasis servers).
    """

    method: str
    remote: RemoteModel
    model: str = "steered-user@{spec}"
    positions: str = "generated"
    force: bool = False
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def model_id(self, traits: Condition) -> str:
        """The id asked for. Raises EvaluationError for a template that cannot say which traits."""
        return model_id_of(self.model, traits)

    def seed_of(self, task: DialogueTask, trial: int) -> int:
        """The same for all conditions, which are paired by it."""
        return endpoint_seed([self.seed, task.id, trial])

    def say(self, task: DialogueTask, traits: Condition, trial: int, turns: Sequence[DialogueTurn]) -> ChatCompletion:
        """The reply to what was said so far. Raises EvaluationError naming condition, task and trial."""
        body = {"positions": self.positions} if self.positions != "generated" else {}
        try:
            return self.remote.complete(
                self.model_id(traits),
                messages=_messages(customer_prompt(task), turns, "customer"),
                seed=self.seed_of(task, trial),
                extra_body={**body, "force": True} if self.force else body or None,
                **self.sampling,
            )
        except EvaluationError as error:
            raise EvaluationError(f"{spec_of(traits) or NEUTRAL}, task {task.id!r}, trial {trial}: {error}") from error


class Agent(Protocol):
    """The other side. ended: what it means when it says nothing more. settings: for the header of a file."""

    ended: Ended
    settings: dict[str, Any]
    url: str | None

    def next(self, task: DialogueTask, turns: Sequence[DialogueTurn], seed: int) -> DialogueTurn | None:
        """Its next message, the greeting when `turns` is empty; None when it says nothing more."""

    def resolved(self, task: DialogueTask) -> int | None:
        """Index among a dialogue's turns at which it does what was asked for; None when nobody can tell."""


class ScriptedAgent:
    """Says the task's script, whatever the customer answers."""

    ended: Ended = "turns"
    url: str | None = None

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {"kind": "scripted"}

    def next(self, task: DialogueTask, turns: Sequence[DialogueTurn], seed: int) -> DialogueTurn | None:
        number = len(turns) // 2
        return DialogueTurn("agent", task.agent[number]) if number < len(task.agent) else None

    def resolved(self, task: DialogueTask) -> int | None:
        return 2 * task.resolved


class EndpointAgent:
    """A model that plays the agent, without tools. It greets as the script does, so that customers begin alike.

    sampling: as for ``Customer``. It leaves by an empty message.
    """

    ended: Ended = "agent"

    def __init__(self, remote: RemoteModel, model: str, sampling: Mapping[str, Any] | None = None) -> None:
        self._remote, self._model, self._sampling = remote, model, dict(sampling or {})
        self.url: str | None = without_password(remote.url)
        self.settings: dict[str, Any] = {
            "kind": "endpoint",
            "model": model,
            "sampling": self._sampling,
            "prompt_hash": _hash(_AGENT),
        }

    def next(self, task: DialogueTask, turns: Sequence[DialogueTurn], seed: int) -> DialogueTurn | None:
        if not turns:
            return DialogueTurn("agent", task.agent[0])
        system = _AGENT.format(company=task.company, domain=task.domain)
        # Without the greeting: some templates refuse a conversation that the assistant opens.
        messages = _messages(system, turns[1:], "agent")
        reply = self._remote.complete(self._model, messages=messages, seed=seed, **self._sampling)
        text = without_thoughts(reply.choices[0].message.content or "").strip()
        return DialogueTurn("agent", text, _usage(reply)) if text else None

    def resolved(self, task: DialogueTask) -> int | None:
        return None


def open_dialogues(
    path: Path,
    customer: Customer,
    tasks: Sequence[DialogueTask],
    conditions: Sequence[Condition],
    *,
    agent: Agent,
    turns: int = 12,
) -> DialogueFile:
    """A new file, or one that is to go on: its header says what dialogues are made with (contract 11).

    tasks: all that there are, even where dialogues are collected about some. turns: of the customer, at most. Asks the
    endpoint for one turn, to hear what it says of itself. Raises EvaluationError when it cannot be had, or when the
    file was made with other settings or another model; where an endpoint stands (``url``) may change.
    """
    _check(tasks, conditions, turns=turns)
    for traits in conditions:
        customer.model_id(traits)
    opening = agent.next(tasks[0], [], 0)
    assert opening is not None
    told = _told(customer.say(tasks[0], conditions[0], 0, [opening]))
    url = without_password(customer.remote.url)
    header = {
        "method": customer.method,
        "model": customer.model,
        "url": url,
        "served": _constant(told) or {"url": url},  # nothing else says what it is
        "seed": customer.seed,
        "sampling": dict(customer.sampling),
        "force": customer.force,
        "prompt_hash": _hash(_CUSTOMER),
        "tasks_hash": tasks_hash(tasks),
        "turns": turns,
        "agent": agent.settings,
        "agent_url": agent.url,
        "versions": {"traitbasis": version("traitbasis")},
    }
    return DialogueFile(path, header)


def collect(
    file: DialogueFile,
    customer: Customer,
    tasks: Sequence[DialogueTask],
    conditions: Sequence[Condition],
    *,
    agent: Agent,
    trials: int = 1,
    concurrency: int = 8,
    progress: Callable[[int], None] = lambda turns: None,
) -> None:
    """Hold the dialogues that the file does not have yet, of each task, trial and condition.

    customer, agent: those that the file was opened with. Dialogues run side by side, and are in the file when they are
    whole. progress: told how many turns are done, from several threads; in the end as many a dialogue as it may have at
    most. Raises EvaluationError naming condition, task and trial when
    the endpoint refuses a request or is gone; dialogues that were running then are finished and kept. At Ctrl-C nobody
    waits for them. Raises it, too, when another run collects into the same file.
    """
    with alone(file.path, EvaluationError):
        file.read_again()  # another run may have added to it since
        _collect(file, customer, tasks, conditions, agent, trials, concurrency, progress)


def _collect(
    file: DialogueFile,
    customer: Customer,
    tasks: Sequence[DialogueTask],
    conditions: Sequence[Condition],
    agent: Agent,
    trials: int,
    concurrency: int,
    progress: Callable[[int], None],
) -> None:
    _check(tasks, conditions, trials=trials, concurrency=concurrency)
    turns = file.header["turns"]
    every = [(task, trial, traits) for task, trial, traits in product(tasks, range(trials), conditions)]
    missing = [job for job in every if _key(customer, *job) not in file.keys]
    progress(turns * (len(every) - len(missing)))
    hold = _Holder(customer, agent, turns, file.header["served"], progress)
    failed: BaseException | None = None
    with Threads(concurrency) as pool:
        running = [pool.submit(hold, *job) for job in missing]
        try:
            for done in as_completed(running):
                if error := done.exception():
                    failed = failed or error
                elif dialogue := done.result():
                    file.append(dialogue)
        except BaseException:  # someone pressed Ctrl-C, or the disk is full
            hold.break_off()
            raise
    if isinstance(failed, EvaluationError):
        raise EvaluationError(
            f"{failed}\n{len(file.dialogues)} whole dialogues are in {file.path}; the same command goes on from there"
        ) from failed
    if failed:
        raise failed


def read_conditions(
    traits: Iterable[str], levels: Iterable[str], mixes: Iterable[str] = (), neutral: bool = False
) -> list[Condition]:
    """Every trait and mix at every level. mixes: ``impatience+skeptical``; a level that stands in one
    (``impatience-low+skeptical``) stays. Raises EvaluationError for what is no level, and when nothing is asked for."""
    found: dict[str, Condition] = {"": {}} if neutral else {}
    for level, mix in product(levels, [*traits, *mixes]):
        condition: dict[str, Any] = {}
        for part in mix.split("+"):
            trait, _, own = part.strip().partition("-")
            if not trait or (own or level) not in get_args(Level) or trait in condition:
                raise EvaluationError(
                    f"cannot read {part!r} in the condition {mix!r} at level {level!r}; write each trait once, and as "
                    f"level one of {', '.join(get_args(Level))}"
                )
            condition[trait] = own or level
        found.setdefault(spec_of(condition), condition)
    if not found:
        raise EvaluationError("there is no condition to collect; give --traits or --mixes with --levels, or --neutral")
    return list(found.values())


def customer_prompt(task: DialogueTask) -> str:
    """The system prompt, the same for every method and condition: it never names a trait."""
    return dialogue_prompt(task.instruction)


def dialogue_prompt(instruction: str) -> str:
    """The system prompt around an instruction."""
    return _CUSTOMER.format(instruction=instruction, stop=STOP)


class _Holder:
    """Holds one dialogue after another, in several threads. When one fails, no other is begun."""

    def __init__(
        self,
        customer: Customer,
        agent: Agent,
        turns: int,
        served: Mapping[str, Any],
        progress: Callable[[int], None],
    ) -> None:
        self._customer, self._agent, self._turns = customer, agent, turns
        self._served, self._progress = served, progress
        self._no_more, self._broken_off = threading.Event(), threading.Event()

    def __call__(self, task: DialogueTask, trial: int, traits: Condition) -> Dialogue | None:
        """The whole dialogue; None when it was not begun any more."""
        if self._no_more.is_set():
            return None
        try:
            turns, ended = self._talk(task, trial, traits)
        except BaseException:
            self._no_more.set()
            raise
        return Dialogue(
            method=self._customer.method,
            traits=dict(traits),
            task=task.id,
            trial=trial,
            instruction=task.instruction,
            facts=task.facts,
            turns=tuple(turns),
            resolved=self._agent.resolved(task),
            ended=ended,
            stop_tokens=(STOP,),
            model=self._customer.model_id(traits),
            positions=self._customer.positions,
        )

    def break_off(self) -> None:
        """Leave those that are running, too, at their next turn."""
        self._no_more.set()
        self._broken_off.set()

    def _talk(self, task: DialogueTask, trial: int, traits: Condition) -> tuple[list[DialogueTurn], Ended]:
        turns: list[DialogueTurn] = []
        ended: Ended = "turns"
        seed = self._customer.seed_of(task, trial)
        for number in range(self._turns):
            if self._broken_off.is_set():
                raise EvaluationError("broken off")
            message = self._agent.next(task, turns, seed)
            if message is None:
                ended = self._agent.ended
                self._progress(self._turns - number)
                break
            turns.append(message)
            reply = self._customer.say(task, traits, trial, turns)
            turns.append(DialogueTurn("customer", reply.choices[0].message.content or "", self._made_by(reply, seed)))
            self._progress(1)
            if STOP in turns[-1].text:
                ended = "stop"
                self._progress(self._turns - number - 1)
                break
        return turns, ended

    def _made_by(self, reply: ChatCompletion, seed: int) -> dict[str, Any]:
        """What this turn was made with and the header does not say already."""
        told = _told(reply)
        constant = _constant(told)
        if other := [key for key in _WHO if constant and constant.get(key) != self._served.get(key)]:
            raise EvaluationError(
                f"the endpoint now serves another {' and '.join(other)} ({constant.get(other[0])} instead of "
                f"{self._served.get(other[0])}); serve the former one again, or write elsewhere with --out"
            )
        made = {"seed": seed, **{key: told[key] for key in _OF_A_TURN if key in told}}
        made |= {key: told[key] for key in _SELDOM if told.get(key)}
        made |= {key: value for key, value in constant.items() if value != self._served.get(key)}
        if not told and reply.system_fingerprint:
            made["system_fingerprint"] = reply.system_fingerprint
        if (finish := reply.choices[0].finish_reason) != "stop":
            made["finish"] = finish
        return made | _usage(reply)


def _key(customer: Customer, task: DialogueTask, trial: int, traits: Condition) -> tuple[str, str, int, str]:
    return spec_of(traits), task.id, trial, customer.positions


def _messages(system: str, turns: Sequence[DialogueTurn], own: str) -> list[Any]:
    """As one side's model is sent them: what itself has said is ``assistant``."""
    said = [{"role": "assistant" if turn.speaker == own else "user", "content": turn.text} for turn in turns]
    return [{"role": "system", "content": system}, *said]


def _told(reply: ChatCompletion) -> dict[str, Any]:
    """What a TraitBasis server says of a turn; nothing from others."""
    found = (reply.model_extra or {}).get("traitbasis")
    return dict(found) if isinstance(found, Mapping) else {}


def _constant(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key not in (*_OF_A_TURN, *_SELDOM, *_OF_THE_DIALOGUE)}


def _usage(reply: ChatCompletion) -> dict[str, Any]:
    used = reply.usage
    return {"usage": {"prompt": used.prompt_tokens, "completion": used.completion_tokens}} if used else {}


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(tasks: Sequence[DialogueTask], conditions: Sequence[Condition], **at_least_one: int) -> None:
    for name, value in {**at_least_one, "the number of tasks": len(tasks), "of conditions": len(conditions)}.items():
        if value < 1:
            raise EvaluationError(f"{name} is {value}; it must be at least 1")
