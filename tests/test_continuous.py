"""Continuous batching: whoever comes, goes, is steered or fails meanwhile, a row is what it is alone."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from reference import (
    END,
    Gate,
    Listener,
    block_outputs,
    blocks_of,
    decode_without_cache,
    greedy,
    hook_count,
    prompt_of,
    push,
    run_together,
    watching,
)
from tiny import CONFIGS, LAYERS, VOCABULARY, WIDTH, tiny_model
from torch import Tensor, nn
from transformers import Cache

from traitbasis.engines.base import Event, Failure, Generation, Request, Sampling, Ticket, generate
from traitbasis.engines.transformers import TransformersEngine, why_not_continuous
from traitbasis.errors import EngineError, RequestError
from traitbasis.model import LanguageModel

SLOTS = ("llama", "qwen2", "qwen3", "gpt2")
MICRO_BATCHES = ("mistral", "gemma2")
STRONG = 30.0
BLOCK = 32  # tokens of a cached block
BLOCK_BYTES = BLOCK * LAYERS * 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 float32; gpt2's are twice as large
CACHES = (2 * BLOCK_BYTES, 2**24, 0)  # always full, large, off

tiny_lm = cache(tiny_model)


@pytest.fixture
def lm() -> LanguageModel:
    return tiny_lm("llama")


@contextmanager
def running(lm: LanguageModel, **options: Any) -> Iterator[TransformersEngine]:
    """An engine that is closed at the end, and then leaves no hook (contract 6)."""
    hooks = hook_count(lm.model)
    engine = TransformersEngine(lm, **options)
    try:
        yield engine
    finally:
        engine.close()
    assert hook_count(lm.model) == hooks
    assert engine.stats().running == engine.stats().waiting == 0


def alone(lm: LanguageModel, request: Request) -> Generation:
    """What a cold engine that serves nobody else says."""
    with running(lm, max_batch=1, prefix_cache_bytes=0) as engine:
        return generate(engine, request)


def by_full_forwards(lm: LanguageModel, request: Request) -> tuple[int, ...]:
    """A greedy request's tokens without the engine; its stop ids are its own, END is nothing special."""
    prompt, n = request.prompt_ids, request.sampling.max_tokens
    first = 0 if request.positions == "all" else len(prompt) - 1
    tokens: list[int] = []
    while len(tokens) < n and not request.stop_ids & {*tokens}:
        so_far = (*prompt, *tokens)
        tokens += decode_without_cache(lm.model, blocks_of(lm.model), so_far, request.additions, n - len(tokens), first)
    ends = [i for i, token in enumerate(tokens, 1) if token in request.stop_ids]
    return tuple(tokens[: min(ends, default=n)])


def endless(prompt: Sequence[int], max_tokens: int, **request: Any) -> Request:
    """Greedy, ends by max_tokens only."""
    return greedy(prompt, max_tokens, stop_ids=frozenset(), **request)


def ended(listener: Listener) -> bool:
    return any(isinstance(event, Failure) or event.finish for event in listener.events)


# --- any schedule: rows are alone (contracts 3 and 9) ---


@dataclass(frozen=True)
class Plan:
    """One request of a schedule. `after` and `cancelled`: (i, k), at request i's k-th event, or its last if it has
    fewer. Requests without `after` are there from the start."""

    request: Request
    after: tuple[int, int] | None = None
    cancelled: tuple[int, int] | None = None


def play(engine: TransformersEngine, plans: Sequence[Plan]) -> list[Generation]:
    """Run a schedule; everything is submitted and cancelled from listeners, so it is the same every time."""
    tickets: dict[int, Ticket] = {}
    listeners: list[Listener] = []

    def start(i: int) -> None:
        tickets[i] = engine.submit(plans[i].request, listeners[i])

    def reaction_of(i: int) -> Callable[[int], None]:
        def due(when: tuple[int, int] | None, count: int) -> bool:
            return when is not None and when[0] == i and (count >= when[1] or ended(listeners[i]))

        def react(count: int) -> None:
            for j, plan in enumerate(plans):
                if due(plan.after, count) and j not in tickets:
                    start(j)
            for j, plan in enumerate(plans):
                if plan.cancelled == (i, count) and j in tickets:
                    tickets[j].cancel()

        return react

    listeners += [Listener(reaction_of(i)) for i in range(len(plans))]
    with Gate(engine):
        for i, plan in enumerate(plans):
            if plan.after is None:
                start(i)
    return [listener.generation() for listener in listeners]


BASES = [prompt_of(140, seed=seed) for seed in range(2)]  # the prompts' beginnings: 0 to 4 blocks are shared
FILTERS: dict[str, list[Any]] = {
    "top_p": [0.3, 0.9],
    "top_k": [1, 4, 50],
    "min_p": [0.05, 0.5],
    "repetition_penalty": [0.8, 1.3, 2.0],
    "presence_penalty": [-1.0, 4.0],
    "frequency_penalty": [-0.5, 3.0],
    "logit_bias": [{END: 9.0, 20: 9.0, 30: 9.0}, {7: -100.0, 8: 12.0}],
}


