"""The user simulator: conversation + traits -> the customer's next message, or tool call.

Everything flows down from here: messages become a prompt (``chat.py``), traits become additions (``basis.py``), an
engine generates, guards judge the result. No HTTP. One simulator serves many callers at once: it holds no conversation.

Not everything a harness asks of its user's model is a user's turn. Judge prompts and requested JSON are answered by the
plain model: as its assistant, unsteered, and with no guards but those against text that may never go out (contract 10).
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from traitbasis.basis import Basis, find_basis
from traitbasis.chat import As, Turn, check_choice, read_messages, render_prompt, reply_header, tokenize
from traitbasis.engines.base import (
    Collector,
    Engine,
    Event,
    Failure,
    Finish,
    Generation,
    Guide,
    Positions,
    Request,
    Sampling,
    Ticket,
    TokenLogprob,
    as_engine_error,
)
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineError, RequestError, ToolCallError, TraitSpecError
from traitbasis.grammar import json_grammar
from traitbasis.guards import GUARDS, Conversation, Guard, failed_guard, named_stop_tokens
from traitbasis.model import LanguageModel, load_model
from traitbasis.prompts import asked_json, is_turn_schema, judge_prompt, without_directions
from traitbasis.spec import Traits, format_traits
from traitbasis.toolcalls import ToolCall
from traitbasis.tools import ParsedReply, Tools, name_calls, read_tools, tool_format
from traitbasis.users import ServedUser

# Stands in for a harness's instruction when a conversation has no system message.
DEFAULT_INSTRUCTION = "You are a customer talking to a support agent. Write the customer's next message."
# What goes out, marked, when every try was rejected and none may be sent: a user who says nothing, never an empty text.
SILENCE = "..."
MAX_TRIES = 4
# Keeps arithmetic finite, no more: what a trait bears on a model is a matter of calibration.
MAX_DOSE = 10.0
_RETRY_TEMPERATURE = 0.7  # a rejected greedy turn would only be drawn again
# Of the context, kept free for the reply when a conversation is cut to fit.
_REPLY_SHARE = 4
DEFAULT_USER = ServedUser(name="steered-user")


@dataclass(frozen=True)
class UserTurn:
    """One message of the simulated user, and what made it (contract 11).

    text: empty when the turn is tool calls. calls: the user's tool calls; a turn is text or calls, never both.
    user: name of the served user. intensities: what was asked for, off traits left out. dose: of the composed addition.
    seed: with it the same request gets this turn again. sampling: as this text was drawn; after a rejection a greedy
    draw gets a temperature. tries: generations it took. rejected: how many were rejected, by guard. failed_guard: set
    when tries ran out and the text fails that guard. plain: why this is no user's turn but the plain model's answer.
    as_: header it stands under, None for a text that was gone on with.
    dropped: turns of the conversation that were left out for want of room, by speaker. token_ids: as generated, the
    one that ended the turn included. logprobs: one a token, where asked for. prompt_logprobs: one a prompt token but
    the first, where asked for.
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

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, eq=False)
class PreparedTurn:
    """A checked request for one user turn, ready for the engine.

    guards: that judge it, given `conversation`. read: takes a reply's tool calls out of it; None without tools.
    verbatim: white space around the text is part of it.
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


# Told, from the engine's thread: pieces of text, then the whole turn or a failure.
TurnListener = Callable[[str | UserTurn | Failure], None]


class UserSimulator:
    """Writes user turns with steered traits.

        user = UserSimulator("smollm2-135m-instruct")
        messages = [
            {"role": "system", "content": "You are a customer. Your order #W100 is late; you want a refund."},
            {"role": "user", "content": "Hi! How can I help you today?"},  # the agent speaks as "user"
        ]
        print(user.reply(messages, traits={"impatience": "high", "skeptical": 0.5}, seed=7))

    model: a LanguageModel or what ``load_model`` takes. basis: a Basis, a path, or None for the model's own.
    as_: header the customer's turns stand under; by default what the basis was extracted with.
    sampling: defaults of every turn. guards: see ``guards.py``; without any, text is passed on as it is generated.
    """

    def __init__(
        self,
        model: LanguageModel | str | Path,
        basis: Basis | str | Path | None = None,
        *,
        as_: As | None = None,
        engine: Engine | None = None,
        sampling: Sampling | None = None,
        guards: Sequence[Guard] = GUARDS,
    ) -> None:
        self.lm = model if isinstance(model, LanguageModel) else load_model(str(model))
        if isinstance(basis, Basis):
            basis.check_model(self.lm)
            self.basis = basis
        else:
            self.basis = find_basis(self.lm, basis)
        self.as_: As = self.basis.as_ if as_ is None else as_
        check_choice("as_", self.as_, As)
        self.sampling = sampling or Sampling()
        self.guards = tuple(guards)
        self.engine = engine or TransformersEngine(self.lm)

    def reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        traits: Traits = None,
        *,
        seed: int | None = None,
        trial: int | str = 0,
        **options: Any,
    ) -> UserTurn:
        """The user's next message. `options` as for ``prepare``.

        messages: the conversation as a harness sends it, ``assistant`` being the simulated user and ``user`` the agent.
        traits: a spec (``"impatience-high+skeptical-0.5"``) or a mapping; none means the served user's own, which the
        default user has none of, and ``{}`` unsteered. seed: the same request with the same seed gets the same reply;
        by default one is derived from the request, and `trial` varies that.
        Raises RequestError, TraitSpecError, ChatTemplateError for what was asked, EngineError for what went wrong.
        """
        *_, turn = self._events(self.prepare(messages, traits, seed=seed, trial=trial, **options))
        assert isinstance(turn, UserTurn)
        return turn

    def stream(self, messages: Sequence[Mapping[str, Any]], traits: Traits = None, **options: Any) -> Iterator[str]:
        """Like ``reply``, in pieces of text. With guards, the pieces come once the turn has passed them."""
        for piece in self._events(self.prepare(messages, traits, **options)):
            if isinstance(piece, str):
                yield piece

    def prepare(
        self,
        messages: Sequence[Mapping[str, Any]],
        traits: Traits = None,
        *,
        user: ServedUser = DEFAULT_USER,
        seed: int | None = None,
        trial: int | str = 0,
        choice: int = 0,
        positions: Positions = "generated",
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> PreparedTurn:
        """Check a request and render its prompt, without generating. Other arguments and errors as for ``reply``.

        user: whose turn it is. choice: which of several replies to one request and seed this is. positions:
        ``generated`` keeps the past clean, ``all`` steers the prompt too, as the paper's plain form. tools,
        tool_choice: in OpenAI's form, the user's own tools; the turn is then text or a call. response_format: in
        OpenAI's form; ``json_object`` and ``json_schema`` get JSON of that schema. sampling: fields of ``Sampling``
        that differ from the user's and the simulator's.
        """
        known_tools = read_tools(tools, tool_choice)
        schema, structured = _schema(response_format)
        if known_tools and structured:
            raise RequestError("tools and a JSON response_format cannot be had in one request; leave one out")
        turns = without_directions(read_messages(messages, tools=known_tools is not None))
        judge = judge_prompt(turns)
        plain = f"judge prompt of {judge}" if judge else "response_format" if structured else None
        if not structured and not known_tools and (schema := asked_json(turns)):
            structured, plain = True, plain or "JSON asked for in the prompt"
        asked = user.traits if traits is None else traits
        intensities = self.basis.parse({} if judge or (structured and not is_turn_schema(schema)) else asked)
        self.basis.parse(asked)  # a misspelt trait is told even where it is not used
        drawn = _changed(_changed(self.sampling, user.sampling), sampling)
        if plain is None:
            turns = _instructed(turns, user)
        spoken = [[turn.speaker, turn.text, *([call.name, call.arguments] for call in turn.calls)] for turn in turns]
        check_choice("positions", positions, Positions)
        more = [tools, tool_choice] if known_tools else [response_format] if structured else []
        seed = self._seed(seed, trial, [intensities, spoken, drawn, positions, *more])
        if structured or (known_tools and known_tools.must_call):
            drawn = replace(drawn, stop=())  # which would cut it in the middle; it ends by itself
        as_: As = "assistant"
        if plain is None:
            as_ = reply_header(self.lm.tokenizer, self.as_, known_tools.declared) if known_tools else self.as_
        prompt_ids, dropped = self._fit(turns, as_, known_tools, drawn.max_tokens, user)
        stop_ids = self.lm.stop_ids(as_)
        guide: Callable[[], Guide] | None = None
        shown, reader = frozenset[int](), None
        if structured:
            guide = partial(json_grammar(self.lm.tokenizer, schema).guide, stop_ids, silent=not intensities)
        if known_tools:
            form = tool_format(self.lm.tokenizer)
            guide, shown = form.guide(self.lm.tokenizer, known_tools), form.shown_ids(self.lm.tokenizer)
            reader = partial(form.parse, tools=known_tools)
        request = Request(
            prompt_ids=prompt_ids,
            # Harnesses send one seed with every turn of an episode; turns that draw alike would repeat each other.
            seed=_digest_seed([seed, spoken, choice] if choice else [seed, spoken]),
            sampling=drawn,
            stop_ids=stop_ids,
            additions=self.basis.additions(intensities),
            positions=positions,
            guide=guide,
            shown_ids=shown,
        )
        return PreparedTurn(
            request,
            intensities,
            self._dose(intensities),
            seed,
            guards=self.guards_of(user) if plain is None else tuple(g for g in self.guards if not g.sendable),
            conversation=_conversation(turns, user),
            read=reader,
            user=user.name,
            plain=plain,
            as_=as_,
            dropped=dropped,
        )

    def prepare_text(
        self,
        prompt: str | Sequence[int],
        traits: Traits = None,
        *,
        user: ServedUser = DEFAULT_USER,
        seed: int | None = None,
        trial: int | str = 0,
        choice: int = 0,
        positions: Positions = "generated",
        prompt_logprobs: int | None = None,
        **sampling: Any,
    ) -> PreparedTurn:
        """A text to go on with, as it stands or as token ids: no chat template, no guards. Otherwise as ``prepare``."""
        ids = list(self.lm.tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)
        intensities = self.basis.parse(user.traits if traits is None else traits)
        drawn = _changed(_changed(self.sampling, user.sampling), sampling)
        seed = self._seed(seed, trial, [intensities, ids, drawn, positions])
        request = Request(
            prompt_ids=tuple(ids),
            seed=_digest_seed([seed, ids, choice] if choice else [seed, ids]),
            sampling=drawn,
            stop_ids=self.lm.stop_ids(self.as_),
            additions=self.basis.additions(intensities),
            positions=positions,
            prompt_logprobs=prompt_logprobs,
        )
        dose = self._dose(intensities)
        return PreparedTurn(request, intensities, dose, seed, user=user.name, plain="completion", verbatim=True)

    def _seed(self, seed: int | None, trial: int | str, what: list[Any]) -> int:
        if not isinstance(trial, int | str):
            raise RequestError(f"trial must be a whole number or a text, not {trial!r}")
        if seed is None:
            intensities, said, drawn, positions, *more = what
            how = {name: value for name, value in asdict(drawn).items() if name != "logprobs"}  # reports, draws nothing
            return _digest_seed(
                [self.lm.fingerprint, self.basis.fingerprint, intensities, said, how, positions, trial, *more]
            )
        if not isinstance(seed, int):
            raise RequestError(f"seed must be a whole number, not {seed!r}")
        return seed

    def _dose(self, intensities: Mapping[str, float]) -> float:
        dose = self.basis.dose(intensities)
        if not dose <= MAX_DOSE:
            raise TraitSpecError(
                f"{format_traits(intensities)} adds {dose:.3g} times the size of a hidden state; at most {MAX_DOSE:g} "
                "is taken, and text falls apart long before that"
            )
        return dose

    def guards_of(self, user: ServedUser) -> tuple[Guard, ...]:
        """The guards that judge a served user's turns, worst harm first."""
        chosen = {guard.name: guard for guard in self.guards}
        known = {guard.name: guard for guard in GUARDS}
        for name, on in user.guards.items():
            if on:
                chosen.setdefault(name, known[name])
            else:
                chosen.pop(name, None)
        order = [*known, *chosen]
        return tuple(sorted(chosen.values(), key=lambda guard: order.index(guard.name)))

    def _fit(
        self, turns: list[Turn], as_: As, tools: Tools | None, max_tokens: int, user: ServedUser
    ) -> tuple[tuple[int, ...], dict[str, int]]:
        """The prompt of as much of the conversation as fits the context, and how many turns were left out, by speaker.

        The system text and the last turn stay. The agent's turns go first, oldest first: what the customer has said
        itself it must not contradict. Raises nothing when it cannot be made to fit: the engine says by how much.
        """

        def prompt(kept: list[Turn]) -> tuple[int, ...]:
            text = render_prompt(self.lm.tokenizer, kept, as_, tools.declared if tools else ())
            return tuple(tokenize(self.lm.tokenizer, text))

        ids = prompt(turns)
        limit = self.engine.stats().max_context
        if limit is None or user.context == "refuse":
            return ids, {}
        room = min(max_tokens, limit // _REPLY_SHARE)
        if len(ids) + room <= limit:
            return ids, {}
        order = _droppable(turns)

        def without(count: int) -> tuple[int, ...]:
            gone = {i for group in order[:count] for i in group}
            return prompt(_joined(turn for i, turn in enumerate(turns) if i not in gone))

        counts = range(1, len(order))  # all of them, when fewer do not do
        count = 1 + bisect_left(counts, True, key=lambda count: len(without(count)) + room <= limit)
        gone = Counter[str](turns[i].speaker for group in order[:count] for i in group)
        return without(count), dict(gone)

    def submit(self, prepared: PreparedTurn, listener: TurnListener) -> Ticket:
        """Generate a prepared turn; `listener` gets pieces of text and at last a UserTurn or a Failure.

        The listener is called from the engine's thread and must not block. Raises EngineBusyError, EngineError.
        """
        return _Tries(self, prepared, listener)

    @property
    def provenance(self) -> dict[str, Any]:
        """What every turn of this simulator was made with (contract 11)."""
        return {
            "model": self.lm.name,
            "model_fingerprint": self.lm.fingerprint,
            "basis": self.basis.fingerprint,
            "as": self.as_,
            "dtype": self.lm.dtype_name,
            "engine": type(self.engine).__name__,
            "versions": {name: version(name) for name in ("traitbasis", "transformers", "torch")},
        }

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close()

    def __enter__(self) -> UserSimulator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _events(self, prepared: PreparedTurn) -> Iterator[str | UserTurn]:
        queue: SimpleQueue[str | UserTurn | Failure] = SimpleQueue()
        ticket = self.submit(prepared, queue.put)
        try:
            while True:
                item = queue.get()
                if isinstance(item, Failure):
                    raise as_engine_error(item)
                yield item
                if isinstance(item, UserTurn):
                    return
        finally:
            ticket.cancel()  # nothing to cancel when it ended


class _Tries:
    """Generations of one user turn until the guards accept one or tries run out."""

    def __init__(self, simulator: UserSimulator, prepared: PreparedTurn, listener: TurnListener) -> None:
        self._engine = simulator.engine
        self._prepared = prepared
        self._listener = listener
        self._cancelled = False
        self._tries = 0
        self._rejected: Counter[str] = Counter()
        self._best: _Candidate | None = None
        self._ticket: Ticket | None = None
        self._next_try()

    def cancel(self) -> None:
        self._cancelled = True
        if self._ticket:
            self._ticket.cancel()

    def _next_try(self) -> None:
        request = self._prepared.request
        if self._tries:
            seed = _digest_seed([request.seed, self._tries])
            hotter = max(request.sampling.temperature, _RETRY_TEMPERATURE)
            request = replace(request, seed=seed, sampling=replace(request.sampling, temperature=hotter))
        self._tries += 1
        self._request = request
        number = self._tries
        self._collector = Collector()
        self._live = LiveText() if not self._prepared.guards and not self._prepared.read else None
        ticket = self._engine.submit(request, self._on_event)
        if number == self._tries:  # else it has ended already, and the next try has set its own
            self._ticket = ticket
            if self._cancelled:  # while this try was being queued
                ticket.cancel()

    def _on_event(self, event: Event | Failure) -> None:
        if isinstance(event, Failure):
            self._listener(event)
            return
        if self._live and (piece := event.text if self._prepared.verbatim else self._live.push(event.text)):
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
        self._deliver(self._best or found)

    def _judge(self, generation: Generation) -> _Candidate:
        """The turn that a generation is, or may be sent as when no better one comes."""
        guards, conversation = self._prepared.guards, self._prepared.conversation
        text = generation.text if self._prepared.verbatim else generation.text.strip()
        found = _Candidate(generation, self._request, text)
        if self._prepared.read:
            try:
                reply = self._prepared.read(found.text)
            except ToolCallError:
                return replace(found, text=SILENCE, failed="tool_call")
            if reply.calls:
                if any(_same_call(call, made) for call in reply.calls for made in _calls_since_agent(conversation)):
                    return replace(found, text=SILENCE, failed="repeated_call")
                calls = name_calls(reply.calls, self._request.seed)
                if reply.text.strip():  # text or a call, never both
                    return replace(found, text="", calls=calls, failed="mixed_call", harm=0)
                return replace(found, text="", calls=calls)
            found = replace(found, text=reply.text.strip())
        guard = failed_guard(found.text, guards, conversation)
        if guard is None:
            return found
        text = guard.last_resort(found.text, conversation).strip() if guard.last_resort else found.text
        if not guard.sendable or not text:
            return replace(found, text=SILENCE, failed=guard.name)
        return replace(found, text=text, failed=guard.name, harm=len(guards) - guards.index(guard))

    def _deliver(self, found: _Candidate) -> None:
        if not self._live:
            for piece in re.findall(r"\s*\S+", found.text):
                self._listener(piece)
        prepared, generation = self._prepared, found.generation
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
                token_ids=generation.token_ids,
                logprobs=generation.logprobs,
                calls=found.calls,
                user=prepared.user,
                plain=prepared.plain,
                as_=prepared.as_,
                dropped=prepared.dropped,
                prompt_logprobs=generation.prompt_logprobs or (),
            )
        )


