"""Tiny random models of several architectures and a byte-level tokenizer, built here in milliseconds: no download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from traitbasis.model import LanguageModel, prepare_model

SPECIALS = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS, WIDTH, VOCABULARY = 4, 32, 272

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "qwen2": lambda: Qwen2Config(**_SIZES),
    "qwen3": lambda: Qwen3Config(**_SIZES),
    # Sliding windows shorter than the test prompts, so that they matter.
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=16),
    # Gemma scales embeddings up; tied to the head, random ones would only ever repeat the last token.
    "gemma2": lambda: Gemma2Config(**_SIZES, sliding_window=16, query_pre_attn_scalar=8, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(**_SIZES, sliding_window=16, query_pre_attn_scalar=8, tie_word_embeddings=False),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=4,
        n_positions=2048,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    ),
}


def tiny_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerBase:
    """Byte-level: one token a byte, plus pad, <|im_start|> and <|im_end|>. Ids 0, 1, 2 are the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=SPECIALS[0], eos_token=SPECIALS[2])
    fast.chat_template = template
    return fast


def tiny_network(architecture: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random causal LM with 4 layers of width 32. Weights are large enough that greedy text varies."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture](), attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return model.to(dtype).eval()


def tiny_model(architecture: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32) -> LanguageModel:
    """A tiny random LanguageModel with the byte-level ChatML tokenizer."""
    return prepare_model(f"tiny-{architecture}", tiny_network(architecture, seed, dtype), tiny_tokenizer())


def save_folder(lm: LanguageModel, path: Path | str) -> Path:
    """A model as a Hugging Face folder, which ``--model`` takes."""
    lm.model.save_pretrained(path)
    lm.tokenizer.save_pretrained(path)
    return Path(path)
