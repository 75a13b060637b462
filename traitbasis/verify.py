"""Does steering work on this model, on this machine? Each check compares the engine with something independent of it.

The reference is a full forward over all tokens with one plain hook, written here: no cache, no batch, no padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from traitbasis.basis import DEFAULT_DOSE, Basis
from traitbasis.bench import (
    differing_in_a_crowd,
    first_difference,
    running,
    serve_all,
    share_differing,
    steering_cost,
)
from traitbasis.engines.base import Request, Sampling, generate
from traitbasis.engines.kv import BLOCK_TOKENS
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.hooks import hidden_of, with_hidden
from traitbasis.model import LanguageModel

_Finding = tuple[bool | None, str]

_TOP = 20
_TOKENS = 16


@dataclass(frozen=True)
class Check:
    """One finding. passed: None for a figure that cannot fail."""

    name: str
    passed: bool | None
    detail: str


def verify(lm: LanguageModel, basis: Basis | None = None, *, tokens: int = _TOKENS) -> Iterator[Check]:
    """Check an engine on `lm`, one after the other; stops at nothing.

    basis: a Basis of this model; without one, random directions at the middle layer with the default dose stand in.
    Equality is asked of float32. In another dtype kernels round by batch shape even unsteered, so there the unsteered
    rate of differing tokens is the yardstick.
    """
    # Without a prefix cache: a prompt that is computed in other pieces is rounded otherwise.
    with running(lm, max_batch=8, prefix_cache_bytes=0) as engine:
        bench = _Bench(lm, engine, basis, tokens)
        yield Check(
            "how requests run",
            None,
            "continuous batching" if engine.continuous else "micro-batches: a request waits for those before it",
        )
        for name, check in _CHECKS.items():
            try:
                passed, detail = check(bench)
            except Exception as error:
                passed, detail = False, f"{type(error).__name__}: {error}"
            yield Check(name, passed, detail)
        continuous = engine.continuous
    if continuous:
        for users in (1, 8):
            yield _cost(bench, users)


class _Bench:
    """Requests for the checks: ragged prompts, one addition each."""

    def __init__(self, lm: LanguageModel, engine: TransformersEngine, basis: Basis | None, tokens: int) -> None:
        self.lm, self.engine, self.tokens = lm, engine, tokens
        generator = torch.Generator().manual_seed(0)
        most = ((lm.context_length or 10**6) - 5 * tokens) // 2  # prompts are doubled, and replies go on for longer
        lengths = [max(1, min(length, most)) for length in (90, 7, 33, 1, 64, 18)]
        vocabulary = min(lm.vocabulary, len(lm.tokenizer))
        self.prompts = [tuple(torch.randint(vocabulary, (length,), generator=generator).tolist()) for length in lengths]
        if basis is not None:
            self.names = list(basis.traits)
            self.additions = [basis.additions({trait: 1.0}) for trait in basis.traits]
        else:
            self.names = ["a random direction", "its opposite"]
            z = len(lm.layers) // 2
            direction = torch.randn(lm.width, generator=generator)
            norm = float(self.states(self.prompts[0], z)[1:].norm(dim=-1).mean())
            addition = DEFAULT_DOSE * norm * direction / direction.norm()
            self.additions = [{z: addition}, {z: -addition}]

    def request(self, i: int, additions: Mapping[int, Tensor] | None = None, **sampling: Any) -> Request:
        given = {"temperature": 0, "max_tokens": self.tokens, "logprobs": _TOP, **sampling}
        return Request(self.prompts[i % len(self.prompts)], i, Sampling(**given), frozenset(), additions or {})

    def mixed(self) -> list[Request]:
        """Every prompt, with each trait in turn, every third unsteered, ending one after the other."""
        return [
            self.request(
                i, {} if i % 3 == 2 else self.additions[i % len(self.additions)], max_tokens=max(1, self.tokens - 2 * i)
            )
            for i in range(len(self.prompts))
        ]

    def states(self, ids: Sequence[int], z: int) -> Tensor:
        """Hidden states ``(tokens, d_model)`` of a plain forward at layer z."""
        seen: list[Tensor] = []
        handle = self.lm.layers[z].register_forward_hook(
            lambda module, arguments, output: seen.append(hidden_of(output)[0].float())
        )
        try:
            self.reference(ids, {})
        finally:
            handle.remove()
        return seen[0]

    def reference(self, ids: Sequence[int], additions: Mapping[int, Tensor]) -> Tensor:
        """Log-probabilities of the next token by one full forward, its last position steered."""

        def hook_for(addition: Tensor) -> Callable[..., Any]:
            def hook(module: nn.Module, arguments: Any, output: Any) -> Any:
                hidden = hidden_of(output).clone()
                hidden[:, -1] += addition.to(hidden)
                return with_hidden(output, hidden)

            return hook

        with ExitStack() as stack, torch.inference_mode():
            for z, addition in additions.items():
                stack.callback(self.lm.layers[z].register_forward_hook(hook_for(addition)).remove)
            tokens = torch.tensor([list(ids)], device=self.lm.device)
            logits: Tensor = self.lm.model(input_ids=tokens, use_cache=False).logits[0, -1]
        return logits.float().log_softmax(-1).cpu()

    def first_logprobs(self, additions: Mapping[int, Tensor], i: int = 0) -> dict[int, float]:
        """The engine's most likely first tokens."""
        return dict(generate(self.engine, self.request(i, additions, max_tokens=1)).logprobs[0].top)


