"""The engine protocol: what the simulator and the server know about whatever generates tokens.

A request is token ids and numbers, no text roles and no traits: prompt ids, what to add to which layer, sampling, seed.
The answer is a stream of events, delivered by callback from the engine's own thread. An engine keeps nothing of a
request after its last event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Literal, Protocol

from torch import Tensor

from traitbasis.chat import check_characters, check_choice
from traitbasis.errors import EngineError, RequestError, TraitBasisError

Finish = Literal["stop", "length", "cancelled"]
Positions = Literal["generated", "all"]

# Every stop string is looked for at every step, in the thread that serves everybody.
_MAX_STOPS, _MAX_STOP_LENGTH = 16, 256
# Tokens beyond max_tokens in which a guided reply may be brought to its end.
WRAP_UP_TOKENS = 256

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 10**9),
    "min_p": (0, 1),
    "repetition_penalty": (0, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "max_tokens": (1, 10**6),
    "logprobs": (0, 100),
}
_WHOLE = ("top_k", "max_tokens", "logprobs")
_MAX_BIAS = 100.0


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in the order of the fields' effect: penalties and bias, temperature, top_k, top_p, min_p.

    temperature: 0 (below 1e-5) is greedy. top_p 1, top_k 0, min_p 0 and repetition_penalty 1 are off.
    repetition_penalty: over the prompt and what was generated, as in transformers. presence_penalty and
    frequency_penalty: subtracted once, and per occurrence, from tokens that were generated, as OpenAI defines them.
    logit_bias: added to the logits of token ids. logprobs: report each token's log-probability and that of the so many
    most likely ones (0: only the token's own), by the model's own distribution, before any of the above; None is off.

    Raises RequestError for a value out of range.
    """

    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    max_tokens: int = 96
    stop: tuple[str, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _RANGES.items():
            value, whole = getattr(self, name), name in _WHOLE
            if name == "logprobs" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise RequestError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
            if not low <= value <= high:  # also false for nan
                raise RequestError(f"{name} is {value}; it must be between {low} and {high}")
        for name in ("top_p", "repetition_penalty"):
            if getattr(self, name) == 0:
                raise RequestError(f"{name} is 0; it must be above 0")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r}")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))  # the caller's may change meanwhile
        for token, bias in self.logit_bias.items():
            if type(token) is not int or token < 0:
                raise RequestError(f"logit_bias has {token!r}, which is no token id")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not abs(bias) <= _MAX_BIAS:
                raise RequestError(f"logit_bias of token {token} is {bias!r}; it must be within ±{_MAX_BIAS:g}")
        if not isinstance(self.stop, tuple | list) or any(not isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be a tuple of strings, not {self.stop!r}")
        if any(not text for text in self.stop):
            raise RequestError("stop contains an empty string")
        if len(self.stop) > _MAX_STOPS or any(len(text) > _MAX_STOP_LENGTH for text in self.stop):
            raise RequestError(f"stop takes at most {_MAX_STOPS} strings of at most {_MAX_STOP_LENGTH} characters")
        check_characters("stop", *self.stop)


class Guide(Protocol):
    """Decides, token by token, what a reply may be. One per generation, called from the engine's thread.

    For each token the engine asks ``allowed``, draws, and tells ``take``; then it looks at ``done`` and ``silent``.
    Whatever a guide raises fails its own request and no other.
    """

    @property
    def silent(self) -> bool:
        """Whether additions are off from here on (contract 10): the token taken last is read unsteered, and with it
        everything drawn later. True from the start means unsteered, prompt and all. Never goes back."""

    @property
    def done(self) -> bool:
        """Whether the reply is complete; it ends here, with finish "stop"."""

    def allowed(self) -> Tensor | None:
        """Tokens that may come next: bool ``(tokens,)`` on any device, ids beyond its end may not; None: any.

        Stop ids are treated like all others: a reply ends with one only where it is allowed.
        """

    def take(self, token: int) -> None:
        """A token was drawn, and it is no stop id of the request."""

    def wrap_up(self) -> bool:
        """max_tokens is reached: may the reply go on, so that it ends whole?

        If so, the guide prefers from here on what ends it, and the engine goes on until ``done``, for at most
        WRAP_UP_TOKENS and never beyond the context. finish is "length" all the same.
        """


@dataclass(frozen=True, eq=False)
class Request:
    """One generation.

    prompt_ids: the rendered prompt. additions: float32 ``(d_model,)`` by layer, added at every steered position; empty
    means unsteered. stop_ids: tokens that end the turn. positions: ``generated`` steers the positions that produce
    tokens, from the last prompt position on (contract 4); ``all`` steers the prompt too, the paper's plain form.
    guide: makes the Guide of a generation, a fresh one each time. shown_ids: special tokens whose text is part of the
    reply, such as one that begins a tool call; other special tokens leave no text. prompt_logprobs: report the
    log-probability of each token of the prompt and those of the so many most likely ones at its place (0: only the
    token's own), given what stands before it, by the model that reads the prompt: unsteered, unless positions is
    ``all``.
    """

    prompt_ids: tuple[int, ...]
    seed: int
    sampling: Sampling
    stop_ids: frozenset[int]
    additions: Mapping[int, Tensor] = field(default_factory=dict)
    positions: Positions = "generated"
    guide: Callable[[], Guide] | None = None
    shown_ids: frozenset[int] = frozenset()
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        check_choice("positions", self.positions, Positions)
        for name in ("stop_ids", "shown_ids"):
            if not isinstance(ids := getattr(self, name), set | frozenset):
                raise RequestError(f"{name} must be a set of token ids, not {ids!r}")
        if not isinstance(self.additions, Mapping):
            raise RequestError(f"additions must map layers to tensors, not {type(self.additions).__name__}")
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise RequestError(f"seed is {self.seed!r}; it must be a whole number from 0 to {2**63 - 1}")
        if self.guide is not None and not callable(self.guide):
            raise RequestError(f"guide must be a function that makes one, not {self.guide!r}")
        low, high = _RANGES["logprobs"]
        if (count := self.prompt_logprobs) is not None and not (type(count) is int and low <= count <= high):
            raise RequestError(f"prompt_logprobs is {count!r}; it must be a whole number from {low:g} to {high:g}")


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of a token, and the most likely tokens at its place, likeliest first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Event:
    """One step of a generation: its token, the text that became final with it, and at the end why it ended.

    token_id is None when the event carries no token (held-back text at the end, a cancellation). logprob is set when
    the request asked for it. prompt_logprobs: one a token of the prompt, None for the first; with the first generated
    token, when the request asked for them.
    """

    token_id: int | None
    text: str
    finish: Finish | None = None
    logprob: TokenLogprob | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True)
