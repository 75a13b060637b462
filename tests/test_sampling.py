"""Drawing tokens: seeds, penalties, bias, temperature, filters and log-probabilities, against numpy on the logits of a
full forward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reference import END, NEAR_TIE, Gate, Listener, greedy, prompt_of, push, run_together
from tiny import VOCABULARY, tiny_model
from torch import Tensor, nn

from traitbasis.engines.base import Event, Request, Sampling, generate
from traitbasis.engines.sampling import Sampler, draw
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


def logits_of(
    lm: LanguageModel, ids: Sequence[int], additions: Mapping[int, Tensor] | None = None, first_steered: int = 0
) -> Any:
    """The model's own scores of the next token, float64, steered from a position on."""

    def shift(addition: Tensor) -> Callable[..., Any]:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> Tensor:
            return torch.cat([output[:, :first_steered], output[:, first_steered:] + addition], dim=1)

        return hook

    with ExitStack() as stack, torch.no_grad():
        for z, addition in (additions or {}).items():
            stack.callback(lm.layers[z].register_forward_hook(shift(addition)).remove)
        return lm.model(torch.tensor([list(ids)])).logits[0, -1].double().numpy()


def changed(logits: Any, prompt: Sequence[int], generated: Sequence[int], sampling: Sampling) -> Any:
    """Scores after penalties and bias, by definition (Keskar et al. 2019, arXiv 1909.05858, section 4.1; OpenAI's API
    reference: ``mu[j] - c[j] * frequency - (c[j] > 0) * presence``)."""
    scores = logits.copy()
    for token in {*prompt, *generated}:
        scores[token] *= sampling.repetition_penalty ** (1 if scores[token] < 0 else -1)
    for token, count in Counter(generated).items():
        scores[token] -= sampling.presence_penalty + count * sampling.frequency_penalty
    for token, bias in sampling.logit_bias.items():
        scores[token] += bias
    return scores


def distribution(scores: Any, sampling: Sampling) -> Any:
    """Probabilities by definition: scale, keep the k most likely, then the fewest that reach top_p, then those with at
    least min_p of the likeliest one's share; renormalise after each."""
    p = np.exp((scores - scores.max()) / sampling.temperature)
    p /= p.sum()
    order = np.argsort(-p)
    if sampling.top_k:
        p[order[sampling.top_k :]] = 0
        p /= p.sum()
    enough = int(np.searchsorted(np.cumsum(p[order]), sampling.top_p)) + 1
    p[order[enough:]] = 0
    p[p < sampling.min_p * p.max()] = 0
    return p / p.sum()


def assert_drawn_from(p: Any, drawn: Sequence[int]) -> None:
    """Nothing outside the allowed set, everything likely inside it, frequencies within five sigma."""
    counts, n = Counter(drawn), len(drawn)
    assert set(counts) <= set(np.flatnonzero(p).tolist())
    for token in range(len(p)):
        sigma = math.sqrt(n * p[token] * (1 - p[token]))
        assert abs(counts[token] - n * p[token]) <= 5 * sigma + 2


PROMPT = prompt_of(14)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 5},
        {"temperature": 2.0, "top_p": 0.6},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9},
        {"temperature": 0.3},
        {"temperature": 3.0, "top_k": 1},
        {"temperature": 3.0, "top_p": 1e-6},
        {"top_k": VOCABULARY * 2},
        {"temperature": 2.0, "min_p": 0.1},
        {"temperature": 3.0, "min_p": 1.0},
        {"temperature": 2.0, "top_k": 8, "top_p": 0.8, "min_p": 0.2, "repetition_penalty": 1.4},
        {"temperature": 2.0, "logit_bias": {9: 12.0, 40: 11.0, PROMPT[0]: -100.0}},
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_of_the_definitions(
    lm: LanguageModel, engine: TransformersEngine, settings: dict[str, Any]
) -> None:
    """600 seeds; the first token, with the prompt as all there is to penalise."""
    requests = [sampled(PROMPT, seed, 1, **settings) for seed in range(600)]
    sampling = requests[0].sampling
    p = distribution(changed(logits_of(lm, PROMPT), PROMPT, (), sampling), sampling)
    assert_drawn_from(p, [generation.token_ids[0] for generation in run_together(engine, requests)])


