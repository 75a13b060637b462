"""What ``load_model`` takes: dtypes, devices, device maps, quantisation; and that none of them changes the model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import blocks_of, decode_without_cache, greedy, prompt_of, push
from tiny import LAYERS, WIDTH, tiny_model, tiny_network, tiny_tokenizer
from transformers.utils import logging as transformers_logging

from traitbasis import model as model_module
from traitbasis.cpu import PackedLinear
from traitbasis.engines.base import Request, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import ModelError
from traitbasis.hooks import record, steer
from traitbasis.model import LanguageModel, fingerprint, load_model

PARTS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
STRONG = 30.0


def saved(path: Path, dtype: torch.dtype = torch.float32) -> Path:
    tiny_network("llama", dtype=dtype).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 checkpoint."""
    return saved(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bfloat16 checkpoint."""
    return saved(tmp_path_factory.mktemp("models") / "tiny-llama", torch.bfloat16)


def refused(folder: Path | str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        load_model(str(folder), **options)
    return str(caught.value)


REQUESTS = [
    greedy(prompt_of(23), 16),
    greedy(prompt_of(40), 16, additions=push(0, STRONG)),
    greedy(prompt_of(40), 16, additions=push(2, STRONG)),
    greedy(prompt_of(9), 16, additions=push(1, -STRONG) | push(3, STRONG)),
]


def expected_tokens(request: Request) -> tuple[int, ...]:
    """By full forwards of the network that was saved."""
    network, prompt = tiny_network("llama"), request.prompt_ids
    found = decode_without_cache(network, blocks_of(network), prompt, request.additions, 16, len(prompt) - 1)
    return tuple(found)


def tokens(lm: LanguageModel) -> list[tuple[int, ...]]:
    engine = TransformersEngine(lm)
    try:
        return [generate(engine, request).token_ids for request in REQUESTS]
    finally:
        engine.close()


# --- dtypes ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_model_is_loaded_in_the_dtype_that_is_asked_for(folder: Path, dtype: str) -> None:
    lm = load_model(str(folder), dtype=dtype)
    assert {str(parameter.dtype) for parameter in lm.model.parameters()} == {f"torch.{dtype}"}


def test_on_a_cpu_auto_is_float32(small_folder: Path) -> None:
    """Where results are repeatable in any batch (contract 3), whatever the checkpoint's dtype; the same model."""
    lm = load_model(str(small_folder), device="cpu")
    assert lm.model.dtype == torch.float32 and lm.device.type == "cpu"
    assert lm.fingerprint == fingerprint(tiny_network("llama"))


def test_with_a_device_map_auto_is_the_checkpoints_own(small_folder: Path) -> None:
    assert load_model(str(small_folder), device_map={"": "cpu"}).model.dtype == torch.bfloat16


@pytest.mark.parametrize("measured", [torch.float32, torch.bfloat16], ids=str)
def test_fastest_is_what_is_measured_for_the_models_width(
    folder: Path, measured: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(model_module, "faster_dtype", lambda width, rows: asked.append((width, rows)) or measured)
    assert load_model(str(folder), dtype="fastest", device="cpu").model.dtype == measured
    assert load_model(str(folder), dtype="fastest", device="cpu", rows=256).model.dtype == measured
    assert asked == [(WIDTH, 8), (WIDTH, 256)]


def test_fastest_is_one_of_the_two(folder: Path) -> None:
    assert load_model(str(folder), dtype="fastest").model.dtype in (torch.float32, torch.bfloat16)


# --- what is refused ---


def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: Any, **options: Any) -> None:
        raise AssertionError("the checkpoint was read first")

    monkeypatch.setattr(model_module.AutoModelForCausalLM, "from_pretrained", read)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, ["'int3'", "auto", "fastest", "float32", "bfloat16", "float16"]),
        ({"quantize": "7bit"}, ["'7bit'", "8bit", "4bit"]),
        ({"device": "cpu", "device_map": "auto"}, ["'cpu'", "'auto'", "not both"]),
        ({"device": "abacus"}, ["'abacus'"]),
        ({"device": "cuda:99"}, ["'cuda:99'"]),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(
    folder: Path, options: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    nothing_is_read(monkeypatch)
    message = refused(folder, **options)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("device_map", ["nonsense", {"": "abacus"}, {"": "cuda:99"}], ids=str)
def test_a_device_map_that_cannot_be_is_a_model_error(folder: Path, device_map: Any) -> None:
    message = refused(folder, device_map=device_map)
    assert "tiny-llama" in message and len(message.splitlines()) == 1, message


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_quantisation_without_bitsandbytes_says_what_to_install(folder: Path, quantize: str) -> None:
    message = refused(folder, quantize=quantize)
    assert "tiny-llama" in message and "pip install" in message and "bitsandbytes" in message


@pytest.mark.parametrize("name", ["./gone", "/gone/too", "~/gone"])
def test_a_folder_that_is_not_there_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert name in refused(name)


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_a_damaged_checkpoint_is_a_model_error_that_names_it(damage: str, tmp_path: Path) -> None:
    """And leaves the loaders' progress bars as they were."""
    path = saved(tmp_path / "broken-one")
    (path / damage).write_bytes(b"{")
    assert transformers_logging.is_progress_bar_enabled()
    assert "broken-one" in refused(path)
    assert transformers_logging.is_progress_bar_enabled()


# --- the same model, however it is loaded ---


@pytest.fixture(scope="module")
def plain(folder: Path) -> LanguageModel:
    return load_model(str(folder))


def test_a_loaded_model_is_packed_and_writes_what_the_saved_one_writes(plain: LanguageModel) -> None:
    """Contract 3, with the weights laid out for speed; the fingerprint is the saved network's."""
    linears = [module for module in plain.model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 * LAYERS + 1 and all(type(linear) is PackedLinear for linear in linears)
    assert plain.name == "tiny-llama" and plain.fingerprint == fingerprint(tiny_network("llama"))
    assert tokens(plain) == [expected_tokens(request) for request in REQUESTS]
    assert len(set(tokens(plain))) == len(REQUESTS)


def on_disk(*layers: int) -> dict[str, Any]:
    """Some of the layers on the disk, all else on the CPU."""
    places = {f"model.layers.{z}": "disk" if z in layers else "cpu" for z in range(LAYERS)}
    return {**dict.fromkeys(PARTS, "cpu"), **places}


MAPS: dict[str, Any] = {
    "all on the cpu": {"": "cpu"},
    "auto": "auto",
    "sequential": "sequential",
    "last layers on disk": on_disk(2, 3),
    "first layers on disk": on_disk(0, 1),
    "all layers on disk": on_disk(*range(LAYERS)),
}


@pytest.mark.parametrize("name", MAPS)
def test_a_spread_model_is_the_same_model(
    folder: Path, plain: LanguageModel, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contracts 3 and 7: fingerprint, hidden states, and greedy tokens, steered and not."""
    monkeypatch.chdir(tmp_path)
    lm = load_model(str(folder), device_map=MAPS[name], dtype="float32")
    on_disk = [z for z, block in enumerate(lm.layers) if next(block.parameters()).device.type == "meta"]
    places = MAPS[name] if isinstance(MAPS[name], dict) else {}
    assert on_disk == [z for z in range(LAYERS) if places.get(f"model.layers.{z}") == "disk"]
    assert lm.fingerprint == plain.fingerprint
    ids, additions = torch.tensor([prompt_of(12)]), push(1, 5.0)
    states = []
    for one in (plain, lm):
        with torch.inference_mode(), record(one.layers) as seen, steer(one.layers, additions):
            one.model(input_ids=ids, use_cache=False)
        states.append(torch.stack([seen[z][0] for z in range(LAYERS)]))
    torch.testing.assert_close(states[1], states[0], rtol=1e-4, atol=1e-4)
    assert tokens(lm) == tokens(plain)


@pytest.mark.parametrize(
    "device_map", [{"": "disk"}, {**on_disk(3), "model.embed_tokens": "disk"}], ids=["all", "ends"]
)
def test_with_its_embedding_on_disk_a_model_works_or_is_refused(
    folder: Path, plain: LanguageModel, device_map: Any
) -> None:
    """Never another error than one that says so."""
    try:
        lm = load_model(str(folder), device_map=device_map)
    except ModelError as error:
        assert "disk" in str(error) or "offload" in str(error)
    else:
        assert lm.fingerprint == plain.fingerprint and tokens(lm) == tokens(plain)


def test_a_vector_of_the_plain_model_is_accepted_on_a_spread_one(folder: Path) -> None:
    """Contract 7: it is the weights that count, not where they lie."""
    one, other = tiny_model(), load_model(str(folder), device_map=on_disk(3))
    assert (one.fingerprint, one.template_hash) == (other.fingerprint, other.template_hash)
