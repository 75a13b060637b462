"""One user turn: what is asked of the engine, the tries it takes until the guards accept one, and what comes out.

A rejected generation is thrown away and another one drawn (contract 8). When tries run out the candidate that fails the
mildest guard goes out, marked.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from traitbasis.chat import As
from traitbasis.engines.base import (
    Collector,
    Engine,
    Event,
    Failure,
    Finish,
    Generation,
    Positions,
    Request,
    Sampling,
    Ticket,
    TokenLogprob,
)
from traitbasis.errors import EngineError, RequestError, ToolCallError
from traitbasis.guards import Conversation, Guard, failed_guard
from traitbasis.reactive.reactor import Reaction
from traitbasis.toolcalls import ToolCall
from traitbasis.tools import ParsedReply, name_calls
from traitbasis.users import DEFAULT_USER

# What goes out, marked, when every try was rejected and none may be sent: a user who says nothing, never an empty text.
SILENCE = "..."
MAX_TRIES = 4
_RETRY_TEMPERATURE = 0.7  # a rejected greedy turn would only be drawn again


@dataclass(frozen=True)
class UserTurn:
    """One message of the simulated user, and what made it (contract 11).

    text: empty when the turn is tool calls. calls: the user's tool calls; a turn is text or calls, never both.
    user: name of the served user. intensities: what was asked for, off traits left out. dose: of the composed addition.
    share: how much of the damage limit that is, None where a trait that was asked for has no limit. forced: it would
    have been refused otherwise. seed: with it the same request gets this turn again. sampling: as this text was drawn;
    after a rejection a greedy draw gets a temperature. tries: generations it took. rejected: how many were rejected, by
    guard. failed_guard: set when tries ran out and the text fails that guard. plain: why this is no user's turn but the
    plain model's answer. as_: header it stands under, None for a text that was gone on with. dropped: turns of
    the conversation that were left out for want of room, by speaker. token_ids: as generated, the one that ended the
    turn included. logprobs: one a token, where asked for. prompt_logprobs: one a prompt token but the first, where
    asked for. reaction: what the customer felt, of one that reacts.
    """

    text: str
    finish: Finish
    intensities: dict[str, float]
    dose: float
    seed: int
    sampling: Sampling
    prompt_tokens: int
    completion_tokens: int
    tries: int = 1
    rejected: dict[str, int] = field(default_factory=dict)
    failed_guard: str | None = None
    positions: Positions = "generated"
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    calls: tuple[ToolCall, ...] = ()
    user: str = DEFAULT_USER.name
    plain: str | None = None
    as_: As | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    share: float | None = None
    forced: bool = False
    reaction: Reaction | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class PreparedTurn:
    """A checked request for one user turn, ready for the engine.

    guards: that judge it, given `conversation`. read: takes a reply's tool calls out of it; None without tools.
    verbatim: white space around the text is part of it. json: it has to parse. must_call: it has to be
    a tool call.
    """

    request: Request
    intensities: dict[str, float]
    dose: float
    seed: int
    guards: tuple[Guard, ...] = ()
    conversation: Conversation = field(default_factory=Conversation)
    read: Callable[[str], ParsedReply] | None = None
    user: str = DEFAULT_USER.name
    plain: str | None = None
    as_: As | None = None
    dropped: dict[str, int] = field(default_factory=dict)
    verbatim: bool = False
    json: bool = False
    must_call: bool = False
    share: float | None = None
    forced: bool = False
    reaction: Reaction | None = None

    @property
    def says(self) -> str | None:
        """A message that goes out as it stands; nothing is generated then."""
        return self.reaction.says if self.reaction else None


# Told, from the engine's thread: pieces of text, then the whole turn or a failure.
TurnListener = Callable[[str | UserTurn | Failure], None]


class Said:
    """The ticket of a turn that is said as it stands: the listener has been told all of it."""

    def __init__(self, prepared: PreparedTurn, listener: TurnListener) -> None:
        text = prepared.says or SILENCE
        listener(text)
        listener(
            UserTurn(
                text=text,
                finish="stop",
                intensities=prepared.intensities,
                dose=prepared.dose,
                seed=prepared.seed,
                sampling=prepared.request.sampling,
                prompt_tokens=0,
                completion_tokens=0,
                tries=0,
                positions=prepared.request.positions,
                user=prepared.user,
                as_=prepared.as_,
                share=prepared.share,
                forced=prepared.forced,
                reaction=prepared.reaction,
            )
        )

    def cancel(self) -> None:
        pass


class Tries:
    """Generations of one user turn until the guards accept one or tries run out."""

    def __init__(self, engine: Engine, prepared: PreparedTurn, listener: TurnListener) -> None:
        self._engine = engine
        self._prepared = prepared
        self._listener = listener
        self._cancelled = False
        self._tries = 0
        self._rejected: Counter[str] = Counter()
        self._best: _Candidate | None = None
        self._said = False  # whether some of the text has been passed on
        self._ticket: Ticket | None = None
        self._next_try()

    def cancel(self) -> None:
        self._cancelled = True
        if self._ticket:
            self._ticket.cancel()

    def _next_try(self) -> None:
        request = self._prepared.request
        if self._tries:
            seed = digest_seed([request.seed, self._tries])
            hotter = max(request.sampling.temperature, _RETRY_TEMPERATURE)
            request = replace(request, seed=seed, sampling=replace(request.sampling, temperature=hotter))
        self._tries += 1
        self._request = request
        number = self._tries
        self._collector = Collector()
        self._live = LiveText() if not self._prepared.guards and not self._prepared.read else None
        ticket = self._engine.submit(request, self._on_event, again=number > 1)
        if number == self._tries:  # else it has ended already, and the next try has set its own
            self._ticket = ticket
            if self._cancelled:  # while this try was being queued
                ticket.cancel()

    def _on_event(self, event: Event | Failure) -> None:
        if isinstance(event, Failure):
            self._listener(event)
            return
        if self._live and (piece := event.text if self._prepared.verbatim else self._live.push(event.text)):
            self._said = True
            self._listener(piece)
        generation = self._collector.add(event)
        if generation is None:
            return
        try:
            found = self._judge(generation)
        except Exception as error:  # a guard's own mistake must not leave the caller waiting
            self._listener(Failure(error))
            return
        if found.failed is None or generation.finish == "cancelled":
            self._deliver(found)
            return
        self._rejected[found.failed] += 1
        if found.harm < (self._best.harm if self._best else _UNSENDABLE):
            self._best = found
        if self._tries < MAX_TRIES and not self._cancelled:
            try:
                self._next_try()
                return
            except EngineError as error:  # no room either: what is sent must not depend on the load (contract 9)
                self._listener(Failure(error))
                return
        if self._best is None and self._prepared.must_call:
            self._listener(Failure(RequestError(_NO_CALL)))
            return
        self._deliver(self._best or found)

    def _judge(self, generation: Generation) -> _Candidate:
        """The turn that a generation is, or may be sent as when no better one comes."""
        guards, conversation = self._prepared.guards, self._prepared.conversation
        text = generation.text if self._prepared.verbatim else generation.text.strip()
        found = _Candidate(generation, self._request, text)
        if generation.finish == "cancelled" and not guards:
            return found
        if self._prepared.json:
            _check_json(text, generation)
            return found
        if self._prepared.read:
            try:
                reply = self._prepared.read(text)
            except ToolCallError:
                return _silent(found, "tool_call")
            if reply.calls:
                return self._judge_calls(found, reply)
            found = replace(found, text=reply.text.strip())
        if not found.text.strip() and not self._prepared.verbatim:  # whatever the guards: harnesses take no empty turn
            return _silent(found, "empty")
        guard = failed_guard(found.text, guards, conversation)
        if guard is None:
            return found
        text = guard.last_resort(found.text, conversation).strip() if guard.last_resort else found.text
        if not guard.sendable or not text:
            return _silent(found, guard.name)
        return replace(found, text=text, failed=guard.name, harm=len(guards) - guards.index(guard))

    def _judge_calls(self, found: _Candidate, reply: ParsedReply) -> _Candidate:
        found = replace(found, text="", calls=name_calls(reply.calls, self._request.seed))
        if reply.text.strip():  # text or a call, never both
            return replace(found, failed="mixed_call", harm=1)
        guarded = any(guard.name == "repeat" for guard in self._prepared.guards)
        if guarded and [*map(_said, reply.calls)] == [*map(_said, _last_calls(self._prepared.conversation))]:
            # It would be repeated until the harness gives up; a user who says nothing lets the agent go on.
            return replace(found, failed="repeat", harm=0) if self._prepared.must_call else _silent(found, "repeat")
        return found

    def _deliver(self, found: _Candidate) -> None:
        if not self._live or not self._said:
            for piece in re.findall(r"\s*\S+", found.text):
                self._listener(piece)
        prepared, generation = self._prepared, found.generation
        # Of a text that is sent in the place of what was drawn, the tokens are nobody's business.
        drawn = found.calls or not found.failed or found.text == generation.text.strip()
        self._listener(
            UserTurn(
                text=found.text,
                finish=generation.finish,
                intensities=prepared.intensities,
                dose=prepared.dose,
                seed=prepared.seed,
                sampling=found.request.sampling,
                prompt_tokens=len(prepared.request.prompt_ids),
                completion_tokens=len(generation.token_ids),
                tries=self._tries,
                rejected=dict(self._rejected),
                failed_guard=found.failed,
                positions=found.request.positions,
                token_ids=generation.token_ids if drawn else (),
                logprobs=generation.logprobs if drawn else (),
                calls=found.calls,
                user=prepared.user,
                plain=prepared.plain,
                as_=prepared.as_,
                dropped=prepared.dropped,
                share=prepared.share,
                forced=prepared.forced,
                reaction=prepared.reaction,
                prompt_logprobs=generation.prompt_logprobs or (),
            )
        )


_UNSENDABLE = 10**6
_NO_CALL = (
    "max_tokens is too small for the call that tool_choice demands: no draw came to its end; ask for more, or for less "
    "with the tool's parameters"
)


@dataclass(frozen=True)
class _Candidate:
    """A generation as a turn. failed: the guard that rejects it; harm: how unwilling one would be to send it then."""

    generation: Generation
    request: Request
    text: str
    calls: tuple[ToolCall, ...] = ()
    failed: str | None = None
    harm: int = _UNSENDABLE


class LiveText:
    """Text passed on as it comes, without the white space around the whole."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def push(self, text: str) -> str:
        """What can be passed on now."""
        text = self._held + text
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        ready = text.rstrip()
        self._held = text[len(ready) :]
        return ready


def _silent(found: _Candidate, failed: str) -> _Candidate:
    """Nothing of it may go out."""
    return replace(found, text=SILENCE, calls=(), failed=failed)


def _check_json(text: str, generation: Generation) -> None:
    """A grammar cannot end a text whose schema wants more than the engine goes on for."""
    try:
        json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"max_tokens is too small for this JSON schema: after {len(generation.token_ids)} tokens the answer is not "
            "whole; ask for more, or for less with the schema"
        ) from error


def _last_calls(conversation: Conversation) -> tuple[ToolCall, ...]:
    """The customer's last calls, unless somebody has spoken since."""
    for turn in reversed(conversation.turns):
        if turn.speaker != "tool":
            return turn.calls
    return ()


def _said(call: ToolCall) -> tuple[str, Any]:
    return call.name, call.arguments


def digest_seed(what: Any) -> int:
    """A seed below 2**63 from any JSON value."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, ensure_ascii=True, default=list).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
