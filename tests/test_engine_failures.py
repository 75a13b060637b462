"""What goes wrong stays with whom it concerns: rows, newcomers, models that do not run in slots, bad requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from continuous import MICRO_BATCHES, SLOTS, STRONG, alone, by_full_forwards, endless, running, tiny_lm
from reference import (
    Gate,
    Listener,
    prompt_of,
    push,
    run_together,
    watching,
)
from tiny import VOCABULARY, WIDTH, tiny_model
from torch import Tensor, nn
from transformers import Cache

from traitbasis.cpu import prepare_weights
from traitbasis.engines import transformers as engine_module
from traitbasis.engines.base import Event, Failure, Generation, Request, Sampling, Ticket, generate
from traitbasis.engines.transformers import TransformersEngine, why_not_continuous
from traitbasis.errors import EngineError, RequestError
from traitbasis.model import LanguageModel

# --- a row that fails, fails alone (contracts 3 and 6) ---


@pytest.fixture
def lm() -> LanguageModel:
    return tiny_lm("llama")


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


# --- weights that change under an engine ---


def packed_lm() -> LanguageModel:
    lm = tiny_model("llama")
    assert prepare_weights(lm.layers)
    return lm


def test_changed_weights_are_used_at_once_and_nothing_of_the_old_ones_is_cached() -> None:
    """A step from idle on: neither packed copies nor cached keys and values outlive the weights they came from."""
    lm, request = packed_lm(), endless(prompt_of(100), 12)
    with running(lm) as engine:
        before = generate(engine, request)
        with torch.no_grad():
            for layer in lm.layers:
                layer.self_attn.v_proj.weight.mul_(-1)
        after = generate(engine, request)
    assert after.token_ids == alone(lm, request).token_ids != before.token_ids


def test_a_model_cast_to_what_nothing_is_packed_in_still_serves() -> None:
    lm, request = packed_lm(), endless(prompt_of(20), 4)
    with running(lm) as engine:
        generate(engine, request)
        lm.model.double()
        assert len(generate(engine, request).token_ids) == 4


def test_an_error_before_anybody_runs_is_told_and_does_not_repeat_for_ever(
    lm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(model: Any) -> int:
        raise RuntimeError("no packing today")

    with running(lm) as engine:
        monkeypatch.setattr(engine_module, "repack", broken)
        with pytest.raises(EngineError, match="no packing today"):
            generate(engine, endless(prompt_of(9), 2))
        monkeypatch.undo()
        assert generate(engine, endless(prompt_of(9), 2)).finish == "length"


def test_large_slots_are_given_back_when_nobody_runs(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    request = endless(prompt_of(300), 4)
    expected = alone(lm, request)
    with running(lm, prefix_cache_bytes=0) as engine:
        assert generate(engine, request) == expected and engine.stats().slot_bytes
        monkeypatch.setattr(engine_module, "_KEPT_SLOT_BYTES", 1000)
        assert generate(engine, request) == expected
        deadline = time.monotonic() + 10
        while engine.stats().slot_bytes:  # just after the last event
            assert time.monotonic() < deadline, "never given back"
        assert generate(engine, request) == expected


@pytest.mark.parametrize("gone", [SystemExit, asyncio.CancelledError])
def test_a_listener_that_raises_more_than_an_exception_ends_only_its_row(
    lm: LanguageModel, gone: type[BaseException]
) -> None:
    def react(count: int) -> None:
        raise gone

    request = endless(prompt_of(9), 4)
    with running(lm) as engine:
        engine.submit(request, Listener(react))
        assert generate(engine, request) == alone(lm, request)