def some_request(rng: np.random.Generator) -> Request:
    prompt = (*BASES[rng.integers(2)][: int(140 * rng.random() ** 0.5)], *prompt_of(int(rng.integers(1, 11)), 9))
    additions: dict[int, Tensor] = {}
    for z in rng.permutation(LAYERS)[: rng.integers(3)].tolist():
        additions |= push(z, float(rng.choice([0.0, 3.0, 30.0, -30.0, 100.0])))
    sampling: dict[str, Any] = {"temperature": 0, "max_tokens": int(rng.integers(1, 15))}
    if rng.random() < 0.6:
        sampling["temperature"] = float(rng.choice([0, 0.7, 1.0, 2.5]))
        for name in rng.permutation(list(FILTERS))[: rng.integers(4)].tolist():
            sampling[name] = FILTERS[name][rng.integers(len(FILTERS[name]))]
    positions = "all" if rng.random() < 0.2 else "generated"
    stop_ids = frozenset({END, *(range(100, 150) if rng.random() < 0.4 else ())})
    return Request(prompt, int(rng.integers(2**32)), Sampling(**sampling), stop_ids, additions, positions)


def some_schedule(rng: np.random.Generator) -> list[Plan]:
    plans = []
    for i in range(rng.integers(2, 11)):
        after = (int(rng.integers(i)), int(rng.integers(1, 9))) if i and rng.random() < 0.6 else None
        mind = rng.random()  # cancelled by its own listener, by another's, or not at all
        by = i if mind < 0.2 else int(rng.integers(5)) if mind < 0.4 else None
        plans.append(Plan(some_request(rng), after, None if by is None else (by, int(rng.integers(1, 7)))))
    return plans


def hold_for_any_schedule(architecture: str, schedules: int, happens: set[str]) -> None:
    """Each row is compared; fails also when too little was: too many near ties, or something that never happened."""
    lm, compared = tiny_lm(architecture), Counter[str]()
    for number in range(schedules):
        rng = np.random.default_rng([number, list(CONFIGS).index(architecture)])
        plans = some_schedule(rng)
        options = {"max_batch": int(rng.integers(1, 7)), "prefix_cache_bytes": CACHES[number % 3]}
        with running(lm, **options) as engine:
            found = play(engine, plans)
            compared["cached tokens"] += engine.stats().cached_tokens
            compared["evictions"] += engine.stats().cache_evictions
        for i, (plan, got) in enumerate(zip(plans, found, strict=True)):
            which = f"schedule {number} of {architecture}, request {i}: {plan}"
            expected = alone(lm, plan.request)
            if got.finish == "cancelled":
                assert plan.cancelled, which
                assert got.token_ids == expected.token_ids[: len(got.token_ids)], which
                assert got.text == lm.tokenizer.decode(got.token_ids, skip_special_tokens=True), which
            else:
                assert got == expected, which
            if plan.cancelled and plan.cancelled[0] == i and plan.cancelled[1] < len(expected.token_ids):
                assert (got.finish, len(got.token_ids)) == ("cancelled", plan.cancelled[1]), which
            compared[got.finish] += 1
            compared["late"] += plan.after is not None
            compared["steered"] += any(addition.any() for addition in plan.request.additions.values())
            if plan.request.sampling == Sampling(temperature=0, max_tokens=plan.request.sampling.max_tokens):
                try:
                    tokens = by_full_forwards(lm, plan.request)
                except AssertionError:
                    compared["near ties"] += 1
                    continue
                assert expected.token_ids == tokens, which
                compared["by full forwards"] += 1
    assert compared["near ties"] * 10 <= compared["by full forwards"], compared
    missing = [kind for kind in happens if compared[kind] < schedules / 5]
    assert not missing, (missing, compared)


HAPPENS = {"cancelled", "stop", "length", "steered", "late", "by full forwards"}


@pytest.mark.parametrize("architecture", SLOTS)
def test_in_any_schedule_a_row_in_slots_is_what_it_is_alone(architecture: str) -> None:
    """Contracts 3, 4, 6 and 9: whenever the others come, go and are cancelled, however they are steered and sampled,
    with a prefix cache that is off, always full or large. Greedy rows also against full forwards without a cache."""
    hold_for_any_schedule(architecture, 25, HAPPENS | {"cached tokens", "evictions"})


@pytest.mark.parametrize("architecture", MICRO_BATCHES)
def test_in_any_schedule_a_row_in_micro_batches_is_what_it_is_alone(architecture: str) -> None:
    """The same where nobody joins a running batch."""
    hold_for_any_schedule(architecture, 12, HAPPENS)


# --- joining a running batch ---


def noting(engine: TransformersEngine, steps: list[int], then: Callable[[int], None] = lambda count: None) -> Listener:
    """A listener that notes the engine's step of each event."""

    def react(count: int) -> None:
        steps.append(engine.stats().steps)
        then(count)

    return Listener(react)


