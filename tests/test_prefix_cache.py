"""The prefix cache inside an engine: what is read again, what never enters it, and its bound."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from continuous import (
    BLOCK,
    BLOCK_BYTES,
    SLOTS,
    STRONG,
    alone,
    by_full_forwards,
    endless,
    running,
    tiny_lm,
    watching_all,
)
from reference import (
    Gate,
    Listener,
    block_outputs,
    blocks_of,
    prompt_of,
    push,
    watching,
)
from tiny import LAYERS

from traitbasis.engines.base import Generation, Request, Sampling, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.model import LanguageModel

# --- the prefix cache ---


@pytest.fixture
def lm() -> LanguageModel:
    return tiny_lm("llama")


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
def test_a_prefix_is_read_from_the_cache_after_idle_slots_were_given_back(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contract 9: a long conversation gives its slot back when nobody runs; its next turn reads it all the same."""
    monkeypatch.setattr("traitbasis.engines.transformers._KEPT_SLOT_BYTES", 0)
    lm, request = tiny_lm(architecture), endless(prompt_of(75), 10)
    with running(lm) as engine:
        first = generate(engine, request)
        deadline = time.monotonic() + 10
        while engine.stats().slot_bytes:
            assert time.monotonic() < deadline, "never given back"
        assert generate(engine, request) == first == alone(lm, request)
        assert engine.stats().cached_tokens == 64


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
