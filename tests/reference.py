"""Independent computations the tests compare with: plain torch hooks and full forwards, none of the product's code
but for rendering."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from traitbasis.chat import As, Turn, render_prompt
from traitbasis.engines.base import Event, Failure, Generation, Request, Sampling
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.model import LanguageModel

END = 2  # the tiny models' end-of-sequence id
NEAR_TIE = 1e-4  # float noise of the tiny models' logits is about 1e-6


def blocks_of(network: Any) -> list[nn.Module]:
    """The decoder blocks, by each family's own attribute names."""
    return list(network.transformer.h if hasattr(network, "transformer") else network.model.layers)


def final_norm_of(network: Any) -> nn.Module:
    """The norm between the last block and the head."""
    norm: nn.Module = network.transformer.ln_f if hasattr(network, "transformer") else network.model.norm
    return norm


def hidden_in(output: Any) -> Tensor:
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def hook_count(network: nn.Module) -> int:
    """Forward hooks and pre-hooks on every module."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in network.modules())


def block_outputs(network: nn.Module, ids: Sequence[int], blocks: Sequence[nn.Module]) -> np.ndarray:
    """What each block returns on one unpadded sequence: ``(blocks, tokens, d_model)``."""
    states: list[np.ndarray] = []
    with ExitStack() as stack:
        for block in blocks:
            handle = block.register_forward_hook(lambda m, a, output: states.append(hidden_in(output)[0].numpy()))
            stack.callback(handle.remove)
        with torch.no_grad():
            network(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return np.stack(states)


def decode_without_cache(
    network: nn.Module,
    blocks: Sequence[nn.Module],
    prompt: Sequence[int],
    additions: Mapping[int, Tensor],
    n: int,
    first_steered: int,
) -> list[int]:
    """Greedy tokens, each from a full forward over everything so far, every position from `first_steered` on shifted.

    Ends after END. Refuses a near tie, where exact equality with another order of summation would be luck.
    """

    def hook_for(addition: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
            hidden = hidden_in(output).clone()
            hidden[:, first_steered:] += addition
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    ids = list(prompt)
    with ExitStack() as stack:
        for z, addition in additions.items():
            stack.callback(blocks[z].register_forward_hook(hook_for(addition)).remove)
        while len(ids) < len(prompt) + n and END not in ids[len(prompt) :]:
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            best, second = logits.topk(2).values.tolist()
            assert best - second > NEAR_TIE, "a near tie: choose another seed for this test"
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def push(z: int, norm: float, seed: int = 7, width: int = 32) -> dict[int, Tensor]:
    """An addition of the given norm (negative: the opposite pole) at layer z."""
    direction = torch.randn(width, generator=torch.Generator().manual_seed(seed + z))
    return {z: norm * direction / direction.norm()}


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random bytes as a prompt."""
    return tuple(np.random.default_rng(1000 * seed + length).integers(3, 259, length).tolist())


def greedy(prompt: Sequence[int], max_tokens: int = 24, **request: Any) -> Request:
    """A greedy request that ends at END."""
    request.setdefault("stop_ids", frozenset({END}))
    return Request(tuple(prompt), seed=0, sampling=Sampling(temperature=0, max_tokens=max_tokens), **request)


class Listener:
    """Keeps the events of one request; ``wait`` returns them when the last one is there."""

    def __init__(self, react: Callable[[int], None] = lambda count: None) -> None:
        self.events: list[Event | Failure] = []
        self._react = react
        self._ended = threading.Event()

    def __call__(self, event: Event | Failure) -> None:
        self.events.append(event)
        if isinstance(event, Failure) or event.finish:
            self._ended.set()
        self._react(len(self.events))

    def wait(self) -> list[Event | Failure]:
        assert self._ended.wait(30), f"no last event; so far {self.events}"
        return self.events

    def generation(self) -> Generation:
        """The finished generation, put together here; an assertion error for a Failure."""
        events = self.wait()
        pieces = [event for event in events if isinstance(event, Event)]
        assert len(pieces) == len(events), events
        tokens = tuple(event.token_id for event in pieces if event.token_id is not None)
        finish = pieces[-1].finish
        assert finish is not None
        return Generation("".join(event.text for event in pieces), tokens, finish)


class Gate:
    """Holds the engine in a one-token batch, so that everything submitted meanwhile is waiting when it opens."""

    def __init__(self, engine: TransformersEngine) -> None:
        self._open = threading.Event()
        self._reached = threading.Event()
        self._engine = engine

    def __enter__(self) -> Gate:
        self._engine.submit(greedy((5, 6), max_tokens=1), self._hold)
        assert self._reached.wait(30)
        return self

    def __exit__(self, *exception: object) -> None:
        self._open.set()

    def _hold(self, event: Event | Failure) -> None:
        self._reached.set()
        self._open.wait(30)


def run_together(engine: TransformersEngine, requests: Sequence[Request]) -> list[Generation]:
    """The requests' generations, all of them waiting before the first one starts."""
    listeners = [Listener() for _ in requests]
    with Gate(engine):
        for request, listener in zip(requests, listeners, strict=True):
            engine.submit(request, listener)
    return [listener.generation() for listener in listeners]


@contextmanager
def watching(layer: nn.Module, see: Callable[[Tensor], None]) -> Iterator[None]:
    """Show `see` the layer's hidden states of every forward, in whichever thread: ``record`` sees only its own."""
    handle = layer.register_forward_hook(lambda module, arguments, output: see(hidden_in(output)))
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Plain:
    """One conversation with its reply, in float64 where it is summed."""

    logprobs: np.ndarray  # (tokens,)
    states: np.ndarray  # (layers, d_model)
    norms: np.ndarray  # (layers,)
    distributions: np.ndarray  # (tokens, vocabulary)


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def plain_reading(
    lm: LanguageModel, context: Sequence[Turn], text: str, additions: Mapping[int, Tensor], as_: As = "user"
) -> Plain:
    """A conversation and a reply, read in one forward. For tokenizers that begin a token where the prompt ends."""
    prompt = tokens_of(lm.tokenizer, render_prompt(lm.tokenizer, context, as_))
    return plain_forward(lm, [*prompt, *tokens_of(lm.tokenizer, text)], len(prompt), additions)


def plain_forward(lm: LanguageModel, ids: list[int], first: int, additions: Mapping[int, Tensor]) -> Plain:
    """One forward without a cache; hooks of our own add from the position before `first` on, the first that counts."""
    blocks = blocks_of(lm.model)
    seen: dict[int, Tensor] = {}

    def hook_for(z: int) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            hidden = hidden_in(output).clone()
            if z in additions:
                hidden[:, first - 1 :] += additions[z]
            seen[z] = hidden[0, first:].double()
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    with ExitStack() as stack:
        for z, block in enumerate(blocks):
            stack.callback(block.register_forward_hook(hook_for(z)).remove)
        with torch.no_grad():
            logits = lm.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    table = logits.log_softmax(-1)[first - 1 : -1].numpy()
    return Plain(
        table[np.arange(len(ids) - first), ids[first:]],
        np.stack([seen[z].mean(0).numpy() for z in range(len(blocks))]),
        np.array([seen[z].norm(dim=-1).mean().item() for z in range(len(blocks))]),
        table,
    )
