"""Threads, packed weights and the faster dtype on a CPU: the same numbers and the same model, only sooner."""

from __future__ import annotations

import copy
import io
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import prompt_of
from tiny import WIDTH, tiny_network
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from traitbasis import cpu
from traitbasis.cpu import (
    PackedLinear,
    faster_dtype,
    free_memory,
    packed_products,
    prepare_weights,
    set_threads,
    usable_cpus,
)
from traitbasis.model import fingerprint

DTYPES = (torch.float32, torch.bfloat16)
IN, OUT = 48, 40
SHAPES = ((1, IN), (2, IN), (8, IN), (64, IN), (65, IN), (300, IN), (IN,), (0, IN), (1, 1, IN), (8, 1, IN), (3, 70, IN))


def layer(dtype: torch.dtype = torch.float32, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(IN, OUT, bias=bias).to(dtype)


def packed_layer(dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    linear = layer(dtype, bias)
    assert prepare_weights([linear]) == 1
    return linear


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def product(linear: nn.Linear, x: Tensor) -> Tensor:
    """What a linear layer is to give, in float64."""
    found = x.double() @ linear.weight.detach().double().T
    return found if linear.bias is None else found + linear.bias.detach().double()


def assert_gives(linear: nn.Linear, x: Tensor, expected: Tensor | None = None) -> None:
    with torch.inference_mode():
        found = linear(x)
    expected = product(linear, x) if expected is None else expected
    assert found.dtype == x.dtype and found.shape == expected.shape
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[x.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def pack_network(network: PreTrainedModel) -> int:
    """As ``load_model`` does it."""
    blocks = [*network.model.layers, network.get_output_embeddings()]
    return prepare_weights(blocks, network.get_input_embeddings().weight)


def logits_of(network: nn.Module, tokens: int = 20) -> Tensor:
    """Few enough rows for the packed weights."""
    with torch.inference_mode():
        logits: Tensor = network(input_ids=torch.tensor([prompt_of(tokens)]), use_cache=False).logits
    return logits


def linears(network: nn.Module) -> list[nn.Linear]:
    return [module for module in network.modules() if isinstance(module, nn.Linear)]


# --- threads ---


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.parametrize(
    ("quota", "cpus"),
    [
        ("max 100000\n", 8),
        ("200000 100000\n", 2),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("1600000 100000\n", 8),
        (None, 8),
        ("", 8),
        ("200000\n", 8),
        ("many of them\n", 8),
    ],
)
def test_usable_cpus_are_those_of_affinity_and_quota(
    quota: str | None, cpus: int, eight_cpus: None, tmp_path: Path
) -> None:
    """Half a CPU is one thread; a file that is missing or reads otherwise is no limit."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(quota)
    assert usable_cpus(tmp_path / "cpu.max") == cpus


def test_where_there_is_no_affinity_all_cpus_are_usable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert usable_cpus(tmp_path / "cpu.max") == os.cpu_count()


@pytest.fixture
def four_threads() -> Iterator[None]:
    """Torch set to four, as on a machine whose cores it counts."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_cpu() -> Iterator[None]:
    """This thread may run on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


def test_there_are_no_more_threads_than_cpus(
    four_threads: None, one_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert set_threads() == 1 and torch.get_num_threads() == 1


def test_omp_num_threads_is_left_alone(four_threads: None, one_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads() == 4 and torch.get_num_threads() == 4


def test_an_explicit_number_of_threads_wins(four_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert set_threads(3) == 3 and torch.get_num_threads() == 3


# --- packed weights: the same numbers ---


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_layer_gives_the_product(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    assert_gives(
        packed_layer(dtype, bias), rows(*shape, dtype=dtype), product(layer(dtype, bias), rows(*shape, dtype=dtype))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_input_that_is_not_contiguous_is_read_right(dtype: torch.dtype) -> None:
    linear = packed_layer(dtype)
    assert_gives(linear, rows(IN, 8, dtype=dtype).T)
    assert_gives(linear, rows(8, 2 * IN, dtype=dtype)[:, ::2])
    assert_gives(linear, rows(6, 3, IN, dtype=dtype).transpose(0, 1))


@pytest.mark.parametrize(("dtype", "fewest"), [(torch.float32, 2), (torch.bfloat16, 1)], ids=str)
def test_the_packed_copy_serves_few_rows_and_no_others(
    dtype: torch.dtype, fewest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps the tests here honest: they do go through the packed copy, and torch's own product does the rest."""
    linear, own = packed_layer(dtype), nn.functional.linear
    plain: list[int] = []
    monkeypatch.setattr(nn.functional, "linear", lambda x, *rest: plain.append(len(x)) or own(x, *rest))
    with torch.inference_mode(), packed_products():
        for count in (1, 2, 8, 64, 65, 300):
            linear(rows(count, IN, dtype=dtype))
    assert plain == [count for count in (1, 2, 8, 64, 65, 300) if not fewest <= count <= 64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_network_gives_its_logits(dtype: torch.dtype) -> None:
    network = tiny_network("llama", dtype=dtype)
    expected = logits_of(network)
    assert pack_network(network) == 7 * 4 + 1
    distance = (logits_of(network).float() - expected.float()).norm() / expected.float().norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.05)


def test_an_input_of_another_dtype_is_refused_as_torch_does() -> None:
    linear = packed_layer()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="dtype"):
        linear(rows(8, IN, dtype=torch.float64))


# --- packed weights: the same model ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packing_changes_nothing_that_can_be_seen_of_a_model(dtype: torch.dtype) -> None:
    """State dict, shapes, values, classes and the fingerprint (contract 7)."""
    network = tiny_network("qwen2", dtype=dtype)
    before, names = fingerprint(network), [name for name, _ in network.named_modules()]
    state = {name: value.clone() for name, value in network.state_dict().items()}
    count = len(linears(network))
    assert pack_network(network) == count
    after = network.state_dict()
    assert list(after) == list(state)
    for name, value in after.items():
        assert value.dtype == dtype and value.shape == state[name].shape and torch.equal(value, state[name]), name
    assert [name for name, _ in network.named_modules()] == names
    assert len(linears(network)) == count and all(type(linear) is PackedLinear for linear in linears(network))
    assert fingerprint(network) == before


def test_other_layers_than_plain_linear_ones_are_left_alone() -> None:
    """Quantised and adapted ones are laid out their own way."""

    class Other(nn.Linear):
        pass

    network = nn.Sequential(layer(), Other(IN, OUT), nn.Embedding(4, IN), layer().double(), layer().half())
    strides = [module.weight.stride() for module in network]
    assert prepare_weights([network]) == 1
    assert [type(module) for module in network] == [PackedLinear, Other, nn.Embedding, nn.Linear, nn.Linear]
    assert [module.weight.stride() for module in network][1:] == strides[1:]


def assigned_again_and_again(linear: nn.Linear) -> None:
    """New weights may lie where the packed ones' memory was."""
    for seed in range(20):
        linear.weight.data = rows(OUT, IN, seed=seed).to(linear.weight.dtype)
        assert_gives(linear, rows(8, IN, dtype=linear.weight.dtype))


def to_and_back(linear: nn.Linear) -> None:
    dtype = linear.weight.dtype
    for _ in range(20):
        linear.to(torch.float8_e4m3fn).to(dtype)
        assert_gives(linear, rows(8, IN, dtype=dtype))


def trained(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[nn.Linear], None]:
    def train(linear: nn.Linear) -> None:
        step = optimizer(linear.parameters(), lr=0.5)
        linear(rows(8, IN, dtype=linear.weight.dtype)).square().mean().backward()
        step.step()

    return train


def add_to_data(linear: nn.Linear) -> None:
    """As PEFT merges an adapter."""
    linear.weight.data += 1


def new_inference_parameter(linear: nn.Linear) -> None:
    """Which has no version counter."""
    with torch.inference_mode():
        linear.weight = nn.Parameter(rows(OUT, IN).to(linear.weight.dtype), requires_grad=False)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "add_": lambda linear: linear.weight.add_(1),
    "copy_": lambda linear: linear.weight.copy_(rows(OUT, IN)),
    "a slice": lambda linear: linear.weight[3].zero_(),
    "detached": lambda linear: linear.weight.detach().mul_(2),
    "assigned": lambda linear: setattr(linear.weight, "data", rows(OUT, IN).to(linear.weight.dtype)),
    "assigned again and again": assigned_again_and_again,
    "data +=": add_to_data,
    "a new parameter": lambda linear: setattr(linear, "weight", nn.Parameter(rows(OUT, IN).to(linear.weight.dtype))),
    "a new parameter for inference": new_inference_parameter,
    "state dict": lambda linear: linear.load_state_dict(layer(seed=5).state_dict()),
    "to and back": to_and_back,
    "SGD": trained(torch.optim.SGD),
    "AdamW": trained(torch.optim.AdamW),
    "fused AdamW": trained(lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_change_of_the_weight_is_seen_by_the_next_forward(dtype: torch.dtype, change: str) -> None:
    """No stale packed copy, however the weight is changed."""
    linear = packed_layer(dtype)
    before = linear.weight.detach().clone()
    with torch.set_grad_enabled("AdamW" in change or change == "SGD"):
        CHANGES[change](linear)
    assert not torch.equal(linear.weight, before)
    for count in (1, 8, 100):
        assert_gives(linear, rows(count, IN, dtype=dtype))


def test_gradients_flow_through_packed_layers_and_are_right() -> None:
    linear, x = packed_layer(), rows(8, IN).requires_grad_()
    linear(x).square().sum().backward()
    error = 2 * product(linear, x.detach())
    assert linear.weight.grad is not None and linear.bias.grad is not None and x.grad is not None
    torch.testing.assert_close(linear.weight.grad.double(), error.T @ x.detach().double(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(linear.bias.grad.double(), error.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(x.grad.double(), error @ linear.weight.detach().double(), rtol=1e-4, atol=1e-4)


def test_a_packed_network_trains_as_the_plain_one() -> None:
    networks = [tiny_network("llama") for _ in range(2)]
    pack_network(networks[1])
    ids = torch.tensor([prompt_of(20)])
    for network in networks:
        network(input_ids=ids, labels=ids).loss.backward()
    for (name, plain), (_, packed) in zip(*(network.named_parameters() for network in networks), strict=True):
        assert plain.grad is not None and packed.grad is not None, name
        assert (plain.grad - packed.grad).norm() <= 1e-4 * plain.grad.norm() + 1e-7, name


def by_pickle(network: Any) -> Any:
    return pickle.loads(pickle.dumps(network))


def by_torch(network: Any) -> Any:
    file = io.BytesIO()
    torch.save(network, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, by_pickle, by_torch])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_copy_of_a_packed_network_is_the_same_network(dtype: torch.dtype, how: Callable[[Any], Any]) -> None:
    """And is one of its own: a change of the copy leaves the original alone."""
    network = tiny_network("llama", dtype=dtype)
    pack_network(network)
    expected = logits_of(network)
    twin = how(network)
    assert fingerprint(twin) == fingerprint(network)
    distance = (logits_of(twin).float() - expected.float()).norm() / expected.float().norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.05)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.zero_()
    assert torch.equal(logits_of(network), expected) and not torch.equal(logits_of(twin), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_packed_network_is_saved_and_loaded_as_ever(dtype: torch.dtype, tmp_path: Path) -> None:
    networks = {name: tiny_network("llama", dtype=dtype) for name in ("plain", "packed")}
    pack_network(networks["packed"])
    loaded = {}
    for name, network in networks.items():
        network.save_pretrained(tmp_path / name)
        loaded[name] = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=dtype).eval()
    state = networks["plain"].state_dict()
    assert all(torch.equal(value, state[key]) for key, value in loaded["packed"].state_dict().items())
    assert torch.equal(logits_of(loaded["packed"]), logits_of(loaded["plain"]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tied_embedding_keeps_its_memory_order(dtype: torch.dtype) -> None:
    """It is looked up by rows, too; the head reads the same weight."""
    network = tiny_network("llama", dtype=dtype)
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    head.weight = embedding.weight
    expected, rows_before, place = logits_of(network), embedding.weight.detach().clone(), embedding.weight.data_ptr()
    pack_network(network)
    assert embedding.weight.is_contiguous() and embedding.weight.data_ptr() == place
    assert head.weight is embedding.weight and isinstance(head, PackedLinear)
    ids = torch.tensor([3, 270, 3])
    assert torch.equal(embedding(ids), rows_before[ids])
    distance = (logits_of(network).float() - expected.float()).norm() / expected.float().norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.05)


def test_float32_weights_are_stored_column_by_column() -> None:
    """What makes one row fast; an embedding that is not tied stays as it is."""
    network = tiny_network("llama")
    pack_network(network)
    assert all(linear.weight.stride() == (1, linear.out_features) for linear in linears(network))
    assert network.get_input_embeddings().weight.is_contiguous()


# --- where packing is not to be had ---


@pytest.mark.parametrize(("share", "packs"), [(3.9, False), (4.1, True)])
def test_copies_take_a_quarter_of_the_free_memory_at_most(
    share: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(layer(), nn.ReLU(), nn.Linear(OUT, IN))
    monkeypatch.setattr(cpu, "free_memory", lambda: share * 2 * IN * OUT * 4)
    expected = network(rows(8, IN)).detach()
    assert prepare_weights([network]) == (2 if packs else 0)
    assert {type(linear) for linear in linears(network)} == {PackedLinear if packs else nn.Linear}
    with torch.inference_mode():
        torch.testing.assert_close(network(rows(8, IN)), expected)


def test_free_memory_is_some_of_the_machines() -> None:
    assert 2**20 < free_memory() < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


PACKERS: dict[str, Callable[[Tensor], Any]] = {
    "gone": lambda weight: torch.ops.mkl._operator_of_another_version(weight),
    "of another signature": lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), 32, "more"),
    "of another meaning": lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(2 * weight.contiguous(), 32),
    "not a number": lambda weight: torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous() * torch.nan, 32),
}


@pytest.mark.parametrize("packer", PACKERS)
def test_without_operators_that_do_what_they_did_nothing_is_packed(
    packer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are private to torch."""
    monkeypatch.setitem(cpu._PACKERS, torch.float32, PACKERS[packer])
    linear = layer()
    assert prepare_weights([linear]) == 0
    assert type(linear) is nn.Linear
    assert_gives(linear, rows(8, IN), product(layer(), rows(8, IN)))


# --- PEFT ---


@pytest.fixture
def adapted() -> tuple[Any, Tensor]:
    """A packed network with a LoRA adapter put on, and the logits of the same without packing."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    networks = [tiny_network("llama") for _ in range(2)]
    pack_network(networks[1])
    made = []
    for network in networks:
        torch.manual_seed(0)
        made.append(peft.get_peft_model(network, config).eval())
    return made[1], logits_of(made[0])


def near(found: Tensor, expected: Tensor) -> bool:
    return bool((found - expected).norm() < 1e-4 * expected.norm())


def test_an_adapter_on_a_packed_network_works(adapted: tuple[Any, Tensor]) -> None:
    network, expected = adapted
    assert near(logits_of(network), expected)
    assert not near(logits_of(tiny_network("llama")), expected), "the adapter does something"
    network(input_ids=torch.tensor([prompt_of(9)])).logits.sum().backward()
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    assert all((gradient is not None) == ("lora_" in name) for name, gradient in gradients.items())


def test_an_adapter_merged_into_a_packed_network_works(adapted: tuple[Any, Tensor]) -> None:
    """PEFT adds to ``weight.data``, which no version counter sees."""
    network, expected = adapted
    assert near(logits_of(network.merge_and_unload()), expected)


# --- the faster dtype ---


def fake_clock(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[torch.dtype, int], float]) -> list[torch.dtype]:
    """A clock that only products move, by ``seconds(dtype, number of the product)``; the products, in a list."""
    seen: list[torch.dtype] = []
    counts: Counter[torch.dtype] = Counter()
    now = 0.0

    def linear(x: Tensor, weight: Tensor) -> None:
        nonlocal now
        now += seconds(x.dtype, counts[x.dtype])
        counts[x.dtype] += 1
        seen.append(x.dtype)

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr(cpu, "perf_counter", lambda: now)
    return seen


@pytest.mark.parametrize(
    ("float32", "bfloat16", "expected"),
    [
        (1.0, 1.0, torch.float32),
        (1.28, 1.0, torch.float32),
        (1.32, 1.0, torch.bfloat16),
        (1.0, 3.0, torch.float32),
        (4.0, 1.0, torch.bfloat16),
    ],
)
def test_bfloat16_must_be_worth_its_rounding(
    float32: float, bfloat16: float, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1.3 times as fast, or it is float32."""
    seen = fake_clock(monkeypatch, lambda dtype, _: float32 if dtype == torch.float32 else bfloat16)
    assert faster_dtype(4096) is expected
    assert seen.count(torch.float32) == seen.count(torch.bfloat16) > 0


def test_two_hiccups_do_not_choose_the_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = fake_clock(monkeypatch, lambda dtype, number: 100.0 if dtype == torch.float32 and number < 2 * 4 else 1.0)
    assert faster_dtype(4096) is torch.float32
    assert seen[:8] == [torch.float32] * 4 + [torch.bfloat16] * 4, "in turns"


def test_the_measurement_is_short_for_a_small_model_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "Takes less than a second": some ten thousand products of any size do, a million do not."""
    seen = fake_clock(monkeypatch, lambda dtype, _: 1.0)
    faster_dtype(WIDTH)
    assert len(seen) < 20_000


def test_one_of_the_two_dtypes_is_measured_to_be_faster() -> None:
    assert faster_dtype(1024, repeats=1) in DTYPES
