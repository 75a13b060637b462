"""Continuous batching: whoever comes, goes or is steered meanwhile, a row is what it is alone."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from continuous import (
    BLOCK_BYTES,
    CACHES,
    MICRO_BATCHES,
    SLOTS,
    STRONG,
    alone,
    by_full_forwards,
    ended,
    endless,
    running,
    tiny_lm,
    watching_all,
)
from reference import (
    END,
    Gate,
    Listener,
    block_outputs,
    blocks_of,
    hook_count,
    prompt_of,
    push,
    watching,
)
from tiny import CONFIGS, LAYERS, WIDTH
from torch import Tensor

from traitbasis.engines.base import Generation, Request, Sampling, Ticket
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.model import LanguageModel

# --- any schedule: rows are alone (contracts 3 and 9) ---


@pytest.fixture
def lm() -> LanguageModel:
    return tiny_lm("llama")


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