_UNSENDABLE = 10**6


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


def _changed(sampling: Sampling, changes: Mapping[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    for name in changes:
        if name not in known:
            raise RequestError(f"unknown sampling field {name!r}; known: {', '.join(known)}")
    return replace(sampling, **changes)


def _schema(response_format: Mapping[str, Any] | None) -> tuple[Mapping[str, Any] | None, bool]:
    """JSON schema of the reply (None: any object), and whether it must be JSON at all."""
    kind = (response_format or {}).get("type", "text")
    if response_format is None or kind == "text":
        return None, False
    if kind == "json_object":
        return None, True
    if kind != "json_schema":
        raise RequestError(f"response_format.type is {kind!r}; known: text, json_object, json_schema")
    inner = response_format.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestError("response_format.json_schema must be an object whose `schema` is a JSON schema")
    return schema, True


def _instructed(turns: list[Turn], user: ServedUser) -> list[Turn]:
    """The conversation under its instruction, or the default one, with the user's persona."""
    first, rest = (turns[0].text, turns[1:]) if turns and turns[0].speaker == "system" else (DEFAULT_INSTRUCTION, turns)
    return [Turn("system", f"{first}\n\n{user.about}" if user.about else first), *rest]


def _conversation(turns: Sequence[Turn], user: ServedUser) -> Conversation:
    system = "\n".join(turn.text for turn in turns if turn.speaker == "system")
    tokens = named_stop_tokens(system) if user.stop_tokens is None else tuple(user.stop_tokens)
    return Conversation(tuple(turns), tokens)


def _droppable(turns: Sequence[Turn]) -> list[list[int]]:
    """Turns that may be left out, in the order in which they go; a tool's results go with the call."""
    groups: list[list[int]] = []
    for i, turn in enumerate(turns[:-1]):
        if turn.speaker == "tool" and groups:
            groups[-1].append(i)
        elif turn.speaker != "system":
            groups.append([i])
    if groups and turns[-1].speaker == "tool":
        groups.pop()  # the call that the last turn answers
    return sorted(groups, key=lambda group: turns[group[0]].speaker != "agent")


def _joined(turns: Iterable[Turn]) -> list[Turn]:
    """Neighbours of one speaker as one turn, as in a conversation that was read so."""
    joined: list[Turn] = []
    for turn in turns:
        last = joined[-1] if joined else None
        if last and last.speaker == turn.speaker != "tool" and not last.calls and not turn.calls:
            joined[-1] = replace(last, text=f"{last.text}\n\n{turn.text}")
        else:
            joined.append(turn)
    return joined


def _calls_since_agent(conversation: Conversation) -> Iterator[ToolCall]:
    """The customer's calls since the agent last spoke."""
    for turn in reversed(conversation.turns):
        if turn.speaker == "agent":
            return
        yield from turn.calls


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and one.arguments == other.arguments


def _digest_seed(what: Any) -> int:
    """A seed below 2**63 from any JSON value."""
    digest = hashlib.sha256(json.dumps(what, sort_keys=True, ensure_ascii=True, default=list).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