@pytest.mark.parametrize("architecture", SLOTS)
@pytest.mark.parametrize("others", [1, 3, 5])
def test_a_newcomer_gets_its_first_token_after_at_most_one_more_step_of_the_others(
    architecture: str, others: int
) -> None:
    """And they lose none: each of them goes on with a token in every step."""
    lm = tiny_lm(architecture)
    newcomer = endless(prompt_of(61), 5, additions=push(1, STRONG))
    expected = by_full_forwards(lm, newcomer)
    steps: list[list[int]] = [[] for _ in range(others + 1)]
    arrived = 0
    with running(lm, max_batch=others + 1) as engine:

        def arrive(count: int) -> None:
            nonlocal arrived
            if count == 4:
                arrived = engine.stats().steps
                engine.submit(newcomer, late)

        late = noting(engine, steps[-1])
        before = [noting(engine, steps[0], arrive), *(noting(engine, steps[i]) for i in range(1, others))]
        with Gate(engine):
            for i, listener in enumerate(before):
                engine.submit(endless(prompt_of(10 + i), 12), listener)
        assert [len(listener.wait()) for listener in before] == [12] * others
        assert late.generation().token_ids == expected
    assert steps[-1] == [*range(arrived + 1, arrived + 6)]
    for i in range(others):
        assert steps[i] == [*range(steps[i][0], steps[i][0] + 12)]
        assert sum(arrived < step <= steps[-1][0] for step in steps[i]) == 1


def test_long_newcomers_hold_up_the_others_for_a_bounded_time(lm: LanguageModel) -> None:
    """Seven prompts of 200 tokens at once: between two steps, newcomers are let in until 512 tokens were read."""
    read: list[int] = []
    late = [Listener() for _ in range(7)]
    with (
        running(lm, max_batch=8, prefix_cache_bytes=0) as engine,
        watching(lm.layers[0], lambda h: read.append(len(h[0]))),
    ):

        def arrive(count: int) -> None:
            if count == 3:
                for seed, listener in enumerate(late):
                    engine.submit(endless(prompt_of(200, seed), 2), listener)

        first = Listener(arrive)
        engine.submit(endless(prompt_of(9), 30), first)
        assert [len(listener.wait()) for listener in (first, *late)] == [30] + [2] * 7
    between = [0]
    for tokens in read:
        if tokens == 1:
            between.append(0)
        else:
            between[-1] += tokens
    assert between[:7] == [8, 0, 0, 3 * 199, 3 * 199, 199, 0]


def test_a_request_for_a_full_batch_waits_and_enters_when_the_first_one_leaves(lm: LanguageModel) -> None:
    steps: dict[str, list[int]] = {"short": [], "long": [], "late": []}
    waiting: list[int] = []
    request = endless(prompt_of(50), 3)
    expected = by_full_forwards(lm, request)
    with running(lm, max_batch=2) as engine:

        def arrive(count: int) -> None:
            if count == 2:
                engine.submit(request, late)
            waiting.append(engine.stats().waiting)

        late = noting(engine, steps["late"])
        short, long = noting(engine, steps["short"], arrive), noting(engine, steps["long"])
        with Gate(engine):
            engine.submit(endless(prompt_of(9), 6), short)
            engine.submit(endless(prompt_of(12), 15), long)
        assert [len(listener.wait()) for listener in (short, long)] == [6, 15]
        assert late.generation().token_ids == expected
    assert waiting[1:] == [1] * 5
    assert steps["late"][0] == steps["short"][-1] + 1
    assert steps["long"][-1] > steps["late"][-1], "it did not run beside the one that stayed"


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@pytest.mark.parametrize("max_batch", [1, 2, 3])
def test_requests_start_in_the_order_in_which_they_came(architecture: str, max_batch: int) -> None:
    """Whatever their lengths, steering and positions: twelve at the start, four while those run."""
    rng, order = np.random.default_rng(max_batch), []
    listeners: list[Listener] = []
    with running(tiny_lm(architecture), max_batch=max_batch) as engine:

        def submit() -> None:
            number = len(listeners)
            additions = push(1, STRONG) if rng.random() < 0.5 else {}
            positions = "all" if rng.random() < 0.3 else "generated"
            request = endless(prompt_of(int(rng.integers(1, 120))), int(rng.integers(1, 9)), additions=additions)

            def react(count: int) -> None:
                if count == 1:
                    order.append(number)
                    if number < 4:
                        submit()

            listeners.append(Listener(react))
            engine.submit(replace(request, positions=positions), listeners[-1])

        with Gate(engine):
            for _ in range(12):
                submit()
        for listener in listeners[:12]:
            listener.wait()
        for listener in listeners[12:]:
            assert listener.generation().finish == "length"
    assert order == list(range(16))


def test_requests_from_many_threads_at_any_time_get_what_they_get_alone(lm: LanguageModel) -> None:
    """Contracts 3 and 9, with real races: eight threads that submit, cancel and wait as it happens."""
    requests = [some_request(np.random.default_rng(i)) for i in range(12)]
    expected = [alone(lm, request) for request in requests]

    def ask(thread: int) -> int:
        rng, compared = np.random.default_rng(thread), 0
        for _ in range(10):
            i, listener = int(rng.integers(len(requests))), Listener()
            ticket = engine.submit(requests[i], listener)
            if rng.random() < 0.3:
                time.sleep(rng.random() / 100)
                ticket.cancel()
            got = listener.generation()
            if got.finish == "cancelled":
                assert got.token_ids == expected[i].token_ids[: len(got.token_ids)]
            else:
                assert got == expected[i]
                compared += 1
        return compared

    with running(lm, max_batch=4, prefix_cache_bytes=5 * BLOCK_BYTES) as engine, ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(ask, range(8))) >= 50