PENALTIES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 3.0},
    {"presence_penalty": -3.0},
    {"frequency_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"logit_bias": {50: 5.5, 60: 5.0, 70: -100.0}},
    {"logit_bias": {50: 9.0, 60: 8.5}, "frequency_penalty": 1.0, "presence_penalty": 2.0, "repetition_penalty": 1.2},
]


def greedy_by_definition(lm: LanguageModel, request: Request) -> tuple[list[int], list[Any]]:
    """Tokens, and the logits each was chosen from; refuses near ties."""
    generated: list[int] = []
    every: list[Any] = []
    for _ in range(request.sampling.max_tokens):
        every.append(logits_of(lm, (*request.prompt_ids, *generated)))
        scores = changed(every[-1], request.prompt_ids, generated, request.sampling)
        second, best = np.sort(scores)[-2:]
        assert best - second > NEAR_TIE, "a near tie: choose another seed for this test"
        generated.append(int(scores.argmax()))
    return generated, every


def test_greedy_rows_with_penalties_and_bias_say_what_the_definitions_say(
    lm: LanguageModel, engine: TransformersEngine
) -> None:
    """Contract 3: each kind beside all the others and rows without any, 24 tokens, prompts of several lengths."""
    requests = [
        Request(prompt_of(12 + i % 3, seed=3), i, Sampling(temperature=0, max_tokens=24, **settings), frozenset())
        for i, settings in enumerate(PENALTIES * 2)
    ]
    expected = [tuple(greedy_by_definition(lm, request)[0]) for request in requests]
    assert [generation.token_ids for generation in run_together(engine, requests)] == expected
    for i in range(1, len(PENALTIES)):
        plain = replace(requests[i], sampling=Sampling(temperature=0, max_tokens=24))
        assert expected[i] != tuple(greedy_by_definition(lm, plain)[0]), f"{PENALTIES[i]} changes nothing"


HISTORY = (50, 60, 50, 50, 7)


@pytest.mark.parametrize("settings", PENALTIES, ids=str)
def test_penalties_count_what_was_generated(lm: LanguageModel, settings: dict[str, Any]) -> None:
    """2000 seeds' sixth token, after the same five."""
    likely = {50: 6.0, 60: 5.0, 7: 4.0}
    sampling = Sampling(temperature=1.3, **{"logit_bias": likely, **settings})
    logits = logits_of(lm, (*PROMPT, *HISTORY))
    drawn = drawn_by(2000, sampling, logits, PROMPT, HISTORY)
    assert_drawn_from(distribution(changed(logits, PROMPT, HISTORY, sampling), sampling), drawn)


def drawn_by(
    n: int, sampling: Sampling, logits: Any, prompt: Sequence[int] = (), history: Sequence[int] = ()
) -> list[int]:
    """The next token of n rows with different seeds and the same past."""
    samplers = [Sampler(Request(tuple(prompt), seed, sampling, frozenset())) for seed in range(n)]
    for sampler in samplers:
        for token in history:
            sampler.drew(token)
    results = draw(samplers, torch.tensor(logits, dtype=torch.float32).repeat(n, 1))
    assert None not in results
    return [result[0] for result in results if result]


def softmax(scores: Any) -> Any:
    p = np.exp(scores - scores.max())
    return p / p.sum()


def keep(scores: Any, kept: Any) -> Any:
    return np.where(kept, scores, -np.inf)


