"""What the tests of continuous batching share: tiny models, engines, references."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

from reference import (
    Listener,
    blocks_of,
    decode_without_cache,
    greedy,
    hook_count,
    watching,
)
from tiny import LAYERS, tiny_model
from torch import Tensor

from traitbasis.engines.base import Failure, Generation, Request, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.model import LanguageModel

SLOTS = ("llama", "qwen2", "qwen3", "gpt2")
MICRO_BATCHES = ("mistral", "gemma2")
STRONG = 30.0
BLOCK = 32  # tokens of a cached block
BLOCK_BYTES = BLOCK * LAYERS * 2 * 2 * 8 * 4  # keys and values of 2 heads of 8 float32; gpt2's are twice as large
CACHES = (2 * BLOCK_BYTES, 2**24, 0)  # always full, large, off

tiny_lm = cache(tiny_model)


@contextmanager
def running(lm: LanguageModel, **options: Any) -> Iterator[TransformersEngine]:
    """An engine that is closed at the end, and then leaves no hook (contract 6)."""
    hooks = hook_count(lm.model)
    engine = TransformersEngine(lm, **options)
    try:
        yield engine
    finally:
        engine.close()
    assert hook_count(lm.model) == hooks
    assert engine.stats().running == engine.stats().waiting == 0


def alone(lm: LanguageModel, request: Request) -> Generation:
    """What a cold engine that serves nobody else says."""
    with running(lm, max_batch=1, prefix_cache_bytes=0) as engine:
        return generate(engine, request)


def by_full_forwards(lm: LanguageModel, request: Request) -> tuple[int, ...]:
    """A greedy request's tokens without the engine; its stop ids are its own, END is nothing special."""
    prompt, n = request.prompt_ids, request.sampling.max_tokens
    first = 0 if request.positions == "all" else len(prompt) - 1
    tokens: list[int] = []
    while len(tokens) < n and not request.stop_ids & {*tokens}:
        so_far = (*prompt, *tokens)
        tokens += decode_without_cache(lm.model, blocks_of(lm.model), so_far, request.additions, n - len(tokens), first)
    ends = [i for i, token in enumerate(tokens, 1) if token in request.stop_ids]
    return tuple(tokens[: min(ends, default=n)])


def endless(prompt: Sequence[int], max_tokens: int, **request: Any) -> Request:
    """Greedy, ends by max_tokens only."""
    return greedy(prompt, max_tokens, stop_ids=frozenset(), **request)


def ended(listener: Listener) -> bool:
    return any(isinstance(event, Failure) or event.finish for event in listener.events)


@contextmanager
def watching_all(lm: LanguageModel) -> Iterator[list[list[Tensor]]]:
    """Every layer's hidden states of every forward: ``[z][forward]``."""
    seen: list[list[Tensor]] = [[] for _ in lm.layers]
    with ExitStack() as stack:
        for z, layer in enumerate(lm.layers):
            stack.enter_context(watching(layer, lambda hidden, z=z: seen[z].append(hidden.clone())))
        yield seen
