"""Recording and steering on small fake blocks, and on a model whose own hooks are in the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from reference import greedy, hook_count, prompt_of, push
from tiny import LAYERS, tiny_model
from torch import Tensor, nn
from transformers.utils import ModelOutput

from traitbasis.basis import Basis, Column
from traitbasis.engines.base import generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.hooks import record, steer
from traitbasis.model import LanguageModel
from traitbasis.trait_vector import Provenance

WIDTH = 8


class States(NamedTuple):
    hidden: Tensor
    weights: str


@dataclass
class BlockOutput(ModelOutput):  # type: ignore[misc]
    hidden_states: Tensor | None = None
    attentions: Tensor | None = None
    note: Tensor | None = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda h: h,
    "tuple of one": lambda h: (h,),
    "tuple": lambda h: (h, "weights"),
    "list of one": lambda h: [h],
    "list": lambda h: [h, "weights"],
    "namedtuple": lambda h: States(h, "weights"),
    "ModelOutput": lambda h: BlockOutput(hidden_states=h, note=torch.ones(2)),
}


class Fake(nn.Module):
    """Doubles its input and returns it in some container."""

    def __init__(self, wrap: Callable[[Tensor], Any] = OUTPUTS["tensor"]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, h: Tensor) -> Any:
        return self.wrap(2 * h)


def first_of(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else parts_of(output)[0]
    return hidden


def rest_of(output: Any) -> list[Any]:
    return [] if isinstance(output, Tensor) else parts_of(output)[1:]


def parts_of(output: Any) -> list[Any]:
    return list(output.values() if isinstance(output, ModelOutput) else output)


def chain(blocks: Sequence[nn.Module], h: Tensor) -> Tensor:
    for block in blocks:
        h = first_of(block(h))
    return h


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model("llama")


# --- what a block may return ---


@pytest.mark.parametrize("kind", OUTPUTS)
@pytest.mark.parametrize("per_row", [True, False])
def test_every_row_is_shifted_whatever_container_a_block_returns(kind: str, per_row: bool) -> None:
    """Faults 3 and 4: B=3, all rows; the container and what else is in it stay as they were."""
    block, h = Fake(OUTPUTS[kind]), noise(3, 5, WIDTH)
    addition = noise(3, WIDTH, seed=1) if per_row else noise(WIDTH, seed=1)
    plain = block(h)
    with steer([block], {0: addition}), record([block]) as states:
        output = block(h)
    assert type(output) is type(plain)
    assert len(rest_of(output)) == len(rest_of(plain))
    for kept, original in zip(rest_of(output), rest_of(plain), strict=True):
        assert kept is original or torch.equal(kept, original)
    for row in range(3):
        for position in range(5):
            expected = 2 * h[row, position] + (addition[row] if per_row else addition)
            assert torch.equal(first_of(output)[row, position], expected)
            assert torch.equal(states[0][row, position], expected)
    assert torch.equal(first_of(block(h)), 2 * h)


def test_the_blocks_own_tensor_is_not_written_to() -> None:
    """A block that hands out a tensor it keeps (a view, a cached value) must not find it changed."""
    kept = noise(2, 3, WIDTH)
    before = kept.clone()
    block = Fake(lambda h: kept)
    with steer([block], {0: torch.ones(WIDTH)}):
        block(noise(2, 3, WIDTH))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("output", [noise(4, WIDTH), (None, noise(2, 4, WIDTH)), "text"])
def test_a_block_without_hidden_states_is_an_error(output: Any) -> None:
    """Never a silent shift of something else, such as a batch row (fault 3)."""
    block = Fake(lambda h: output)
    with pytest.raises(TypeError, match="batch, tokens, d_model"), steer([block], {0: torch.ones(WIDTH)}):
        block(noise(2, 4, WIDTH))
    assert hook_count(block) == 0


# --- numbers ---


def test_sums_are_float32_and_are_cast_once() -> None:
    """Contract 5, fault 26: sixteen 0.9 on 300 are 314 in bfloat16; added one at a time they would be lost."""
    block, h = Fake(), torch.full((1, 1, WIDTH), 150.0, dtype=torch.bfloat16)
    provenance = Provenance("m", "f", "t", "user", "response", "p", (), "bfloat16", "1", "5", "2")
    columns = tuple(Column(f"t{i}", 0, 0.9, 300.0, (), provenance) for i in range(16))
    basis = Basis(columns, torch.ones(WIDTH, 16))
    additions = basis.additions({column.trait: 1.0 for column in columns})
    assert additions[0].dtype == torch.float32
    with steer([block], additions):
        output = block(h)
    assert output.dtype == torch.bfloat16
    assert output.flatten().tolist() == [314.0] * WIDTH
    one_at_a_time = block(h)
    for _ in range(16):
        one_at_a_time = one_at_a_time + torch.tensor(0.9, dtype=torch.bfloat16)
    assert one_at_a_time.flatten().tolist() == [300.0] * WIDTH


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_another_number_of_rows_is_an_error(rows: int) -> None:
    """One row is not quietly spread over three."""
    block = Fake()
    with pytest.raises(ValueError, match=f"{rows} rows, the batch has 3"), steer([block], {0: torch.ones(rows, WIDTH)}):
        block(noise(3, 2, WIDTH))
    assert hook_count(block) == 0


# --- contexts ---


def test_nested_contexts_add_up_and_unwind_in_any_order() -> None:
    """Fault 16."""
    block, h = Fake(), noise(2, 3, WIDTH)
    one, ten = steer([block], {0: torch.full((WIDTH,), 1.0)}), steer([block], {0: torch.full((WIDTH,), 10.0)})
    one.__enter__()
    ten.__enter__()
    assert torch.allclose(block(h), 2 * h + 11)
    one.__exit__(None, None, None)  # the outer one first
    assert torch.equal(block(h), 2 * h + 10)
    ten.__exit__(None, None, None)
    assert torch.equal(block(h), 2 * h)
    assert hook_count(block) == 0


@pytest.mark.parametrize("recorder_first", [True, False])
def test_a_recorder_sees_steering_whichever_was_entered_first(recorder_first: bool) -> None:
    blocks, h = [Fake(), Fake()], noise(2, 3, WIDTH)
    additions = {0: noise(WIDTH, seed=1)}
    if recorder_first:
        with record(blocks) as states, steer(blocks, additions):
            chain(blocks, h)
    else:
        with steer(blocks, additions), record(blocks) as states:
            chain(blocks, h)
    assert torch.equal(states[0], 2 * h + additions[0])
    assert torch.equal(states[1], 2 * (2 * h + additions[0]))


def test_a_foreign_hook_that_returns_nothing_does_not_undo_steering() -> None:
    """Fault 16: before or after, a later hook returning None keeps an earlier replacement; nobody's hook is removed."""
    block, h, seen = Fake(), noise(1, 2, WIDTH), []
    block.register_forward_hook(lambda module, arguments, output: seen.append(output))
    with steer([block], {0: torch.ones(WIDTH)}):
        block.register_forward_hook(lambda module, arguments, output: seen.append(output))
        assert torch.equal(block(h), 2 * h + 1)
    assert all(torch.equal(output, 2 * h + 1) for output in seen)
    seen.clear()
    assert torch.equal(block(h), 2 * h)
    assert len(seen) == 2