class Failure:
    """The generation ended without a result."""

    error: Exception


def as_engine_error(failure: Failure) -> TraitBasisError:
    """The failure's error when it is one of ours, else an EngineError caused by it."""
    if isinstance(failure.error, TraitBasisError):
        return failure.error
    error = EngineError(f"{type(failure.error).__name__}: {failure.error}")
    error.__cause__ = failure.error
    return error


Listener = Callable[[Event | Failure], None]


class Ticket(Protocol):
    """A submitted generation."""

    def cancel(self) -> None:
        """Stop within one step; the listener then gets an event with finish "cancelled"."""


@dataclass(frozen=True)
class EngineStats:
    """What an engine can take, what it is doing, and what it has done since it started.

    max_context: tokens of prompt and reply together, None when nothing limits them. prompt_tokens: of requests that
    were started; cached_tokens of them came from the prefix cache and were not computed. generated_tokens: drawn;
    steered_tokens of them under additions. steps: decode steps, each one forward for all running requests.
    slot_bytes: of running requests' keys and values. cache_bytes, cache_limit, cache_evictions: of the prefix cache,
    evictions in blocks. closed: it takes no more requests.
    """

    max_batch: int
    max_queue: int
    max_context: int | None
    running: int = 0
    waiting: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steered_tokens: int = 0
    slot_bytes: int = 0
    cache_bytes: int = 0
    cache_limit: int = 0
    cache_evictions: int = 0
    closed: bool = False


class Engine(Protocol):
    """Generates tokens for many requests."""

    def submit(self, request: Request, listener: Listener, *, again: bool = False) -> Ticket:
        """Queue a request. `listener` is called from the engine's thread and must not block.

        again: another draw in the place of one that has just ended. It goes before those who wait, and is not refused
        for want of room: who was let in is served.

        Raises RequestError when the request cannot run on this model, EngineBusyError when the queue is full,
        EngineClosedError when the engine is closed.
        """

    def stats(self) -> EngineStats:
        """Capacity, load and counts; may be called from any thread."""

    def close(self) -> None:
        """Finish nothing more: running and waiting requests fail, the thread ends."""


@dataclass(frozen=True)
class Generation:
    """A finished generation.

    logprobs: one a token, where the request asked for them, else empty. prompt_logprobs: as in ``Event``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


class Collector:
    """Puts a request's events together into a Generation."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None

    def add(self, event: Event) -> Generation | None:
        """The finished generation with its last event, else None."""
        self._text.append(event.text)
        if event.token_id is not None:
            self._token_ids.append(event.token_id)
        if event.logprob is not None:
            self._logprobs.append(event.logprob)
        if event.prompt_logprobs is not None:
            self._prompt_logprobs = event.prompt_logprobs
        if not event.finish:
            return None
        text, tokens, logprobs = "".join(self._text), tuple(self._token_ids), tuple(self._logprobs)
        return Generation(text, tokens, event.finish, logprobs, self._prompt_logprobs)


def generate(engine: Engine, request: Request) -> Generation:
    """Submit and wait. Raises what the engine reports."""
    events: SimpleQueue[Event | Failure] = SimpleQueue()
    ticket = engine.submit(request, events.put)
    collector = Collector()
    try:
        while True:
            event = events.get()
            if isinstance(event, Failure):
                raise as_engine_error(event)
            if done := collector.add(event):
                return done
    except BaseException:
        ticket.cancel()
        raise


def generate_all(
    engine: Engine, requests: Sequence[Request], holding: AbstractContextManager[object] | None = None
) -> list[Generation]:
    """Submit all requests and wait for all; generations in the order of the requests. Raises what the engine reports.

    holding: a context to submit them in, such as an engine's ``hold()``."""
    events: SimpleQueue[tuple[int, Event | Failure]] = SimpleQueue()
    collectors, done = [Collector() for _ in requests], dict[int, Generation]()
    tickets: list[Ticket] = []
    try:
        with holding or nullcontext():
            for i, request in enumerate(requests):
                tickets.append(engine.submit(request, lambda event, i=i: events.put((i, event))))  # type: ignore[misc]
        while len(done) < len(requests):
            i, event = events.get()
            if isinstance(event, Failure):
                raise as_engine_error(event)
            if generation := collectors[i].add(event):
                done[i] = generation
    except BaseException:
        for ticket in tickets:
            ticket.cancel()
        raise
    return [done[i] for i in range(len(requests))]
