"""Pairs x model -> vector -> file and back, against computations of our own (faults 6a, 9, 11, 19, 37, 42)."""

from __future__ import annotations

import json
import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from samples import sample_document, sample_pair, sample_set, sample_vector
from tiny import CHATML, LAYERS, WIDTH, tiny_model, tiny_network, tiny_tokenizer
from transformers import __version__ as transformers_version

from traitbasis import __version__
from traitbasis.chat import render_prompt
from traitbasis.errors import ArtifactError, ModelError, PairError
from traitbasis.extract import extract, mean_cosine
from traitbasis.model import LanguageModel, prepare_model
from traitbasis.pairs import Pair, PairSet, pair_set_hash
from traitbasis.trait_vector import Provenance, TraitVector


def block_outputs(lm: LanguageModel, ids: list[int]) -> list[np.ndarray[Any, Any]]:
    """What every block puts out for one row, alone and unpadded: ``output_hidden_states``, and a hook for the last."""
    last: list[torch.Tensor] = []
    handle = lm.layers[-1].register_forward_hook(
        lambda m, a, out: last.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    with torch.no_grad():
        states = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    handle.remove()
    return [state[0].float().numpy() for state in (*states[1:-1], last[0])]


def by_hand(lm: LanguageModel, pairs: tuple[Pair, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """The paper's formula in float64 numpy. Byte-level: prompt and reply tokenise apart as together."""
    differences, norms = [], []
    for pair in pairs:
        sides = []
        prompt = lm.tokenizer(render_prompt(lm.tokenizer, pair.context, "user"), add_special_tokens=False)["input_ids"]
        for text in (pair.positive, pair.negative):
            reply = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
            states = np.stack(block_outputs(lm, prompt + reply)).astype(np.float64)[:, len(prompt) :]
            sides.append(states.mean(1))
            norms.append(np.linalg.norm(states, axis=-1).mean(1))
        differences.append(sides[0] - sides[1])
    unit = [d / np.linalg.norm(d, axis=-1, keepdims=True) for d in differences]
    cosines = [(unit[i] * unit[j]).sum(-1) for i in range(len(unit)) for j in range(i)]
    return {"vector": np.mean(differences, 0), "norms": np.mean(norms, 0), "agreement": np.mean(cosines, 0)}


# --- extraction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_vector_is_the_mean_difference_of_response_means(architecture: str) -> None:
    lm, pair_set = tiny_model(architecture), sample_set(4)
    expected = by_hand(lm, pair_set.pairs)
    vector = extract(lm, pair_set)
    assert vector.vector.shape == (LAYERS, WIDTH) and vector.vector.dtype == torch.float32
    np.testing.assert_allclose(vector.vector, expected["vector"], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(vector.layer_norms, expected["norms"], rtol=1e-5)
    np.testing.assert_allclose(vector.agreement, expected["agreement"], rtol=1e-3, atol=1e-5)


def echoing_model(direction: torch.Tensor) -> LanguageModel:
    """Blocks that add nothing, so every hidden state is its token's embedding; upper case is lower case + direction."""
    network = tiny_network("llama")
    tokenizer = tiny_tokenizer()
    with torch.no_grad():
        for block in network.model.layers:
            block.self_attn.o_proj.weight.zero_()
            block.mlp.down_proj.weight.zero_()
        table = network.model.embed_tokens.weight
        for lower in "abcdefghijklmnopqrstuvwxyz":
            small, large = (tokenizer.convert_tokens_to_ids(c) for c in (lower, lower.upper()))
            table[large] = table[small] + direction
    return prepare_model("echo", network, tokenizer)


@pytest.mark.parametrize("n", [1, 2])
def test_the_direction_is_d_when_positives_are_negatives_plus_d(n: int) -> None:
    """Fault 11: centring or taking the wrong half would bend it. Contexts differ; they must not count."""
    d = torch.linspace(-1, 2, WIDTH)
    texts = ["where is it", "i would wait and wait for order after order"]
    pairs = [
        sample_pair(
            i,
            context=[{"agent": ["HELLO", "say"][i]}],
            facts=["i"],
            negative=text.replace(" ", ""),
            positive=text.replace(" ", "").upper(),
        )
        for i, text in enumerate(texts[:n])
    ]
    vector = extract(echoing_model(d), PairSet.model_validate(sample_document(*pairs)))
    torch.testing.assert_close(vector.vector, d.expand(LAYERS, WIDTH), rtol=1e-5, atol=1e-5)
    if n > 1:
        torch.testing.assert_close(vector.agreement, torch.ones(LAYERS))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_side_and_batch_size_do_not_matter(side: str) -> None:
    """Fault 6a: a right-padding tokenizer reads pads as replies elsewhere."""
    pair_set = sample_set(5)
    alone = extract(tiny_model("qwen2"), pair_set, batch_size=1)
    lm = tiny_model("qwen2")
    lm.tokenizer.padding_side = side
    done: list[int] = []
    for batch_size in (3, 64):
        batched = extract(lm, pair_set, batch_size=batch_size, progress=done.append)
        torch.testing.assert_close(batched.vector, alone.vector, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(batched.layer_norms, alone.layer_norms)
    assert done == [3, 3, 3, 1, 10]


def test_the_pairs_that_count_are_the_ones_asked_for() -> None:
    uses = ("default", "extra", "heldout", "default")
    pair_set = PairSet.model_validate(sample_document(*(sample_pair(i, use=use) for i, use in enumerate(uses))))
    lm = tiny_model()
    assert extract(lm, pair_set).provenance.pair_ids == ("pair-0", "pair-3")
    assert extract(lm, pair_set, n=3).provenance.pair_ids == ("pair-0", "pair-3", "pair-1")
    assert extract(lm, pair_set, pairs=pair_set.pairs[2:3]).provenance.pair_ids == ("pair-2",)
    with pytest.raises(PairError, match="no pairs to extract from"):
        extract(lm, pair_set, pairs=[])


def test_span_and_header_change_the_vector() -> None:
    lm, pair_set = tiny_model(), sample_set()
    vectors = [
        extract(lm, pair_set, span=span, as_=as_).vector
        for span in ("response", "conversation")
        for as_ in ("user", "assistant")
    ]  # type: ignore[arg-type]
    assert all(not torch.allclose(vectors[i], vectors[j]) for i in range(4) for j in range(i))


def test_agreement_of_opposites_is_minus_one_and_of_one_pair_is_unknown() -> None:
    difference = torch.randn(1, 3, 8)
    torch.testing.assert_close(mean_cosine(torch.cat([difference, -2 * difference])), -torch.ones(3))
    assert mean_cosine(difference).isnan().all()


def test_states_that_overflow_are_refused() -> None:
    lm = tiny_model()
    with torch.no_grad():
        lm.layers[1].mlp.down_proj.weight.fill_(float("inf"))
    with pytest.raises(ModelError, match="tiny-llama gives hidden states that are not finite"):
        extract(lm, sample_set())


def test_extraction_leaves_no_hook_behind() -> None:
    """Contract 6."""
    lm = tiny_model()
    extract(lm, sample_set())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in lm.layers)


# --- the file ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_goes_all_the_way_to_a_file_and_back(dtype: torch.dtype, tmp_path: Path) -> None:
    """Fault 9."""
    lm, exact = tiny_model(dtype=dtype), extract(tiny_model(), sample_set())
    vector = extract(lm, sample_set())
    loaded = TraitVector.load(vector.save(tmp_path / "v.safetensors"))
    assert loaded.vector.dtype == torch.float32 and torch.equal(loaded.vector, vector.vector)
    assert loaded.provenance.dtype == str(dtype).removeprefix("torch.")
    cosine = torch.nn.functional.cosine_similarity(loaded.vector, exact.vector, dim=-1)
    assert (cosine > 0.9).all(), "and it is the float32 vector but for rounding"


def test_a_file_holds_everything_of_the_vector(tmp_path: Path) -> None:
    """Contract 7, fault 42: complete provenance."""
    lm, pair_set = tiny_model(), sample_set()
    vector = extract(lm, pair_set, span="conversation", as_="assistant")
    loaded = TraitVector.load(vector.save(tmp_path / "deep" / "er" / "v.safetensors"))
    for name in ("vector", "layer_norms", "agreement"):
        assert torch.equal(getattr(loaded, name), getattr(vector, name))
    assert (loaded.trait, loaded.aliases, loaded.provenance) == (vector.trait, vector.aliases, vector.provenance)
    assert loaded.provenance == Provenance(
        model="tiny-llama",
        model_fingerprint=lm.fingerprint,
        template_hash=lm.template_hash,
        as_="assistant",
        span="conversation",
        pair_set_hash=pair_set_hash(pair_set.pairs),
        pair_ids=("pair-0", "pair-1", "pair-2"),
        dtype="float32",
        traitbasis_version=__version__,
        transformers_version=transformers_version,
        torch_version=torch.__version__.split("+")[0],
    )
    assert all(getattr(loaded.provenance, field.name) for field in fields(Provenance))


def test_the_same_extraction_writes_the_same_bytes(tmp_path: Path) -> None:
    contents = set()
    for i in range(12):
        contents.add(sample_vector().save(tmp_path / f"{i}.safetensors").read_bytes())
    contents.add(TraitVector.load(tmp_path / "0.safetensors").save(tmp_path / "again.safetensors").read_bytes())
    assert len(contents) == 1
    one, two = (extract(tiny_model(), sample_set()).save(tmp_path / name).read_bytes() for name in ("a", "b"))
    assert one == two and str(tmp_path).encode() not in one


def test_the_file_is_ordinary_safetensors(tmp_path: Path) -> None:
    vector = sample_vector()
    path = vector.save(tmp_path / "v.safetensors")
    assert path.stat().st_mode & 0o777 == 0o644
    with safe_open(path, framework="np") as file:
        np.testing.assert_array_equal(file.get_tensor("vector"), vector.vector.numpy())
        assert json.loads(file.metadata()["traitbasis"])["model_fingerprint"] == "0123456789abcdef"


@pytest.mark.parametrize("failing", ["replace", "fdopen"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    failing: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "v.safetensors"
    before = sample_vector(seed=1).save(path).read_bytes()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(os, failing, fail)
        for target in (path, tmp_path / "new.safetensors"):
            with pytest.raises(type(error)):
                sample_vector(seed=2).save(target)
    assert [entry.name for entry in tmp_path.iterdir()] == ["v.safetensors"] and path.read_bytes() == before


def write_vector(path: Path, *, description: Any, **changes: Any) -> None:
    """A file with this description (JSON text), and with some tensors changed or, when None, left out."""
    vector = sample_vector()
    tensors = {"vector": vector.vector, "layer_norms": vector.layer_norms, "agreement": vector.agreement, **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path, {"traitbasis": description})


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "pickle", "flipped header"])
def test_a_damaged_file_is_an_artifact_error_naming_it(damage: str, tmp_path: Path) -> None:
    path = sample_vector().save(tmp_path / "v.safetensors")
    data = path.read_bytes()
    if damage == "pickle":
        torch.save({"vector": torch.ones(2)}, path)
    else:
        path.write_bytes(
            {"truncated": data[:-9], "text": b"hello", "empty": b"", "flipped header": b"\xff" * 8 + data[8:]}[damage]
        )
    with pytest.raises(ArtifactError, match=r"v\.safetensors"):
        TraitVector.load(path)


@pytest.mark.parametrize(
    "content",
    [
        {"description": '{"format": "traitbasis.basis/1"}'},
        {"description": "not json"},
        {"description": "{}"},
        {"description": "[]"},
        {"description": "null"},
        {"description": json.dumps({"format": "traitbasis.trait_vector/1"})},
        {"description": json.dumps({"format": "traitbasis.trait_vector/1", "trait": "x", "aliases": None})},
        {"agreement": None},
        {"vector": torch.ones(4)},
        {"layer_norms": torch.ones(3)},
    ],
)
def test_another_kind_of_file_is_an_artifact_error_naming_it(content: dict[str, Any], tmp_path: Path) -> None:
    described = {"format": "traitbasis.trait_vector/1", "trait": "x", "aliases": []}
    described |= {f.name: "x" for f in fields(Provenance)}
    write_vector(tmp_path / "v.safetensors", **{"description": json.dumps(described), **content})
    with pytest.raises(ArtifactError, match=r"v\.safetensors"):
        TraitVector.load(tmp_path / "v.safetensors")


def test_a_missing_file_or_a_folder_is_an_artifact_error(tmp_path: Path) -> None:
    for path in (tmp_path / "gone.safetensors", tmp_path):
        with pytest.raises(ArtifactError, match=f"no file {path}"):
            TraitVector.load(path)


# --- whose vector it is -----------------------------------------------------------------------------------------------


def test_a_vector_of_another_model_is_refused_with_both_names() -> None:
    """Contract 7, fault 42."""
    vector, other = extract(tiny_model("llama"), sample_set()), tiny_model("llama", seed=1)
    other = replace(other, name="stranger")
    with pytest.raises(ArtifactError, match=r"made on tiny-llama .*does not fit stranger .*again on stranger"):
        vector.provenance.check_model(other, "vector")
    vector.provenance.check_model(replace(tiny_model("llama"), name="another folder"), "vector")


def test_a_vector_is_for_its_model_in_any_dtype_but_for_one_template() -> None:
    vector = extract(tiny_model(), sample_set())
    vector.provenance.check_model(tiny_model(dtype=torch.bfloat16), "vector")
    lm = prepare_model("tiny-llama", tiny_network("llama"), tiny_tokenizer(CHATML + " "))
    with pytest.raises(ArtifactError, match=r"another chat template of tiny-llama"):
        vector.provenance.check_model(lm, "vector")


@pytest.mark.parametrize("part", ["embed_tokens", "layers.3.mlp.down_proj", "layers.0.input_layernorm", "lm_head"])
def test_the_fingerprint_follows_every_part_of_the_weights(part: str) -> None:
    network, before = tiny_network("llama"), tiny_model().fingerprint
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if part in name:
                parameter.mul_(1.5)
    assert prepare_model("x", network, tiny_tokenizer()).fingerprint != before


# --- values -----------------------------------------------------------------------------------------------------------


def test_vectors_add_and_scale_as_values() -> None:
    a, b = sample_vector("a", 1), sample_vector("b", 2)
    kept = a.vector.clone(), b.vector.clone()
    total = 0.5 * a + b * 2 + -a
    np.testing.assert_allclose(total.vector, -0.5 * a.vector.numpy() + 2 * b.vector.numpy(), rtol=1e-5, atol=1e-6)
    assert torch.equal((-a).vector, -a.vector)
    assert torch.equal(a.vector, kept[0]) and torch.equal(b.vector, kept[1]), "the parts are as they were"
    assert total.provenance.pair_ids == ("a", "b", "a", "b", "a", "b") and "a" in total.trait and "b" in total.trait
    assert total.aliases == (), "a sum does not answer to a part's other names"


def test_vectors_of_two_models_do_not_add() -> None:
    other = sample_vector("b", model="other-model", model_fingerprint="fedcba9876543210")
    with pytest.raises(ArtifactError, match=r"no-model.*other-model.*model_fingerprint"):
        sample_vector("a") + other


def test_a_sum_can_be_saved(tmp_path: Path) -> None:
    total = sample_vector("a", 1) + sample_vector("b", 2)
    assert torch.equal(TraitVector.load(total.save(tmp_path / "v.safetensors")).vector, total.vector)


def test_a_dose_is_relative_to_the_layer_norm() -> None:
    vector = sample_vector()
    for layer in range(4):
        expected = np.linalg.norm(vector.vector[layer].numpy()) / float(vector.layer_norms[layer])
        assert vector.dose(layer) == pytest.approx(expected, rel=1e-6)


# --- llama.cpp --------------------------------------------------------------------------------------------------------


def test_a_gguf_export_reads_back_with_ggufs_own_reader(tmp_path: Path) -> None:
    """Fault 37: F32, 1-D, direction.1 on, no direction.0."""
    vector = sample_vector(layers=5, width=16)
    reader = gguf.GGUFReader(vector.export_gguf(tmp_path / "deep" / "v.gguf"))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert sorted(tensors) == [f"direction.{z}" for z in range(1, 5)]
    for z in range(1, 5):
        tensor = tensors[f"direction.{z}"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32 and tensor.shape.tolist() == [16]
        np.testing.assert_array_equal(tensor.data, vector.vector[z].numpy())
    assert reader.get_field("general.architecture").contents() == "controlvector"
    assert reader.get_field("controlvector.model_hint").contents() == "no-model"
    assert reader.get_field("controlvector.layer_count").contents() == 4
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["v.gguf"]


def test_a_gguf_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", fail)
    with pytest.raises(OSError, match="disk full"):
        sample_vector().export_gguf(tmp_path / "v.gguf")
    assert list(tmp_path.iterdir()) == []


# --- values that no vector has ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("vector", torch.full((4, 8), math.inf), "not finite"),
        ("vector", torch.full((4, 8), math.nan), "not finite"),
        ("vector", torch.ones(4, 8, dtype=torch.bfloat16), "bfloat16, not float32"),
        ("layer_norms", torch.zeros(4), "not positive"),
        ("layer_norms", torch.full((4,), math.nan), "not finite"),
        ("agreement", torch.ones(3), "shapes"),
    ],
)
def test_a_vector_of_impossible_values_is_refused(name: str, tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        replace(sample_vector(), **{name: tensor})


@pytest.mark.parametrize("change", [{"as_": "robot"}, {"span": "sentence"}])
def test_a_header_or_span_that_does_not_exist_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(ArtifactError, match=next(iter(change.values()))):
        sample_vector(**change)


def test_vectors_under_different_headers_do_not_add() -> None:
    with pytest.raises(ArtifactError, match="as_ is user and assistant"):
        sample_vector() + sample_vector(as_="assistant")
    difference = sample_vector(seed=1) - sample_vector(seed=2)
    torch.testing.assert_close(difference.vector, sample_vector(seed=1).vector - sample_vector(seed=2).vector)