@contextmanager
def entered(kind: str, layers: Sequence[nn.Module], indices: Sequence[int]) -> Iterator[None]:
    """Either context on the given layers."""
    context: AbstractContextManager[Any] = (
        record(layers, indices) if kind == "record" else steer(layers, {z: torch.ones(WIDTH) for z in indices})
    )
    with context:
        yield


@pytest.mark.parametrize("kind", ["record", "steer"])
@pytest.mark.parametrize("bad", [99, LAYERS, -1])
def test_a_layer_that_does_not_exist_is_one_clear_error(lm: LanguageModel, kind: str, bad: int) -> None:
    """Fault 14: named with the layers there are, not hidden by the clean-up, and no hook left on the good ones."""
    hooks = hook_count(lm.model)
    with pytest.raises(IndexError, match=rf"layer {bad} .*0 to {LAYERS - 1}") as caught:  # noqa: SIM117
        with entered(kind, lm.layers, [0, 1, bad, 2]):
            pytest.fail("entered")
    assert caught.value.__context__ is None
    assert hook_count(lm.model) == hooks


class Refuses(Fake):
    def register_forward_hook(self, *arguments: Any, **keywords: Any) -> Any:
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("kind", ["record", "steer"])
def test_a_registration_that_fails_half_way_leaves_no_hook(kind: str) -> None:
    """Contract 6, fault 16: the third of five raises."""
    blocks = [Fake(), Fake(), Refuses(), Fake(), Fake()]
    with pytest.raises(RuntimeError, match="no hooks here"), entered(kind, blocks, range(5)):
        pytest.fail("entered")
    assert [hook_count(block) for block in blocks] == [0] * 5


