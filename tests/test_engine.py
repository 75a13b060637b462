"""The embedded engine under load: rows are alone, ends are final, queues are bounded, nothing outlives its turn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from reference import (
    Gate,
    Listener,
    decode_without_cache,
    greedy,
    hook_count,
    prompt_of,
    push,
    run_together,
    watching,
)
from tiny import WIDTH, tiny_model
from torch import nn

from traitbasis.chat import TokenizedReply
from traitbasis.engines.base import EngineStats, Event, Failure, Generation, Request, Sampling, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineBusyError, EngineError, RequestError
from traitbasis.extract import read_states
from traitbasis.model import LanguageModel

STRONG = 30.0
ENDLESS: dict[str, Any] = {"stop_ids": frozenset()}  # ends by max_tokens only


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model("mistral")


@pytest.fixture
def engine(lm: LanguageModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(lm)
    yield engine
    engine.close()


def reference(lm: LanguageModel, request: Request) -> tuple[int, ...]:
    first = 0 if request.positions == "all" else len(request.prompt_ids) - 1
    tokens = decode_without_cache(
        lm.model, lm.layers, request.prompt_ids, request.additions, request.sampling.max_tokens, first
    )
    return tuple(tokens)


# --- rows are alone ---


def test_sixteen_concurrent_requests_each_get_their_own_steering(lm: LanguageModel, engine: TransformersEngine) -> None:
    """Contract 3, fault 34: +c, -c and none in turn, from sixteen threads at once, on one prompt."""
    doses = [push(2, STRONG), push(2, -STRONG), {}]
    requests = [greedy(prompt_of(21), 14, additions=doses[i % 3]) for i in range(16)]
    expected = [reference(lm, request) for request in requests[:3]]
    assert len(set(expected)) == 3
    start = threading.Barrier(16)

    def ask(request: Request) -> Generation:
        start.wait()
        return generate(engine, request)

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(ask, requests))
    assert [answer.token_ids for answer in answers] == [expected[i % 3] for i in range(16)]


def test_an_unsteered_turn_after_a_steered_one_is_a_cold_one(lm: LanguageModel, engine: TransformersEngine) -> None:
    """Contract 4, fault 30: same conversation, c = 2 and then c = 0."""
    steered = greedy(prompt_of(33), 16, additions={2: 2 * push(2, STRONG)[2]})
    plain = replace(steered, additions={})
    cold = reference(lm, plain)
    assert generate(engine, steered).token_ids == reference(lm, steered) != cold
    assert generate(engine, plain).token_ids == cold


def test_both_kinds_of_positions_in_one_queue(lm: LanguageModel, engine: TransformersEngine) -> None:
    """They cannot share a prefill; each gets its own all the same."""
    kinds = ["generated", "all", "all", "generated", "all"]
    requests = [greedy(prompt_of(18), 8, additions=push(1, STRONG), positions=kind) for kind in kinds]
    found = [generation.token_ids for generation in run_together(engine, requests)]
    assert found == [reference(lm, request) for request in requests]
    assert found[0] != found[1]


def test_no_more_rows_run_together_than_allowed(lm: LanguageModel) -> None:
    engine, sizes = TransformersEngine(lm, max_batch=3), []
    requests = [greedy(prompt_of(8, seed), 4, **ENDLESS) for seed in range(7)]
    with watching(lm.layers[0], lambda hidden: sizes.append(len(hidden))):
        assert len(run_together(engine, requests)) == 7
    engine.close()
    assert max(sizes) == 3


@pytest.mark.parametrize("raises_at", [1, 2, 5])
def test_a_listener_that_raises_does_not_hurt_its_batchmates(
    lm: LanguageModel, engine: TransformersEngine, raises_at: int
) -> None:
    """Its row ends; the others go on, and so does the engine."""

    def react(count: int) -> None:
        if count >= raises_at:
            raise ConnectionError("gone")

    requests = [greedy(prompt_of(length), 12, **ENDLESS) for length in (9, 20, 14)]
    listeners = [Listener(), Listener(react), Listener()]
    with Gate(engine):
        for request, listener in zip(requests, listeners, strict=True):
            engine.submit(request, listener)
    for i in (0, 2):
        assert listeners[i].generation().token_ids == reference(lm, requests[i])
    assert len(listeners[1].wait()) == raises_at + 1
    assert listeners[1].generation().finish == "cancelled"
    assert generate(engine, requests[1]).token_ids == reference(lm, requests[1])


# --- how a generation ends ---


def test_a_stop_id_ends_the_text_before_it(lm: LanguageModel, engine: TransformersEngine) -> None:
    request = greedy(prompt_of(9), 20, **ENDLESS)
    tokens = reference(lm, request)
    stop = next(token for token in tokens[5:] if token > 2)
    end = tokens.index(stop) + 1
    found = generate(engine, replace(request, stop_ids=frozenset({stop, 271_000})))
    assert found.token_ids == tokens[:end]
    assert found.finish == "stop"
    assert found.text == lm.tokenizer.decode(tokens[: end - 1], skip_special_tokens=True)


def test_max_tokens_ends_with_length_and_the_whole_text(lm: LanguageModel, engine: TransformersEngine) -> None:
    """Also what was held back as the possible beginning of a stop string."""
    free = generate(engine, greedy(prompt_of(9), 12, **ENDLESS))
    assert len(free.token_ids) == 12
    assert free.finish == "length"
    assert free.text == lm.tokenizer.decode(free.token_ids, skip_special_tokens=True)
    sampling = Sampling(temperature=0, max_tokens=12, stop=(free.text[-1] + "never there",))
    assert generate(engine, Request(prompt_of(9), 0, sampling, frozenset())) == free


@pytest.mark.parametrize("room", [1, 3])
def test_a_reply_that_reaches_the_end_of_the_context_ends_with_length(room: int) -> None:
    lm = tiny_model("llama")
    lm.model.config.max_position_embeddings = 32
    engine = TransformersEngine(lm)
    try:
        found = generate(engine, greedy(prompt_of(32 - room), 20, **ENDLESS))
        assert (len(found.token_ids), found.finish) == (room, "length")
        with pytest.raises(RequestError, match="33 tokens; the context of tiny-llama is 32") as caught:
            engine.submit(greedy(prompt_of(33)), Listener())
        assert caught.value.code == "context_length_exceeded"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"prompt_ids": ()}, "empty"),
        ({"additions": {4: torch.ones(WIDTH)}}, "layer 4 does not exist; layers are 0 to 3"),
        ({"additions": {-1: torch.ones(WIDTH)}}, "layer -1 does not exist"),
        ({"additions": {1: torch.ones(WIDTH + 1)}}, r"layer 1 .*\(33,\).*\(32,\)"),
        ({"additions": {1: torch.ones(2, WIDTH)}}, r"layer 1 .*\(2, 32\)"),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_it_joins_a_batch(
    engine: TransformersEngine, wrong: dict[str, Any], reason: str
) -> None:
    """Contract 3: otherwise its batchmates would fail with it."""
    with pytest.raises(RequestError, match=reason):
        engine.submit(replace(greedy((5, 6, 7)), **wrong), Listener())


def test_no_event_follows_the_last_one(lm: LanguageModel, engine: TransformersEngine) -> None:
    """A row that has finished hears nothing of its batchmates' failure, of a late cancel, or of the end."""
    forwards = 0

    def fail_in_the_fifth(module: nn.Module, arguments: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 5:
            raise RuntimeError("out of memory")

    hooks = hook_count(lm.model)
    done, broken = Listener(), Listener()
    with Gate(engine):
        ticket = engine.submit(greedy(prompt_of(9), 2, **ENDLESS), done)
        engine.submit(greedy(prompt_of(9), 20, additions=push(1, 1.0), **ENDLESS), broken)
        handle = lm.layers[2].register_forward_pre_hook(fail_in_the_fifth)
    *before, last = broken.wait()
    handle.remove()
    ticket.cancel()
    assert generate(engine, greedy(prompt_of(9), 3, **ENDLESS)).finish == "length"
    engine.close()
    assert [type(event) for event in before] == [Event] * 3
    assert isinstance(last, Failure) and "out of memory" in str(last.error)
    assert len(broken.events) == 4
    assert [getattr(event, "finish", "failed") for event in done.events] == [None, "length"]
    assert hook_count(lm.model) == hooks


# --- cancelling ---


def test_a_cancelled_row_ends_within_a_step_and_leaves_its_batchmates_alone(
    lm: LanguageModel, engine: TransformersEngine
) -> None:
    requests = [greedy(prompt_of(length), 12, **ENDLESS) for length in (9, 20)]
    tickets: list[Any] = []
    cancelled, mate = Listener(lambda count: tickets[0].cancel() if count == 4 else None), Listener()
    with Gate(engine):
        tickets = [engine.submit(requests[0], cancelled), engine.submit(requests[1], mate)]
    found = cancelled.generation()
    assert found.finish == "cancelled"
    assert found.token_ids == reference(lm, requests[0])[:4]
    assert found.text == lm.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    assert mate.generation().token_ids == reference(lm, requests[1])


def test_a_waiting_request_is_cancelled_within_a_step_and_frees_its_place(lm: LanguageModel) -> None:
    """It does not have to wait for the batch before it to end."""
    engine = TransformersEngine(lm, max_batch=1, max_queue=2)
    request, later = greedy(prompt_of(9), 12, **ENDLESS), [Listener(), Listener()]
    heard: list[Event | Failure] = []

    def react(count: int) -> None:
        if count == 2:
            ticket.cancel()
        if count == 4:
            heard.extend(waiting.events)
            for listener in later:
                engine.submit(request, listener)

    running, waiting = Listener(react), Listener()
    with Gate(engine):
        engine.submit(request, running)
        ticket = engine.submit(request, waiting)
    assert [listener.generation().finish for listener in (running, *later)] == ["length"] * 3
    assert heard == waiting.events == [Event(None, "", "cancelled")]
    engine.close()


def test_a_request_cancelled_before_it_starts_never_runs(engine: TransformersEngine) -> None:
    listener = Listener()
    lengths: list[int] = []
    with Gate(engine), watching(engine._lm.layers[0], lambda hidden: lengths.append(hidden.shape[1])):
        engine.submit(greedy(prompt_of(9)), listener).cancel()
    assert listener.generation() == Generation("", (), "cancelled")
    assert 8 not in lengths, "its prompt was read"
    assert len(listener.events) == 1


def test_two_engines_and_an_extraction_share_one_model_and_nothing_else(lm: LanguageModel) -> None:
    """Contracts 2, 3 and 6, fault 34: hooks act only in the thread that entered the context."""
    strong, plain = greedy(prompt_of(12), 12, additions=push(1, 8.0)), greedy(prompt_of(12), 12)
    expected = [
        decode_without_cache(lm.model, lm.layers, request.prompt_ids, request.additions, 12, 11)
        for request in (strong, plain)
    ]
    reply = TokenizedReply(tuple(prompt_of(30, seed=5)), (7, 8, 9))
    states = read_states(lm, [reply]).means
    engines = [TransformersEngine(lm), TransformersEngine(lm)]

    def repeat(call: Callable[[], Any]) -> list[Any]:
        return [call() for _ in range(15)]

    with ThreadPoolExecutor(3) as pool:
        replies = [
            pool.submit(repeat, partial(generate, engine, request))
            for engine, request in zip(engines, (strong, plain), strict=True)
        ]
        means = pool.submit(repeat, lambda: read_states(lm, [reply]).means).result()
        for future, tokens in zip(replies, expected, strict=True):
            assert [generation.token_ids for generation in future.result()] == [tuple(tokens)] * 15
    assert all(torch.equal(mean, states) for mean in means)
    for engine in engines:
        engine.close()


# --- queue and closing ---


def test_a_full_queue_refuses_and_recovers(lm: LanguageModel) -> None:
    engine, request = TransformersEngine(lm, max_queue=2), greedy(prompt_of(9), 2, **ENDLESS)
    listeners = [Listener(), Listener()]
    with Gate(engine):
        for listener in listeners:
            engine.submit(request, listener)
        with pytest.raises(EngineBusyError, match="2 requests are waiting"):
            engine.submit(request, Listener())
    assert [listener.generation().finish for listener in listeners] == ["length", "length"]
    assert generate(engine, request).finish == "length"
    engine.close()


def test_closing_fails_what_runs_and_what_waits_and_refuses_what_comes(lm: LanguageModel) -> None:
    """Contract 6: within a step, every listener hears of it once, the thread is gone and so are the hooks."""
    hooks, started = hook_count(lm.model), threading.Event()
    engine = TransformersEngine(lm, max_batch=1)
    running, waiting = Listener(lambda count: started.set()), [Listener(), Listener()]
    engine.submit(greedy(prompt_of(9), 2000, additions=push(1, 1.0), **ENDLESS), running)
    for listener in waiting:
        engine.submit(greedy(prompt_of(9), 2000, **ENDLESS), listener)
    assert started.wait(30)
    engine.close()
    engine.close()
    for listener in (running, *waiting):
        *_, last = listener.wait()
        assert isinstance(last, Failure) and isinstance(last.error, EngineError)
        assert sum(isinstance(event, Failure) for event in listener.events) == 1
    assert len(running.events) < 2000
    with pytest.raises(EngineError, match="closed"):
        engine.submit(greedy((5, 6)), Listener())
    assert hook_count(lm.model) == hooks
    assert not [thread for thread in threading.enumerate() if thread is engine._thread]


class Script:
    """An engine that answers with fixed events."""

    def __init__(self, *events: Event | Failure | BaseException) -> None:
        self.events = events
        self.cancelled = False

    def submit(self, request: Request, listener: Any, *, again: bool = False) -> Script:
        for event in self.events:
            listener(event)
        return self

    def cancel(self) -> None:
        self.cancelled = True

    def stats(self) -> EngineStats:
        return EngineStats(max_batch=1, max_queue=1, max_context=None)

    def close(self) -> None:
        pass


def test_generate_puts_the_events_together() -> None:
    """Held-back text comes without a token."""
    script = Script(Event(7, "Hel"), Event(8, ""), Event(9, "lo"), Event(None, "!", "cancelled"))
    assert generate(script, greedy((5,))) == Generation("Hello!", (7, 8, 9), "cancelled")


@pytest.mark.parametrize("error", [EngineError("closed"), RuntimeError("out of memory"), KeyError("out of memory")])
def test_generate_raises_an_engine_error_for_any_failure(error: Exception) -> None:
    script = Script(Event(7, "Hel"), Failure(error))
    with pytest.raises(EngineError, match=r"closed|out of memory"):
        generate(script, greedy((5,)))
    assert script.cancelled