STEPS: dict[str, Callable[[Any, Sampling], Any]] = {
    "bias": lambda scores, s: scores + [s.logit_bias.get(token, 0.0) for token in range(len(scores))],
    "temperature": lambda scores, s: scores / s.temperature,
    "top_k": lambda scores, s: keep(scores, np.argsort(np.argsort(-scores)) < (s.top_k or len(scores))),
    "top_p": lambda scores, s: keep(scores, (softmax(scores)[:, None] * (scores[:, None] > scores)).sum(0) < s.top_p),
    "min_p": lambda scores, s: keep(scores, softmax(scores) >= s.min_p * softmax(scores).max()),
}


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [
        ("bias", "temperature", {"temperature": 2.0, "logit_bias": {4: 2.5}}),
        ("bias", "top_k", {"top_k": 2, "logit_bias": {3: 2.0}}),
        ("temperature", "top_p", {"temperature": 2.0, "top_p": 0.8}),
        ("temperature", "min_p", {"temperature": 2.0, "min_p": 0.3}),
        ("top_k", "top_p", {"top_k": 3, "top_p": 0.8}),
        ("top_p", "min_p", {"top_p": 0.8, "min_p": 0.3}),
    ],
)
def test_the_steps_come_in_the_documented_order(first: str, second: str, settings: dict[str, Any]) -> None:
    """Each pair of steps with numbers for which the other order gives other probabilities; 4000 seeds."""
    sampling, logits = Sampling(**{"temperature": 1.0, **settings}), np.log([0.4, 0.3, 0.15, 0.1, 0.05])

    def probabilities(order: Sequence[str]) -> Any:
        scores = logits
        for name in order:
            scores = STEPS[name](scores, sampling)
        return softmax(scores)

    documented = list(STEPS)
    at, to = documented.index(first), documented.index(second)
    swapped = [*documented]
    swapped[at], swapped[to] = second, first
    drawn = drawn_by(4000, sampling, logits)
    assert_drawn_from(probabilities(documented), drawn)
    with pytest.raises(AssertionError):
        assert_drawn_from(probabilities(swapped), drawn)


# --- beside others (contracts 3 and 9) ---

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 1.8},
    {"top_k": 3},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 2.0, "min_p": 0.1},
    {"repetition_penalty": 1.5},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 1.0},
    {"logit_bias": {50: 6.0}},
    {"logprobs": 4},
    {"temperature": 0, "repetition_penalty": 1.5, "logit_bias": {50: 6.0}, "logprobs": 0},
]


def test_a_rows_draws_do_not_depend_on_its_batchmates_settings(engine: TransformersEngine) -> None:
    """Each kind beside all kinds, in two orders, beside its own kind, and with somebody who leaves early."""
    requests = [sampled(prompt_of(15), 7, 12, **kind) for kind in KINDS]
    expected = [generate(engine, request).token_ids for request in requests]
    assert len(set(expected)) > len(KINDS) / 2
    short = sampled(prompt_of(4), 1, 3, **{**KINDS[6], **KINDS[4]})
    for chosen in (range(len(KINDS)), reversed(range(len(KINDS))), [i // 2 for i in range(2 * len(KINDS))]):
        order = list(chosen)
        _, *found = run_together(engine, [short, *(requests[i] for i in order)])
        assert [generation.token_ids for generation in found] == [expected[i] for i in order]


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 100.0, "temperature": 1e-5, "top_p": 1e-300},
        {"frequency_penalty": -100.0, "presence_penalty": -100.0},
        {"logit_bias": dict.fromkeys(range(VOCABULARY), -100.0), "min_p": 1e-300},
    ],
    ids=str,
)
def test_extreme_values_hurt_nobody(engine: TransformersEngine, extreme: dict[str, Any]) -> None:
    """Contract 3: what overflows overflows in its own row, which ends as any other."""
    mates = [greedy(prompt_of(9), 12), sampled(prompt_of(20), 3, **KINDS[4])]
    expected = [generate(engine, mate) for mate in mates]
    first, *found = run_together(engine, [sampled(prompt_of(15), 5, 12, **extreme), *mates])
    assert found == expected
    assert first.finish in ("stop", "length")


# --- log-probabilities ---


def log_softmax(logits: Any) -> Any:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