# --- what is steered, and what is not (contracts 2 and 4) ---


@contextmanager
def watching_all(lm: LanguageModel) -> Iterator[list[list[Tensor]]]:
    """Every layer's hidden states of every forward: ``[z][forward]``."""
    seen: list[list[Tensor]] = [[] for _ in lm.layers]
    with ExitStack() as stack:
        for z, layer in enumerate(lm.layers):
            stack.enter_context(watching(layer, lambda hidden, z=z: seen[z].append(hidden.clone())))
        yield seen


@pytest.mark.parametrize("architecture", SLOTS)
def test_a_newcomer_is_read_clean_and_steered_from_its_last_position_on_beside_steered_rows(architecture: str) -> None:
    """Contract 4, faults 28 and 29, seen inside the forwards, at every layer, while others are steered at each."""
    lm = tiny_lm(architecture)
    everywhere = {z: push(z, STRONG)[z] for z in range(LAYERS)}
    others = [
        endless(prompt_of(9), 12, additions=everywhere),
        endless(prompt_of(20), 12, additions={z: -addition for z, addition in everywhere.items()}, positions="all"),
    ]
    newcomer = endless(prompt_of(41), 4, additions=push(1, STRONG))
    plain = block_outputs(lm.model, newcomer.prompt_ids, blocks_of(lm.model))
    expected = [by_full_forwards(lm, request) for request in (newcomer, *others)]
    with running(lm, max_batch=3) as engine, watching_all(lm) as seen:
        late = Listener()
        listeners = [Listener(lambda count: engine.submit(newcomer, late) if count == 3 else None), Listener()]
        with Gate(engine):
            for request, listener in zip(others, listeners, strict=True):
                engine.submit(request, listener)
        found = [listener.generation().token_ids for listener in (*listeners, late)]
    assert [found[2], *found[:2]] == expected
    (at,) = [i for i, hidden in enumerate(seen[0]) if hidden.shape[:2] == (1, 40)]
    for z in range(LAYERS):
        np.testing.assert_allclose(seen[z][at][0], plain[z, :40], rtol=1e-5, atol=1e-4)
    assert seen[0][at + 1].shape[:2] == (3, 1)
    first = [states[at + 1][2, 0].numpy() for states in seen]
    np.testing.assert_allclose(first[0], plain[0, 40], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(first[1], plain[1, 40] + newcomer.additions[1].numpy(), rtol=1e-5, atol=1e-4)
    assert np.abs(first[2] - plain[2, 40]).max() > 0.1


def test_hooks_are_there_only_while_a_steered_row_runs(lm: LanguageModel) -> None:
    """Contracts 2 and 6: none in a prefill, none beside an addition of zeros, none once the steered row has left."""
    hooks: list[int] = []
    additions = {**push(0, 3.0), **push(2, 3.0)}
    with running(lm) as engine, watching(lm.layers[1], lambda hidden: hooks.append(hook_count(lm.model))):
        base = hook_count(lm.model)
        late, nothing = Listener(), {1: torch.zeros(WIDTH)}

        def arrive(count: int) -> None:
            if count == 4:
                engine.submit(endless(prompt_of(20), 3, additions=additions), late)

        first = Listener(arrive)
        engine.submit(endless(prompt_of(9), 10, additions=nothing), first)
        assert [len(listener.wait()) for listener in (first, late)] == [10, 3]
    assert [count - base for count in hooks] == [0, 0, 0, 0, 0, 0, 2, 2, 2, 0, 0, 0]


# --- the prefix cache ---


def read_by(lm: LanguageModel, engine: TransformersEngine, request: Request) -> tuple[Generation, int]:
    """A request's generation, and how many of its prompt's tokens but the last went through the model."""
    positions: list[int] = []
    with watching(lm.layers[0], lambda hidden: positions.append(hidden.shape[0] * hidden.shape[1])):
        generation = generate(engine, request)
    return generation, sum(positions) - len(generation.token_ids)


@pytest.mark.parametrize("architecture", SLOTS)
@pytest.mark.parametrize("norm", [0.0, 100.0])
def test_a_growing_conversation_reads_only_what_is_new_and_says_the_same(architecture: str, norm: float) -> None:
    """Contract 4, fault 30, ten turns, greedy and sampled in turn: what a turn generated is read again, unsteered, in
    the next one; what was prompt then, whole blocks of it, is not."""
    lm, prompt, past = tiny_lm(architecture), prompt_of(45), 0
    with running(lm) as warm, running(lm, prefix_cache_bytes=0) as cold:
        for turn in range(10):
            sampling = Sampling(temperature=turn % 2, max_tokens=10)
            request = Request(prompt, turn, sampling, frozenset(), push(turn % LAYERS, norm))
            cached = warm.stats().cached_tokens
            found, read = read_by(lm, warm, request)
            assert found == generate(cold, request)
            known = past // BLOCK * BLOCK
            past = len(prompt) - 1
            assert warm.stats().cached_tokens - cached == known
            assert read == past - known
            prompt = (*prompt, *found.token_ids, *prompt_of(7 + 4 * turn, seed=5))
        assert warm.stats().prompt_tokens == cold.stats().prompt_tokens
        assert cold.stats().cached_tokens == 0


@pytest.mark.parametrize("architecture", SLOTS)
def test_what_a_steered_turn_generated_never_enters_the_cache(architecture: str) -> None:
    """Contract 4: 80 tokens written under strong steering at every layer; the next turn's states at every layer are
    those of one plain forward, when they are read and when all of it comes from the cache."""
    lm = tiny_lm(architecture)
    first = endless(prompt_of(70), 80, additions={z: push(z, 100.0)[z] for z in range(LAYERS)})
    with running(lm) as engine:
        prompt = (*first.prompt_ids, *generate(engine, first).token_ids, *prompt_of(12, seed=8))
        plain = block_outputs(lm.model, prompt, blocks_of(lm.model))
        for known in (64, 160):
            with watching_all(lm) as seen:
                generate(engine, endless(prompt, 1))
            for z in range(LAYERS):
                states = torch.cat([hidden[0] for hidden in seen[z]])
                assert len(states) == len(prompt) - known
                np.testing.assert_allclose(states, plain[z, known:], rtol=1e-4, atol=1e-3)


def test_positions_all_neither_reads_nor_writes_the_cache(lm: LanguageModel) -> None:
    """Contract 4: it is never cached, steered or not, before a clean request and after it."""
    clean = endless(prompt_of(101), 8, additions=push(1, STRONG))
    whole = replace(clean, positions="all")
    expected = [by_full_forwards(lm, request) for request in (whole, clean)]
    assert expected[0] != expected[1]
    with running(lm) as engine:
        for request in (whole, replace(whole, additions={})):
            assert read_by(lm, engine, request)[1] == 100
            assert engine.stats().cache_bytes == 0
        found, read = read_by(lm, engine, clean)
        assert (found.token_ids, read) == (expected[1], 100)
        assert engine.stats().cache_bytes == 3 * BLOCK_BYTES
        found, read = read_by(lm, engine, whole)
        assert (found.token_ids, read) == (expected[0], 100)
        found, read = read_by(lm, engine, clean)
        assert (found.token_ids, read) == (expected[1], 100 - 96)
        assert engine.stats().cache_bytes == 3 * BLOCK_BYTES
        assert engine.stats().cached_tokens == 96


def test_the_cache_keeps_to_its_limit_over_hundreds_of_requests(lm: LanguageModel) -> None:
    """And what it threw out is computed again: twelve prompts in turns that never fit into it together."""
    rng, limit = np.random.default_rng(0), 3 * BLOCK_BYTES + 7
    prompts = [(*prompt_of(40, seed=i % 3), *prompt_of(9 * i, seed=4)) for i in range(12)]
    requests = [endless(prompt, 2, additions=push(2, STRONG if i % 2 else 0.0)) for i, prompt in enumerate(prompts)]
    expected = [by_full_forwards(lm, request) for request in requests]
    sizes: list[int] = []
    chosen = rng.integers(0, 12, 240).tolist()
    with running(lm, max_batch=4, prefix_cache_bytes=limit) as engine:
        listeners = [Listener(lambda count: sizes.append(engine.stats().cache_bytes)) for _ in chosen]
        with Gate(engine):
            for i, listener in zip(chosen, listeners, strict=True):
                engine.submit(requests[i], listener)
        for i, listener in zip(chosen, listeners, strict=True):
            assert listener.generation().token_ids == expected[i]
        stats = engine.stats()
    assert max(sizes) == 3 * BLOCK_BYTES
    assert stats.cache_limit == limit
    assert stats.cache_evictions > 100
    assert stats.cached_tokens > 100 * BLOCK


def test_an_evicted_prefix_is_read_again(lm: LanguageModel) -> None:
    one, other = (endless(prompt_of(70, seed), 6, additions=push(1, STRONG)) for seed in (0, 1))
    expected = {request: by_full_forwards(lm, request) for request in (one, other)}
    with running(lm, prefix_cache_bytes=2 * BLOCK_BYTES) as engine:
        for request, tokens, evictions in (
            (one, 69, 0),
            (one, 5, 0),
            (other, 69, 2),
            (one, 69, 4),
            (other, 69, 6),
            (other, 5, 6),
        ):
            found, read = read_by(lm, engine, request)
            assert (found.token_ids, read) == (expected[request], tokens)
            assert engine.stats().cache_evictions == evictions


@pytest.mark.parametrize("limit", [0, BLOCK_BYTES - 1])
def test_a_limit_below_a_block_turns_the_cache_off(lm: LanguageModel, limit: int) -> None:
    request = endless(prompt_of(100), 3)
    with running(lm, prefix_cache_bytes=limit) as engine:
        assert [read_by(lm, engine, request)[1] for _ in range(3)] == [99] * 3
        stats = engine.stats()
    assert (stats.cache_bytes, stats.cached_tokens, stats.cache_evictions) == (0, 0, 0)


# --- a row that fails, fails alone (contracts 3 and 6) ---


@pytest.mark.parametrize("architecture", SLOTS)
@pytest.mark.parametrize("positions", ["generated", "all"])
@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("z", [0, 2])
def test_a_row_that_is_not_finite_poisons_nobody(architecture: str, positions: Any, place: int, z: int) -> None:
    """Neither its batchmate, nor the rows that get its place, nor the cache: they have its own prompt, and a longer
    and a shorter one."""
    lm = tiny_lm(architecture)
    bad = endless(prompt_of(100), 5, additions={z: torch.full((WIDTH,), torch.inf)}, positions=positions)
    mate = endless(prompt_of(11), 30, additions=push(1, STRONG))
    heirs = [endless(prompt, 4) for prompt in (bad.prompt_ids, (*bad.prompt_ids, *prompt_of(40)), prompt_of(5))]
    expected = [by_full_forwards(lm, request) for request in (mate, *heirs)]
    with running(lm, max_batch=2) as engine:
        listeners = [Listener() for _ in range(4)]

        def bequeath(count: int) -> None:
            for request, listener in zip(heirs, listeners[1:], strict=True):
                engine.submit(request, listener)

        failed = Listener(bequeath)
        pair = [(mate, listeners[0])]
        pair.insert(place, (bad, failed))
        with Gate(engine):
            for request, listener in pair:
                engine.submit(request, listener)
        assert [listener.generation().token_ids for listener in listeners] == expected
    (failure,) = failed.wait()
    assert isinstance(failure, Failure) and isinstance(failure.error, EngineError)
    assert "finite" in str(failure.error)


@pytest.mark.parametrize("positions", ["generated", "all"])
@pytest.mark.parametrize(("place", "mate_length", "heir_length"), [(0, 11, 105), (1, 105, 50)])
def test_a_row_cancelled_in_the_step_in_which_it_stops_being_finite_poisons_nobody(
    lm: LanguageModel, place: int, mate_length: int, heir_length: int, positions: Any
) -> None:
    """As a client that hangs up at the wrong moment does it; here while the row's prompt is read. Whoever gets its
    place then is shorter than it was, beside a longer row."""
    infinite = {1: torch.full((WIDTH,), torch.inf)}
    bad = endless(prompt_of(100), 5, additions=infinite, positions=positions)
    mate, heir = endless(prompt_of(mate_length), 30, additions=push(1, STRONG)), endless(prompt_of(heir_length), 4)
    expected = [by_full_forwards(lm, request) for request in (mate, heir)]
    tickets: list[Ticket] = []

    def hang_up(hidden: Tensor) -> None:
        if hidden.shape[:2] == (1, 99):
            tickets[place].cancel()

    with running(lm, max_batch=2) as engine, watching(lm.layers[0], hang_up):
        listeners = [Listener(), Listener()]
        gone = Listener(lambda count: engine.submit(heir, listeners[1]))
        pair = [(mate, listeners[0])]
        pair.insert(place, (bad, gone))
        with Gate(engine):
            for request, listener in pair:
                tickets.append(engine.submit(request, listener))
        assert gone.generation() == Generation("", (), "cancelled")
        for listener in listeners:
            listener.wait()
    assert [listener.generation().token_ids for listener in listeners] == expected


@contextmanager
def failing(lm: LanguageModel, when: Callable[[Tensor], bool]) -> Iterator[None]:
    """Forwards raise in the third block when its hidden states say so."""

    def see(hidden: Tensor) -> None:
        if when(hidden):
            raise RuntimeError("out of memory")

    with watching(lm.layers[2], see):
        yield


@pytest.mark.parametrize("architecture", SLOTS)
def test_an_exception_while_a_newcomer_is_read_fails_only_the_newcomer(architecture: str) -> None:
    """Those that run go on, and the next one in its place, with the beginning of its prompt, is right."""
    lm = tiny_lm(architecture)
    mates = [endless(prompt_of(9), 14, additions=push(1, STRONG)), endless(prompt_of(20), 14)]
    broken = endless(prompt_of(78), 5, additions=push(2, STRONG), positions="generated")
    heir = endless(broken.prompt_ids[:66], 5, additions=push(2, -STRONG))
    expected = [by_full_forwards(lm, request) for request in (*mates, heir)]
    with running(lm, max_batch=3) as engine, failing(lm, lambda hidden: hidden.shape[1] == 77):
        last, failed = Listener(), Listener(lambda count: engine.submit(heir, last))
        listeners = [Listener(lambda count: engine.submit(broken, failed) if count == 4 else None), Listener(), last]
        with Gate(engine):
            for request, listener in zip(mates, listeners[:2], strict=True):
                engine.submit(request, listener)
        assert [listener.generation().token_ids for listener in listeners] == expected
        assert engine.stats().cached_tokens == 0
    (failure,) = failed.wait()
    assert isinstance(failure, Failure) and "out of memory" in str(failure.error)


@pytest.mark.parametrize("architecture", SLOTS)
def test_an_exception_in_the_very_first_forward_leaves_a_working_engine(architecture: str) -> None:
    """Half of the layers have a store by then."""
    lm = tiny_lm(architecture)
    request, other = endless(prompt_of(78), 4, additions=push(1, STRONG)), endless(prompt_of(150), 4)
    expected = [by_full_forwards(lm, r) for r in (request, other)]
    with running(lm) as engine:
        with failing(lm, lambda hidden: True), pytest.raises(EngineError, match="out of memory"):
            generate(engine, request)
        assert [generation.token_ids for generation in run_together(engine, [request, other])] == expected


@pytest.mark.parametrize("architecture", [*SLOTS, *MICRO_BATCHES])
def test_an_exception_in_a_step_fails_those_that_run_and_not_those_that_wait(architecture: str) -> None:
    """The waiting ones have the same prompts, so what the failed ones left in the cache is used."""
    lm = tiny_lm(architecture)
    requests = [endless(prompt_of(40 + 30 * i), 8, additions=push(i, STRONG)) for i in range(2)]
    expected = [by_full_forwards(lm, request) for request in requests]
    steps = 0

    def third_step(hidden: Tensor) -> bool:
        nonlocal steps
        step = hidden.shape[:2] == (2, 1)
        steps += step
        return step and steps == 3

    with running(lm, max_batch=2) as engine, failing(lm, third_step):
        listeners = [Listener() for _ in range(4)]
        with Gate(engine):
            for request, listener in zip(requests * 2, listeners, strict=True):
                engine.submit(request, listener)
        assert [listener.generation().token_ids for listener in listeners[2:]] == expected
        for tokens, listener in zip(expected, listeners[:2], strict=True):
            *before, last = listener.wait()
            assert [event.token_id for event in before if isinstance(event, Event)] == list(tokens[:2])
            assert isinstance(last, Failure) and "out of memory" in str(last.error)
        assert engine.stats().cached_tokens == (32 + 64 if engine.continuous else 0)


def test_a_step_that_fails_after_it_wrote_what_is_not_finite_poisons_nobody(lm: LanguageModel) -> None:
    """The rows that get the places are longer than what they find there."""
    bad = endless(prompt_of(60), 5, additions={0: torch.full((WIDTH,), torch.inf)})
    heirs = [endless(prompt_of(20, seed), 50) for seed in range(2)]
    expected = [by_full_forwards(lm, request) for request in heirs]
    steps: list[Tensor] = []

    def first_step(hidden: Tensor) -> bool:
        if hidden.shape[:2] == (2, 1):
            steps.append(hidden.clone())
        return hidden.shape[:2] == (2, 1) and len(steps) == 1

    with running(lm, max_batch=2) as engine, failing(lm, first_step):
        listeners = [Listener() for _ in range(4)]
        with Gate(engine):
            for request, listener in zip((bad, bad, *heirs), listeners, strict=True):
                engine.submit(request, listener)
        assert [listener.generation().token_ids for listener in listeners[2:]] == expected
    assert not steps[0].isfinite().any()
    for listener in listeners[:2]:
        (failure,) = listener.wait()
        assert isinstance(failure, Failure) and "out of memory" in str(failure.error)


# --- counts ---


def test_counts_of_a_small_known_schedule(lm: LanguageModel) -> None:
    """Two places. a: 10 tokens of prompt and 3 of reply; at its first, b (40 and 5, steered) and c (7 and 4, steered by
    nothing) come. So a runs in steps 1 to 3, b in 2 to 6, c in 4 to 7. At the end b's prompt again, from the cache."""
    seen: list[tuple[str, int, int, int, int, int]] = []
    with running(lm, max_batch=2) as engine:

        def noting_as(name: str, then: Callable[[int], None] = lambda count: None) -> Listener:
            def react(count: int) -> None:
                stats = engine.stats()
                seen.append((name, stats.steps, stats.running, stats.waiting, stats.prompt_tokens, stats.cached_tokens))
                then(count)

            return Listener(react)

        def arrive(count: int) -> None:
            if count == 1:
                engine.submit(endless(prompt_of(40), 5, additions=push(1, 1.0)), b)
                engine.submit(endless(prompt_of(7), 4, additions={1: torch.zeros(WIDTH)}), c)

        def again(count: int) -> None:
            if count == 4:
                engine.submit(endless(prompt_of(40), 1, positions="generated"), d)

        a, b, c, d = noting_as("a", arrive), noting_as("b"), noting_as("c", again), noting_as("d")
        engine.submit(endless(prompt_of(10), 3), a)
        assert [len(listener.wait()) for listener in (a, b, c, d)] == [3, 5, 4, 1]
    assert seen == [
        ("a", 1, 1, 0, 10, 0),
        ("a", 2, 2, 1, 50, 0),
        ("b", 2, 2, 1, 50, 0),
        ("a", 3, 2, 1, 50, 0),
        ("b", 3, 2, 1, 50, 0),
        ("b", 4, 2, 0, 57, 0),
        ("c", 4, 2, 0, 57, 0),
        ("b", 5, 2, 0, 57, 0),
        ("c", 5, 2, 0, 57, 0),
        ("b", 6, 2, 0, 57, 0),
        ("c", 6, 2, 0, 57, 0),
        ("c", 7, 1, 0, 57, 0),
        ("d", 8, 1, 0, 97, 32),
    ]
    stats = engine.stats()
    assert (stats.max_batch, stats.max_queue, stats.max_context) == (2, 256, 2048)
    assert (stats.steps, stats.generated_tokens, stats.steered_tokens) == (8, 13, 5)
    assert (stats.cache_bytes, stats.cache_evictions) == (BLOCK_BYTES, 0)


# --- which models run in slots ---


@pytest.mark.parametrize("architecture", SLOTS)
def test_a_model_with_full_attention_runs_in_slots_and_says_nothing(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "traitbasis.engine"), running(tiny_model(architecture)) as engine:
        assert engine.continuous
    assert not caplog.records


@pytest.mark.parametrize("architecture", MICRO_BATCHES)
def test_a_model_with_a_sliding_window_does_not_and_the_log_says_so(
    architecture: str, caplog: pytest.LogCaptureFixture
) -> None:
    """House style, no silent fallbacks: the model, what happens instead, and why."""
    with caplog.at_level(logging.WARNING, "traitbasis.engine"), running(tiny_model(architecture)) as engine:
        assert not engine.continuous
        stats = engine.stats()
    (record,) = caplog.records
    for part in (f"tiny-{architecture}", "micro-batches", "Sliding"):
        assert part in record.getMessage()
    assert (stats.cache_limit, stats.cache_bytes, stats.cached_tokens) == (0, 0, 0)


def ignore_masks(lm: LanguageModel) -> Any:
    """One layer's attention reads every column in a step."""

    def unmask(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        if keywords["hidden_states"].shape[1] == 1:
            keywords["attention_mask"] = None
        return arguments, keywords

    return lm.layers[1].self_attn.register_forward_pre_hook(unmask, with_kwargs=True)


def ignore_positions(lm: LanguageModel) -> Any:
    """Every token of a step takes itself for the first one."""

    def reset(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> Any:
        if keywords["position_ids"].shape[1] == 1:
            keywords["position_ids"] = torch.zeros_like(keywords["position_ids"])
        return arguments, keywords

    return lm.model.model.rotary_emb.register_forward_pre_hook(reset, with_kwargs=True)


def refuse_batches(lm: LanguageModel) -> Any:
    def refuse(module: nn.Module, arguments: Any) -> None:
        if len(arguments[0]) > 1:
            raise NotImplementedError("one row at a time")

    return lm.layers[1].mlp.register_forward_pre_hook(refuse)


def refuse_caches(lm: LanguageModel) -> Any:
    def refuse(module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        if any(isinstance(value, Cache) for value in keywords.values()):
            raise NotImplementedError("no caches")

    return lm.layers[1].self_attn.register_forward_pre_hook(refuse, with_kwargs=True)


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (ignore_masks, "differ by"),
        (ignore_positions, "differ by"),
        (refuse_batches, "one row at a time"),
        (refuse_caches, "no caches"),
    ],
)
def test_a_model_that_is_wrong_in_slots_is_found_by_trying(
    break_it: Callable[[LanguageModel], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    """After nnterp: verified, not trusted. It is tried once a model."""
    lm = tiny_model("llama")
    break_it(lm)
    with running(lm) as engine:
        assert not engine.continuous
    assert reason in caplog.text
    assert reason in str(why_not_continuous(lm))
    assert why_not_continuous(tiny_model("llama")) is None
    forwards: list[Tensor] = []
    with watching(lm.layers[0], forwards.append), running(lm) as engine:
        assert not engine.continuous
    assert not forwards


# --- what is refused ---


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_batch", 0), ("max_batch", -1), ("max_queue", 0), ("max_context", 1), ("prefix_cache_bytes", -1)],
)
def test_a_bad_size_is_refused_by_name(lm: LanguageModel, name: str, value: int) -> None:
    with pytest.raises(EngineError, match=f"{name} is {value}; it must be at least"):
        TransformersEngine(lm, **{name: value})


def test_a_smaller_context_than_the_models_own_is_kept_to(lm: LanguageModel) -> None:
    with running(lm, max_context=20) as engine:
        found = generate(engine, endless(prompt_of(17), 9))
        assert (len(found.token_ids), found.finish) == (3, "length")
        assert found.token_ids == alone(lm, endless(prompt_of(17), 9)).token_ids[:3]
        with pytest.raises(RequestError, match="20 tokens; the context of tiny-llama is 20") as caught:
            engine.submit(endless(prompt_of(20), 1), Listener())
        assert caught.value.code == "context_length_exceeded"
    with running(lm, max_context=10**6) as engine:
        assert engine.stats().max_context == 2048


@pytest.mark.parametrize("token", [VOCABULARY, -1])
def test_a_token_id_that_does_not_exist_is_refused_at_once(lm: LanguageModel, token: int) -> None:
    """Contract 3: in a batch it would fail everybody. The last one that exists is fine."""
    with running(lm) as engine:
        with pytest.raises(RequestError, match=f"token id {token} in the prompt .* are 0 to {VOCABULARY - 1}"):
            engine.submit(endless((5, token, 6), 1), Listener())
        assert engine.stats().waiting == 0
        assert generate(engine, endless((5, VOCABULARY - 1, 6), 1)).finish == "length"


def test_a_bias_for_a_token_that_does_not_exist_is_refused_at_once(lm: LanguageModel) -> None:
    def biased(token: int) -> Request:
        return Request((5, 6), 0, Sampling(temperature=0, max_tokens=1, logit_bias={token: 100.0}), frozenset())

    with running(lm) as engine:
        with pytest.raises(RequestError, match=f"token id {VOCABULARY} in logit_bias does not exist"):
            engine.submit(biased(VOCABULARY), Listener())
        assert generate(engine, biased(VOCABULARY - 1)).token_ids == (VOCABULARY - 1,)
