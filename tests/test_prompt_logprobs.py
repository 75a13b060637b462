"""Log-probabilities of a prompt's own tokens, against one plain forward of the transformers model over the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from continuous import MICRO_BATCHES, SLOTS, STRONG, alone, by_full_forwards, endless, running, tiny_lm
from reference import Gate, Listener, blocks_of, hidden_in, prompt_of, push, run_together
from tiny import VOCABULARY
from torch import Tensor

from traitbasis.engines.base import Collector, Event, Generation, Request, TokenLogprob, generate
from traitbasis.errors import RequestError
from traitbasis.model import LanguageModel

ALL = (*SLOTS, *MICRO_BATCHES)


def logs_of(lm: LanguageModel, prompt: Sequence[int], additions: Mapping[int, Tensor] | None = None) -> Any:
    """Natural-log probabilities ``(tokens, vocabulary)`` of what follows each token; float64, all positions shifted."""
    with ExitStack() as stack, torch.no_grad():
        for z, addition in (additions or {}).items():

            def hook(module: Any, arguments: Any, output: Any, addition: Tensor = addition) -> Any:
                hidden = hidden_in(output) + addition
                return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

            stack.callback(blocks_of(lm.model)[z].register_forward_hook(hook).remove)
        logits = lm.model(torch.tensor([list(prompt)]), use_cache=False).logits[0].double().numpy()
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def assert_right(found: Sequence[TokenLogprob | None] | None, request: Request, logs: Any) -> None:
    prompt, count = request.prompt_ids, request.prompt_logprobs
    assert found is not None and count is not None
    assert len(found) == len(prompt)
    assert found[0] is None
    for i, scored in enumerate(found[1:], start=1):
        assert scored is not None
        before = logs[i - 1]
        assert scored.logprob == pytest.approx(before[prompt[i]], abs=1e-4)
        tokens, values = [token for token, _ in scored.top], [value for _, value in scored.top]
        assert len({*tokens}) == min(count, VOCABULARY)
        np.testing.assert_allclose(values, np.sort(before)[::-1][:count], atol=1e-4)
        np.testing.assert_allclose(values, before[tokens], atol=1e-4)


def collected(lm: LanguageModel, requests: Sequence[Request]) -> list[Generation]:
    """The requests' generations with all that came with them, run together."""
    listeners, found = [Listener() for _ in requests], list[Generation]()
    with running(lm) as engine:
        with Gate(engine):
            for request, listener in zip(requests, listeners, strict=True):
                engine.submit(request, listener)
        for listener in listeners:
            collector = Collector()
            *_, last = [collector.add(event) for event in listener.wait() if isinstance(event, Event)]
            assert last is not None
            found.append(last)
    return found


LENGTHS = (1, 2, 31, 63, 64, 65, 66, 130, 200)  # around the parts in which a prompt is read, and a window of 16


@pytest.mark.parametrize("architecture", ALL)
def test_they_are_those_of_a_plain_forward_over_the_prompt(architecture: str) -> None:
    """All lengths together, with other numbers of alternatives, beside steered rows and rows that do not ask. Each
    row's steering concerns what it writes, not what it reads."""
    lm = tiny_lm(architecture)
    requests = [
        endless(prompt_of(length), 3, additions=push(1, STRONG) if i % 2 else {}, prompt_logprobs=(0, 1, 5, 100)[i % 4])
        for i, length in enumerate(LENGTHS)
    ]
    mates = [endless(prompt_of(40), 6, additions=push(2, STRONG)), endless(prompt_of(7), 6)]
    found = collected(lm, [mates[0], *requests, mates[1]])
    assert [found[0].token_ids, found[-1].token_ids] == [by_full_forwards(lm, mate) for mate in mates]
    assert found[0].prompt_logprobs is found[-1].prompt_logprobs is None
    for request, generation in zip(requests, found[1:-1], strict=True):
        assert generation.token_ids == by_full_forwards(lm, request)
        assert_right(generation.prompt_logprobs, request, logs_of(lm, request.prompt_ids))


@pytest.mark.parametrize("architecture", ALL)
def test_with_positions_all_they_are_the_steered_models(architecture: str) -> None:
    lm = tiny_lm(architecture)
    requests = [
        endless(prompt_of(length), 2, additions=push(1, 10.0), positions="all", prompt_logprobs=3)
        for length in (2, 66, 130)
    ]
    for request, generation in zip(requests, collected(lm, requests), strict=True):
        assert generation.token_ids == by_full_forwards(lm, request)
        steered, plain = logs_of(lm, request.prompt_ids, request.additions), logs_of(lm, request.prompt_ids)
        assert_right(generation.prompt_logprobs, request, steered)
        assert abs(steered - plain).max() > 0.1


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_they_come_with_the_first_event_only_and_change_nothing_else(architecture: str) -> None:
    lm = tiny_lm(architecture)
    plain = endless(prompt_of(70), 5, additions=push(1, STRONG))
    asking = replace(plain, prompt_logprobs=2)
    with running(lm) as engine:
        listener = Listener()
        engine.submit(asking, listener)
        listener.wait()
        found, expected = generate(engine, asking), generate(engine, plain)
    events = [event for event in listener.events if isinstance(event, Event)]
    assert [event.prompt_logprobs is None for event in events] == [False, True, True, True, True]
    assert found.prompt_logprobs == events[0].prompt_logprobs
    assert replace(found, prompt_logprobs=None) == expected


def test_such_a_request_reads_nothing_from_the_prefix_cache_but_fills_it() -> None:
    lm, prompt = tiny_lm("llama"), prompt_of(100)
    asking, plain = endless(prompt, 4, prompt_logprobs=1), endless(prompt, 4)
    expected = by_full_forwards(lm, plain)
    with running(lm) as engine:
        for _ in range(2):
            found = generate(engine, asking)
            assert found.token_ids == expected
            assert_right(found.prompt_logprobs, asking, logs_of(lm, prompt))
        assert engine.stats().cached_tokens == 0
        assert generate(engine, plain).token_ids == expected
        assert engine.stats().cached_tokens == 96


@pytest.mark.parametrize("architecture", ALL)
@pytest.mark.parametrize("rows", [1, 3])
def test_the_logits_of_a_long_prompt_are_never_held_together(architecture: str, rows: int) -> None:
    """Of at most 64 tokens at once, over all rows; and of one each where nobody asks."""
    lm, sizes = tiny_lm(architecture), list[int]()
    handle = lm.model.get_output_embeddings().register_forward_hook(
        lambda module, arguments, output: sizes.append(output.shape[0] * output.shape[1])
    )
    requests = [endless(prompt_of(300 - i), 2, prompt_logprobs=0) for i in range(rows)]
    try:
        with running(lm) as engine:
            run_together(engine, requests)
            assert max(sizes) <= 64
            read = sum(size for size in sizes if size > rows)
            assert read >= 299
            sizes.clear()
            run_together(engine, [replace(request, prompt_logprobs=None) for request in requests])
            assert max(sizes) <= rows
    finally:
        handle.remove()


@pytest.mark.parametrize("wrong", [-1, 101, 2.0, True, "3"])
def test_values_nobody_can_mean_are_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        endless(prompt_of(3), 1, prompt_logprobs=wrong)


def test_a_prompt_of_one_token_has_none() -> None:
    assert alone(tiny_lm("llama"), endless((7,), 2, prompt_logprobs=3)).prompt_logprobs == (None,)