@pytest.mark.parametrize("norm", [0.0, 10.0])
def test_logprobs_are_those_of_the_models_own_distribution(
    lm: LanguageModel, engine: TransformersEngine, norm: float
) -> None:
    """Natural logarithms, before bias, penalties, temperature and filters; of the steered model where it is steered.
    The list is the most likely tokens', likeliest first. Rows that ask for other numbers, or none, run beside."""
    kinds: list[dict[str, Any]] = [
        {"logprobs": 5},
        {},
        {"logprobs": 3, "temperature": 0},
        {"logprobs": 0, "temperature": 2.5, "top_p": 0.9},
        {"logprobs": 100, "temperature": 1.7, "top_k": 20, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logprobs": 2, "logit_bias": {50: 100.0}},
    ]
    requests = [sampled(prompt_of(10 + i, seed=6), i, 10, **kind) for i, kind in enumerate(kinds)]
    requests = [replace(request, additions=push(1, norm), stop_ids=frozenset()) for request in requests]
    listeners = [Listener() for _ in requests]
    with Gate(engine):
        for request, listener in zip(requests, listeners, strict=True):
            engine.submit(request, listener)
    for request, listener in zip(requests, listeners, strict=True):
        tokens, count = listener.generation().token_ids, request.sampling.logprobs
        assert len(tokens) == 10
        for i, event in enumerate(listener.events):
            assert isinstance(event, Event)
            if count is None:
                assert event.logprob is None
                continue
            ids = (*request.prompt_ids, *tokens[:i])
            logs = log_softmax(logits_of(lm, ids, request.additions, len(request.prompt_ids) - 1))
            assert event.logprob is not None
            assert event.logprob.logprob == pytest.approx(logs[tokens[i]], abs=1e-4)
            values = [value for _, value in event.logprob.top]
            assert len(values) == count
            np.testing.assert_allclose(values, np.sort(logs)[::-1][:count], atol=1e-4)
            np.testing.assert_allclose(values, logs[[token for token, _ in event.logprob.top]], atol=1e-4)
            assert values == sorted(values, reverse=True)
            assert len({token for token, _ in event.logprob.top}) == count
    assert listeners[5].generation().token_ids == (50,) * 10


def test_asking_for_logprobs_changes_no_token_and_they_come_with_the_generation(engine: TransformersEngine) -> None:
    for settings in ({}, {"temperature": 0}, {"top_k": 3, "frequency_penalty": 1.0}):
        plain = sampled(prompt_of(15), 7, 12, **settings)
        asking = replace(plain, sampling=replace(plain.sampling, logprobs=4))
        found, expected = generate(engine, asking), generate(engine, plain)
        assert replace(found, logprobs=()) == expected
        assert len(found.logprobs) == len(found.token_ids)
        assert expected.logprobs == ()


# --- values nobody can mean ---


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
        {"top_k": 1.5},
        {"top_k": True},
        {"temperature": "0.7"},
        {"temperature": True},
        {"temperature": 100.1},
        {"min_p": -0.01},
        {"min_p": 1.01},
        {"min_p": math.nan},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": 100.1},
        {"repetition_penalty": math.nan},
        {"presence_penalty": 100.1},
        {"presence_penalty": -100.1},
        {"presence_penalty": None},
        {"frequency_penalty": 100.1},
        {"frequency_penalty": -math.inf},
        {"logprobs": -1},
        {"logprobs": 101},
        {"logprobs": 2.0},
        {"logprobs": True},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {True: 1.0}},
        {"logit_bias": {5: 100.1}},
        {"logit_bias": {5: -101}},
        {"logit_bias": {5: math.nan}},
        {"logit_bias": {5: "1"}},
        {"logit_bias": {5: True}},
        {"logit_bias": [(5, 1.0)]},
        {"logit_bias": None},
        {"max_tokens": 0},
        {"max_tokens": 1.0},
        {"stop": ("ok", "")},
    ],
    ids=str,
)
def test_sampling_values_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_values_at_the_ends_of_their_ranges_are_taken() -> None:
    for low in (True, False):
        Sampling(
            temperature=0 if low else 100,
            top_p=1e-9 if low else 1,
            top_k=0,
            min_p=0 if low else 1,
            repetition_penalty=1e-9 if low else 100,
            presence_penalty=-100 if low else 100,
            frequency_penalty=-100 if low else 100,
            logit_bias={0: -100 if low else 100},
            max_tokens=1 if low else 10**6,
            logprobs=0 if low else 100,
        )
