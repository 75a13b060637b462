"""Models whose blocks do not verify are refused, and wrapped ones are found: layers are checked, not trusted."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reference import blocks_of, decode_without_cache, greedy, hook_count, prompt_of, push
from tiny import LAYERS, WIDTH, tiny_network, tiny_tokenizer
from torch import Tensor, nn
from transformers import LlamaConfig, MambaConfig, MambaForCausalLM, PreTrainedModel

from traitbasis.engines.base import generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import ModelError
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel, find_decoder_layers, prepare_model


class Block(nn.Module):
    """Writes to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.write = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Tensor) -> Tensor:
        written: Tensor = self.write(hidden_states)
        return hidden_states + written


class Pair(Block):
    """Returns hidden states that are no tensor at the first place."""

    def forward(self, hidden_states: Tensor) -> Any:
        return {"hidden_states": super().forward(hidden_states)}


class Wiring(PreTrainedModel):  # type: ignore[misc]
    """Blocks and a head, wired as `kind` says; only "residual" is a decoder whose layers can be steered."""

    config_class = LlamaConfig

    def __init__(self, kind: str) -> None:
        super().__init__(LlamaConfig(hidden_size=WIDTH, num_hidden_layers=LAYERS, vocab_size=64))
        torch.manual_seed(0)
        self.kind = kind
        self.embed = nn.Embedding(64, WIDTH)
        self.blocks = nn.ModuleList((Pair if kind == "mapping" else Block)() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64)
        if kind == "no list":
            self.one, self.blocks = self.blocks[0], nn.ModuleList()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        h = embedded = self.embed(input_ids)
        match self.kind:
            case "residual":
                for block in self.blocks:
                    h = block(h)
            case "reversed":
                for block in reversed(self.blocks):
                    h = block(h)
            case "one left out":
                for block in list(self.blocks)[1:]:
                    h = block(h)
            case "twice":
                for block in [*self.blocks, *self.blocks]:
                    h = block(h)
            case "parallel":
                h = torch.stack([block(embedded) for block in self.blocks]).sum(0)
            case "scaled between":
                for block in self.blocks:
                    h = block(2 * h)
            case "unrelated":  # one module a head, each on its own slice
                h = torch.stack([block(embedded[0]) for block in self.blocks]).sum(0)[None]
            case "mapping":
                for block in self.blocks:
                    h = block(h)["hidden_states"]
            case "ignored":
                for block in self.blocks:
                    h = block(h)
                h = embedded
            case "no list":
                h = self.one(h)
        return SimpleNamespace(logits=self.head(h))


def test_a_plain_residual_network_is_accepted() -> None:
    """Keeps the refusals below honest."""
    network = Wiring("residual").eval()
    layers, width = find_decoder_layers(network)
    assert layers == list(network.blocks)
    assert width == WIDTH


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("reversed", "order"),
        ("one left out", "order"),
        ("twice", "order"),
        ("parallel", "not the input of block 1"),
        ("scaled between", "not the input of block 1"),
        ("unrelated", "hidden states"),
        ("mapping", "hidden states"),
        ("ignored", "does not change the logits"),
        ("no list", "no list of decoder blocks"),
    ],
)
def test_a_model_that_does_not_verify_is_refused(kind: str, reason: str) -> None:
    """Contract 1, fault 38; the refusal names the model and what did not hold, and leaves no hook."""
    network = Wiring(kind).eval()
    with pytest.raises(ModelError, match=f"Wiring cannot be steered: .*{reason}"):
        find_decoder_layers(network)
    assert hook_count(network) == 0


def test_another_number_of_blocks_than_configured_is_refused() -> None:
    network = Wiring("residual").eval()
    network.config.num_hidden_layers = LAYERS + 1
    with pytest.raises(ModelError, match="blocks has 4 blocks, the configuration says 5"):
        find_decoder_layers(network)


def test_a_model_whose_cache_or_padding_changes_its_words_is_refused() -> None:
    """Item "refused with a message": a recurrent state is lost between steps, or moved by padding."""
    torch.manual_seed(0)
    network = MambaForCausalLM(
        MambaConfig(vocab_size=272, hidden_size=WIDTH, num_hidden_layers=LAYERS, state_size=8, pad_token_id=0)
    )
    with pytest.raises(ModelError, match=r"MambaForCausalLM cannot (be served|generate)"):
        prepare_model("mamba", network, tiny_tokenizer())


class Backwards(nn.ModuleList):
    """Runs from the last block to the first when a forward slices it, as Llama's does."""

    def __getitem__(self, index: Any) -> Any:
        return list(self)[::-1] if isinstance(index, slice) else super().__getitem__(index)


def test_a_real_architecture_that_runs_its_blocks_in_another_order_is_refused() -> None:
    network = tiny_network("llama")
    network.model.layers = Backwards(network.model.layers)
    with pytest.raises(ModelError, match=r"ran in the order \[3, 2, 1, 0\]"):
        find_decoder_layers(network)


@pytest.fixture(params=["CAUSAL_LM", None])
def lora(request: pytest.FixtureRequest) -> LanguageModel:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type=request.param)
    return prepare_model("tiny-lora", peft.get_peft_model(tiny_network("llama"), config), tiny_tokenizer())


def test_a_lora_model_is_found_and_steers(lora: LanguageModel) -> None:
    """Fault 7: through PEFT's wrapper, with the adapter's own effect kept, and not called in deprecated ways."""
    inner = lora.model.base_model.model
    assert list(lora.layers) == blocks_of(inner)
    request = greedy(prompt_of(23), 12, additions=push(2, 30.0))
    prompt = request.prompt_ids
    expected = decode_without_cache(inner, blocks_of(inner), prompt, request.additions, 12, len(prompt) - 1)
    plain = decode_without_cache(inner, blocks_of(inner), prompt, {}, 12, 0)
    without_adapter = tiny_network("llama")
    assert expected != plain != decode_without_cache(without_adapter, [], prompt, {}, 12, 0)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*past_key_values")
        engine = TransformersEngine(lora)
        try:
            assert generate(engine, request).token_ids == tuple(expected)
            assert generate(engine, greedy(prompt, 12)).token_ids == tuple(plain)
        finally:
            engine.close()


def test_a_lora_models_forward_shifts_by_the_addition(lora: LanguageModel) -> None:
    ids, additions = torch.tensor([prompt_of(9)]), push(1, 2.0)
    with torch.no_grad():
        before = lora.model(input_ids=ids, output_hidden_states=True).hidden_states
        with steer(lora.layers, additions):
            after = lora.model(input_ids=ids, output_hidden_states=True).hidden_states
    assert torch.equal(after[1], before[1])
    assert torch.equal(after[2], before[2] + additions[1])