def _changes_output(bench: _Bench) -> _Finding:
    plain = bench.reference(bench.prompts[0], {})
    moved = {}
    for name, additions in zip(bench.names, bench.additions, strict=True):
        found = bench.first_logprobs(additions)
        moved[name] = max(abs(logprob - float(plain[token])) for token, logprob in found.items())
    noise = max(abs(lp - float(plain[token])) for token, lp in bench.first_logprobs({}).items())
    detail = ", ".join(f"{name} {size:.3f}" for name, size in moved.items())
    return (
        min(moved.values()) > 10 * noise + 1e-4,
        f"largest change of a first token's log-probability: {detail}; unsteered {noise:.1g}",
    )


def _zero_is_nothing(bench: _Bench) -> _Finding:
    nothing = {z: torch.zeros_like(addition) for z, addition in bench.additions[0].items()}
    same = all(
        generate(bench.engine, bench.request(i, nothing)) == generate(bench.engine, bench.request(i))
        for i in range(len(bench.prompts))
    )
    return (same, f"tokens and log-probabilities bit for bit, {len(bench.prompts)} prompts")


def _first_token(bench: _Bench) -> _Finding:
    """Against a full forward with the last position steered, and against one without."""
    worst, telling = 0.0, 0.0
    for i in range(len(bench.prompts)):
        additions = bench.additions[i % len(bench.additions)]
        steered = bench.reference(bench.prompts[i], additions)
        plain = bench.reference(bench.prompts[i], {})
        for token, logprob in bench.first_logprobs(additions, i).items():
            worst = max(worst, abs(logprob - float(steered[token])))
            telling = max(telling, abs(float(plain[token]) - float(steered[token])))
    return (
        worst < (1e-3 if bench.lm.exact else 0.25) and worst < telling / 4,
        f"log-probabilities within {worst:.2g} of a full forward's; unsteered would be {telling:.2g} away",
    )


def _mixed_batch(bench: _Bench) -> _Finding:
    requests = bench.mixed()
    plain = [replace(request, additions={}) for request in requests]
    steered, control = (differing_in_a_crowd(bench.engine, rows) for rows in (requests, plain))
    detail = f"{steered:.1%} of tokens differ from those of the row alone; unsteered rows {control:.1%}"
    return (steered == 0 if bench.lm.exact else None, detail)


def _padding(bench: _Bench) -> _Finding:
    """The shortest row beside the longest, which starts with it and goes on longer."""
    longest, shortest = max(bench.prompts, key=len), min(bench.prompts, key=len)
    short = replace(bench.request(0, bench.additions[0]), prompt_ids=shortest)
    long = replace(bench.request(0, bench.additions[-1], max_tokens=4 * bench.tokens), prompt_ids=longest)
    alone = generate(bench.engine, short)
    beside = serve_all(bench.engine, [long, short])[1]
    same = first_difference(alone.token_ids, beside.tokens)
    # Where the tokens part, their log-probabilities are of different texts.
    gaps = [abs(a.logprob - b) for a, b in zip(alone.logprobs[: same + 1], beside.logprobs, strict=False)]
    within = max(gaps) < (1e-3 if bench.lm.exact else 0.5)
    return (
        within and (same == bench.tokens or not bench.lm.exact),
        f"{len(shortest)} token(s) beside {len(longest)}: log-probabilities within {max(gaps):.2g}"
        + ("" if same == bench.tokens else f", tokens part after {same} of {bench.tokens}"),
    )


def _prefix_cache(bench: _Bench) -> _Finding:
    """Each prompt twice, the second time longer: the first time's blocks are read again."""
    with running(bench.lm, max_batch=8) as engine:
        if not engine.continuous:
            return (None, "there is none in micro-batches")
        if max(map(len, bench.prompts)) <= BLOCK_TOKENS:
            return (None, "the model's context is too short to try it")
        requests = [
            replace(request, prompt_ids=request.prompt_ids * times) for times in (1, 2) for request in bench.mixed()
        ]
        cached = [generate(engine, request).token_ids for request in requests]
        read = engine.stats().cached_tokens
    differing = share_differing([generate(bench.engine, request).token_ids for request in requests], cached)
    passed = read > 0 and (differing == 0 if bench.lm.exact else None)
    return (passed, f"{read} tokens read from it, {differing:.1%} differ")


def _nothing_left(bench: _Bench) -> _Finding:
    before = _hooks(bench.lm.model)
    cold = generate(bench.engine, bench.request(2))
    serve_all(bench.engine, bench.mixed())
    ticket = bench.engine.submit(bench.request(0, bench.additions[0], max_tokens=10**6), lambda event: None)
    ticket.cancel()
    warm = generate(bench.engine, bench.request(2))
    left = _hooks(bench.lm.model) - before
    return (
        warm == cold and left == 0,
        f"{left} hooks left after steered, cancelled and mixed requests; the unsteered answer is "
        + ("the one before them" if warm == cold else "another one than before them"),
    )


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


_CHECKS: dict[str, Callable[[_Bench], _Finding]] = {
    "changes output": _changes_output,
    "zero is nothing": _zero_is_nothing,
    "the first token is steered": _first_token,
    "a mixed batch is its rows alone": _mixed_batch,
    "padding does not matter": _padding,
    "the prefix cache changes nothing": _prefix_cache,
    "nothing is left behind": _nothing_left,
}


def _cost(bench: _Bench, users: int) -> Check:
    conditions = {"steered": [bench.additions[i % len(bench.additions)] for i in range(users)]}
    prompts = [bench.prompts[i % len(bench.prompts)] for i in range(users)]
    cost = steering_cost(bench.lm, prompts, conditions, steps=20)["steered"]
    detail = f"unsteered over steered: {cost['wall']} of the clock, {cost['cpu']} of the CPU"
    return Check(f"time per token, {users} user{'s' * (users > 1)}", None, detail)
