"""Layers, extraction, steering and batches, on a tiny random model of every supported architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

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
    final_norm_of,
    greedy,
    hidden_in,
    hook_count,
    prompt_of,
    push,
    run_together,
    watching,
)
from tiny import CONFIGS, LAYERS, WIDTH, tiny_model
from torch import Tensor, nn

from traitbasis.chat import TokenizedReply
from traitbasis.engines.base import Request, Ticket, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineError
from traitbasis.extract import read_states
from traitbasis.hooks import record, steer
from traitbasis.model import LanguageModel

WINDOW = 16  # of the sliding-window configurations
STRONG = 30.0  # norm of an addition that changes greedy text
LENGTHS = (5, 23, 41, 30, 1)

tiny_lm = cache(tiny_model)


@pytest.fixture(params=CONFIGS)
def architecture(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lm(architecture: str) -> LanguageModel:
    return tiny_lm(architecture)


@pytest.fixture
def engine(lm: LanguageModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(lm)
    yield engine
    engine.close()


def some_ids(rows: int = 3, tokens: int = 20) -> Tensor:
    return torch.tensor([prompt_of(tokens, seed) for seed in range(rows)])


def hidden_states(lm: LanguageModel, ids: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(lm.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states)


# --- layers (contract 1) ---


def test_the_decoder_layers_are_found_in_order(lm: LanguageModel) -> None:
    """Contract 1, fault 7."""
    assert list(lm.layers) == blocks_of(lm.model)
    assert len(lm.layers) == LAYERS
    assert lm.width == WIDTH


def test_layer_z_is_hidden_state_z_plus_one_and_the_last_is_before_the_final_norm(lm: LanguageModel) -> None:
    """Contract 1, faults 1 and 2."""
    ids = some_ids()
    expected = hidden_states(lm, ids)
    with record(lm.layers) as states, torch.no_grad():
        lm.model(input_ids=ids, use_cache=False)
    for z in range(LAYERS - 1):
        assert torch.equal(states[z], expected[z + 1])
    last = states[LAYERS - 1]
    assert not torch.allclose(last, expected[-1], atol=1e-2)
    with torch.no_grad():
        assert torch.equal(final_norm_of(lm.model)(last), expected[-1])


def test_a_layer_is_the_whole_residual_stream(architecture: str, lm: LanguageModel) -> None:
    """Fault 38: a block's output minus its input is what attention and MLP wrote, both of them."""
    attention, mlp = {
        "gpt2": ("attn", "mlp"),
        "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
        "gemma3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    }.get(architecture, ("self_attn", "mlp"))
    block = lm.layers[2]
    written: list[Tensor] = []
    handles = [
        block.get_submodule(name).register_forward_hook(lambda m, a, output: written.append(hidden_in(output)))
        for name in (attention, mlp)
    ]
    try:
        with record(lm.layers) as states, torch.no_grad():
            lm.model(input_ids=some_ids(), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    assert torch.allclose(states[2] - states[1], written[0] + written[1], atol=1e-5)


# --- extraction ---


def some_replies() -> list[TokenizedReply]:
    """Ragged, with spans at the end and in the middle."""
    spans = [range(3, 9), range(10, 21), [4, 5, 30, 31], range(1, 40), [2]]
    return [TokenizedReply(prompt_of(max(s) + 1 + i), tuple(s)) for i, s in enumerate(spans)]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_extracted_means_are_the_means_of_the_block_outputs(lm: LanguageModel, batch_size: int) -> None:
    """Fault 6a: whatever the padding, against numpy on one unpadded sequence at a time."""
    replies = some_replies()
    found = read_states(lm, replies, batch_size=batch_size)
    for i, reply in enumerate(replies):
        counted = block_outputs(lm.model, reply.ids, blocks_of(lm.model))[:, list(reply.positions)]
        np.testing.assert_allclose(found.means[i], counted.mean(1), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(found.norms[i], np.linalg.norm(counted, axis=-1).mean(1), rtol=1e-5, atol=1e-4)


# --- steering a forward ---


@pytest.mark.parametrize("z", range(LAYERS))
def test_steering_shifts_its_own_layer_by_exactly_the_addition_and_nothing_below(lm: LanguageModel, z: int) -> None:
    """Contract 1, faults 1, 3 and 38: every row, every position, bit for bit; and the logits move."""
    ids = some_ids()
    additions = torch.stack([push(z, c)[z] for c in (1.0, -2.0, 0.5)])
    with torch.no_grad():
        before = lm.model(input_ids=ids, output_hidden_states=True, use_cache=False)
        with record(lm.layers) as plain:
            lm.model(input_ids=ids, use_cache=False)
        with steer(lm.layers, {z: additions}), record(lm.layers) as steered:
            after = lm.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    for below in range(z + 1):
        assert torch.equal(after.hidden_states[below], before.hidden_states[below])
    assert torch.equal(steered[z], plain[z] + additions[:, None, :])
    for above in range(z + 1, LAYERS):
        assert not torch.equal(steered[above], plain[above])
    assert (after.logits - before.logits).abs().amax((1, 2)).min() > 1e-3


def test_blocks_keep_their_type_and_their_hooks(lm: LanguageModel) -> None:
    """Contract 6, fault 7: hooks only, never a wrapper."""
    kinds, hooks = [type(block) for block in lm.layers], hook_count(lm.model)
    with steer(lm.layers, push(1, 1.0)):
        assert [type(block) for block in blocks_of(lm.model)] == kinds
        assert hook_count(lm.model) == hooks + 1
    assert hook_count(lm.model) == hooks


# --- generating ---


def reference(lm: LanguageModel, request: Request) -> tuple[int, ...]:
    first = 0 if request.positions == "all" else len(request.prompt_ids) - 1
    n = request.sampling.max_tokens
    return tuple(decode_without_cache(lm.model, blocks_of(lm.model), request.prompt_ids, request.additions, n, first))


@pytest.mark.parametrize("length", [1, 23, 41])
def test_without_additions_the_engine_says_what_generate_says(
    lm: LanguageModel, engine: TransformersEngine, length: int
) -> None:
    """Contract 2, also past the sliding window; an addition of zeros is nothing either."""
    prompt = prompt_of(length)
    ids = torch.tensor([prompt])
    whole = lm.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False)
    expected = tuple(whole[0, length:].tolist())
    assert len(set(expected)) > 2, "constant text would hide faults"
    assert generate(engine, greedy(prompt, 32)).token_ids == expected
    assert generate(engine, greedy(prompt, 32, additions={2: torch.zeros(WIDTH)})).token_ids == expected


@pytest.mark.parametrize("positions", ["generated", "all"])
@pytest.mark.parametrize("z", range(LAYERS))
def test_steered_text_is_that_of_full_forwards_without_a_cache(
    lm: LanguageModel, engine: TransformersEngine, z: int, positions: str
) -> None:
    """Contract 4, faults 13, 28 and 29: steered from the last prompt position on (or everywhere), cached or not."""
    request = greedy(prompt_of(24, seed=z), 12, additions=push(z, STRONG if z % 2 else -STRONG), positions=positions)
    expected = reference(lm, request)
    assert expected != reference(lm, replace(request, additions={})), "too weak to test anything"
    assert generate(engine, request).token_ids == expected


def test_the_two_kinds_of_positions_differ(lm: LanguageModel) -> None:
    """Keeps the test above honest: steering the prompt too is another text."""
    request = greedy(prompt_of(24), 20, additions=push(1, STRONG))
    assert reference(lm, request) != reference(lm, replace(request, positions="all"))


def test_the_prompt_is_read_unsteered_and_its_last_position_is_steered(
    lm: LanguageModel, engine: TransformersEngine
) -> None:
    """Contract 4, faults 28 and 29, seen inside the forwards: 19 clean positions, then shifted ones."""
    prompt, additions = prompt_of(20), push(1, STRONG)
    expected = block_outputs(lm.model, prompt, lm.layers)
    forwards: list[Tensor] = []
    with watching(lm.layers[1], lambda hidden: forwards.append(hidden[0].clone())):
        generate(engine, greedy(prompt, 3, additions=additions))
    assert [len(states) for states in forwards] == [19, 1, 1, 1]
    np.testing.assert_allclose(forwards[0], expected[1, :19], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(forwards[1][0], expected[1, 19] + additions[1].numpy(), rtol=1e-5, atol=1e-4)


def ragged_requests(positions: str = "generated") -> list[Request]:
    """Steered, unsteered, negative and two-layer rows, of different lengths and ends."""
    doses = [push(1, STRONG), {}, push(1, -STRONG), {**push(0, 3.0), **push(3, STRONG)}, {}]
    limits = (24, 9, 17, 3, 30)
    return [
        greedy(prompt_of(length, seed=4), n, additions=dose, positions=positions)
        for length, n, dose in zip(LENGTHS, limits, doses, strict=True)
    ]


@pytest.mark.parametrize("positions", ["generated", "all"])
def test_a_batchmate_never_changes_a_row(lm: LanguageModel, engine: TransformersEngine, positions: str) -> None:
    """Contract 3, fault 34: greedy float32 tokens of a ragged batch are those of each row alone, by full forwards."""
    requests = ragged_requests(positions)
    sizes: list[int] = []
    with watching(lm.layers[0], lambda hidden: sizes.append(len(hidden))):
        together = run_together(engine, requests)
    assert max(sizes) == len(requests), "the rows did not run together"
    assert len(set(sizes)) > 3, "no row left before another"
    assert [g.token_ids for g in together] == [reference(lm, request) for request in requests]
    for generation, request in zip(together, requests, strict=True):
        stopped = generation.token_ids[-1] == END
        assert generation.finish == ("stop" if stopped else "length")
        assert stopped or len(generation.token_ids) == request.sampling.max_tokens


def test_nothing_is_left_after_success_failure_and_cancellation(lm: LanguageModel, engine: TransformersEngine) -> None:
    """Contract 6, fault 16: hooks are back to their number, and the next answer is the first one's."""
    request = greedy(prompt_of(23), 20, additions={**push(0, STRONG), **push(2, STRONG)})
    hooks, expected = hook_count(lm.model), reference(lm, request)
    assert generate(engine, request).token_ids == expected
    assert hook_count(lm.model) == hooks

    forwards = 0

    def fail_in_the_fourth(module: nn.Module, arguments: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 4:
            raise RuntimeError("out of memory")

    handle = lm.layers[3].register_forward_pre_hook(fail_in_the_fourth)
    with pytest.raises(EngineError, match="out of memory"):
        generate(engine, request)
    handle.remove()
    assert hook_count(lm.model) == hooks

    tickets: list[Ticket] = []
    listener = Listener(lambda count: tickets[0].cancel() if count == 3 else None)
    with Gate(engine):
        tickets.append(engine.submit(request, listener))
    assert listener.generation().finish == "cancelled"
    assert listener.generation().token_ids == expected[:3]
    assert generate(engine, request).token_ids == expected
    assert hook_count(lm.model) == hooks
