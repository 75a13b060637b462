"""Drawing tokens: seeds, temperature, top_k and top_p, against numpy on the logits of a full forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from reference import END, Gate, Listener, greedy, prompt_of, push, run_together
from tiny import VOCABULARY, tiny_model

from traitbasis.engines.base import Request, Sampling, generate
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import RequestError
from traitbasis.model import LanguageModel


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(lm: LanguageModel) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(lm, max_batch=64, max_queue=4000)
    yield engine
    engine.close()


def sampled(prompt: tuple[int, ...], seed: int, max_tokens: int = 16, **sampling: Any) -> Request:
    sampling.setdefault("temperature", 1.0)
    return Request(prompt, seed, Sampling(max_tokens=max_tokens, **sampling), frozenset({END}))


# --- seeds (contract 9) ---


def test_a_seed_gives_the_same_text_alone_and_in_a_crowd(engine: TransformersEngine) -> None:
    """Contract 9: beside other seeds, lengths and settings, in either order."""
    requests = [
        sampled(prompt_of(9 + 5 * i), seed=40 + i, max_tokens=20 - i, temperature=0.5 + 0.2 * i) for i in range(6)
    ]
    alone = [generate(engine, request) for request in requests]
    assert run_together(engine, requests) == alone
    assert run_together(engine, requests[::-1]) == alone[::-1]


def test_different_seeds_give_different_texts(engine: TransformersEngine) -> None:
    texts = [generation.token_ids for generation in run_together(engine, [sampled(prompt_of(9), s) for s in range(20)])]
    assert len(set(texts)) == 20


def test_a_greedy_row_has_no_use_for_a_seed(engine: TransformersEngine) -> None:
    request = greedy(prompt_of(9), 12)
    other = Request(request.prompt_ids, 99, request.sampling, request.stop_ids)
    assert generate(engine, request) == generate(engine, other)


# --- the distribution ---


def distribution(lm: LanguageModel, prompt: tuple[int, ...], temperature: float, top_k: int, top_p: float) -> Any:
    """Probabilities by definition: scale, keep the k most likely, then the fewest that reach top_p, renormalise."""
    with torch.no_grad():
        logits = lm.model(torch.tensor([prompt])).logits[0, -1].double().numpy()
    p = np.exp((logits - logits.max()) / temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
        p /= p.sum()
    enough = int(np.searchsorted(np.cumsum(p[order]), top_p)) + 1
    p[order[enough:]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 5, 1.0),
        (2.0, 0, 0.6),
        (1.5, 6, 0.9),
        (0.3, 0, 1.0),
        (3.0, 1, 1.0),
        (3.0, 0, 1e-6),
        (1.0, VOCABULARY * 2, 1.0),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_of_the_definitions(
    lm: LanguageModel, engine: TransformersEngine, temperature: float, top_k: int, top_p: float
) -> None:
    """600 seeds: nothing outside the allowed set, everything likely inside it, frequencies within five sigma."""
    prompt, n = prompt_of(14), 600
    p = distribution(lm, prompt, temperature, top_k, top_p)
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    drawn = run_together(engine, [sampled(prompt, seed, 1, **settings) for seed in range(n)])
    counts = Counter(generation.token_ids[0] for generation in drawn)
    assert set(counts) <= set(np.flatnonzero(p).tolist())
    for token in range(VOCABULARY):
        sigma = math.sqrt(n * p[token] * (1 - p[token]))
        assert abs(counts[token] - n * p[token]) <= 5 * sigma + 2


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-40, 1e-320])
def test_a_tiny_temperature_is_greedy_and_hurts_nobody(engine: TransformersEngine, temperature: float) -> None:
    """Contract 3: logits divided by next to nothing overflow; that must not end the batch."""
    plain, mate = greedy(prompt_of(9), 12), sampled(prompt_of(20), 3)
    expected = [generate(engine, plain).token_ids, generate(engine, mate).token_ids]
    cold = sampled(prompt_of(9), 5, 12, temperature=temperature)
    assert [g.token_ids for g in run_together(engine, [cold, mate])] == expected


def test_a_row_whose_logits_are_not_finite_fails_alone(engine: TransformersEngine) -> None:
    """Contract 3: a coefficient that overflows is that request's failure, sampled or greedy, not its batchmates'."""
    mate = sampled(prompt_of(20), 3)
    expected = generate(engine, mate)
    broken = {2: push(2, 1.0)[2] * float("inf")}
    bad = [Request(prompt_of(9), 1, Sampling(temperature=t), frozenset(), broken) for t in (0.0, 1.0)]
    listeners = [Listener() for _ in range(3)]
    with Gate(engine):
        for request, listener in zip([bad[0], mate, bad[1]], listeners, strict=True):
            engine.submit(request, listener)
    assert listeners[1].generation() == expected
    for listener in (listeners[0], listeners[2]):
        (failure,) = listener.wait()
        assert "finite" in str(getattr(failure, "error", "no failure"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"max_tokens": 0},
        {"stop": ("ok", "")},
    ],
    ids=str,
)
def test_sampling_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Sampling(**wrong)