@pytest.mark.parametrize("kind", ["record", "steer"])
def test_an_exception_inside_leaves_no_hook(kind: str) -> None:
    """Contract 6."""
    blocks = [Fake(), Fake()]
    with pytest.raises(KeyboardInterrupt), entered(kind, blocks, range(2)):
        raise KeyboardInterrupt
    assert [hook_count(block) for block in blocks] == [0, 0]


# --- a real network ---


def test_a_warmed_model_shows_steering_everywhere_and_keeps_its_hooks() -> None:
    """Fault 17: transformers installs permanent hooks at the first output_hidden_states=True."""
    lm, ids = tiny_model("llama"), torch.tensor([prompt_of(9), prompt_of(9, 1)])
    fresh = hook_count(lm.model)
    with torch.no_grad():
        before = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
        warmed = hook_count(lm.model)
        assert warmed > fresh, "this transformers warms no model; the test is empty"
        additions = push(1, 3.0)
        with record(lm.layers) as states, steer(lm.layers, additions):
            after = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
        again = lm.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[2], before[2] + additions[1])
    assert torch.equal(states[1], after[2])
    assert torch.equal(states[2], after[3])
    assert hook_count(lm.model) == warmed
    assert len(again) == LAYERS + 1
    assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))


def test_a_bare_forward_of_three_rows_works_while_steering(lm: LanguageModel) -> None:
    """Fault 6b: no position_ids, no mask; each row's logits are those of its own forward."""
    ids = torch.tensor([prompt_of(7, seed) for seed in range(3)])
    additions = torch.stack([push(1, c)[1] for c in (5.0, 0.0, -5.0)])
    with torch.no_grad():
        with steer(lm.layers, {1: additions}):
            logits = lm.model(ids).logits
        for row in range(3):
            with steer(lm.layers, {1: additions[row]}):
                alone = lm.model(ids[row : row + 1]).logits[0]
            assert torch.allclose(logits[row], alone, atol=1e-4)
        assert torch.allclose(logits[1], lm.model(ids[1:2]).logits[0], atol=1e-4)
    assert not torch.allclose(logits[0], lm.model(ids[:1]).logits[0], atol=1e-1)


@pytest.mark.parametrize(
    ("positions", "length", "steered"), [("generated", 9, [0, 1, 1, 1, 1, 1]), ("all", 9, [1] * 6), ("all", 1, [1] * 5)]
)
def test_steering_is_applied_in_every_forward_it_should_be(
    lm: LanguageModel, positions: str, length: int, steered: list[int]
) -> None:
    """Fault 31: forwards of the network, and how many hooks of ours the layer had when each one reached it."""
    engine = TransformersEngine(lm)  # tries the model out; that is not counted
    base, applied, forwards = len(lm.layers[2]._forward_hooks), [], []
    handles = [
        lm.model.register_forward_pre_hook(lambda module, arguments: forwards.append(1)),
        lm.layers[2].register_forward_pre_hook(lambda block, a: applied.append(len(block._forward_hooks) - base)),
    ]
    try:
        request = greedy(prompt_of(length), 5, additions=push(2, 1.0), positions=positions, stop_ids=frozenset())
        generate(engine, request)
        assert applied == steered
        assert len(forwards) == len(steered)
        applied.clear()
        generate(engine, greedy(prompt_of(length), 5, stop_ids=frozenset()))
        assert applied == [0] * len(steered), "contract 2: an unsteered batch has no hook at all"
    finally:
        engine.close()
        for handle in handles:
            handle.remove()
