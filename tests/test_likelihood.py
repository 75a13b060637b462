"""Preference, fact cost and KL of pairs: compared with numpy sums over plain forwards of each conversation alone."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import Plain, hook_count, plain_reading, push
from samples import load_pair, sample_pair, sample_set
from tiny import LAYERS, tiny_model
from torch import Tensor

from traitbasis.chat import TokenizedReply, Turn, tokenize_reply
from traitbasis.metrics.fidelity import preference
from traitbasis.metrics.likelihood import PairLikelihood, fact_tokens
from traitbasis.model import LanguageModel
from traitbasis.pairs import Pair, fold
from traitbasis.reading import Reader, Reading

ADDITIONS = push(1, 20.0) | push(LAYERS - 2, 10.0)


def pairs_to_read() -> list[Pair]:
    """Six pairs; facts at the beginning, at the end, twice, in other letters, over a line's end, and two of them."""
    changes = [
        {"positive": "W0, now!", "negative": "It is about the order W0", "facts": ["W0"]},
        {"positive": "Now W1, I said W1!", "negative": "W1 if you please, no hurry.", "facts": ["W1"]},
        {"positive": "The DESK\nlamp, I say!", "negative": "The desk lamp, please.", "facts": ["desk lamp"]},
        {"positive": "W3 on 4 May, at once.", "negative": "On 4 May, the order W3 ...", "facts": ["W3", "4 May"]},
        {"positive": "Order W4 and W44, now", "negative": "Order W44 then, and W4", "facts": ["W4"]},
    ]
    return [*(load_pair(sample_pair(i, **change)) for i, change in enumerate(changes)), sample_set(1).pairs[0]]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def measure(lm: LanguageModel) -> PairLikelihood:
    return PairLikelihood(Reader(lm), pairs_to_read())


def characters_of_facts(text: str, facts: tuple[str, ...]) -> list[int]:
    """Characters of a text without repeated white space, found by comparing at each place."""
    flat, found = " ".join(text.split()).lower(), set[int]()
    for fact in facts:
        for i in range(len(flat)):
            if flat[i:].startswith(fact.lower()):
                found |= set(range(i, i + len(fact)))
    return sorted(found)


def by_hand(lm: LanguageModel, pair: Pair, additions: dict[int, Tensor]) -> tuple[float, float, float]:
    """Preference, fact cost and KL; the byte tokenizer has one token a character."""
    now, before = (
        [plain_reading(lm, pair.context, text, added) for text in (pair.positive, pair.negative)]
        for added in (additions, {})
    )

    def difference(sides: list[Plain]) -> float:
        return float(sides[0].logprobs.mean() - sides[1].logprobs.mean())

    costs, divergences = [], []
    for a, b, text in zip(now, before, (pair.positive, pair.negative), strict=True):
        costs.append(np.mean([b.logprobs[i] - a.logprobs[i] for i in characters_of_facts(text, pair.facts)]))
        p, q = np.exp(a.distributions), np.exp(b.distributions)
        divergences.append(np.mean([np.sum(p[t] * np.log(p[t] / q[t])) for t in range(len(p))]))
    return difference(now) - difference(before), float(np.mean(costs)), float(np.mean(divergences))


def test_preference_fact_cost_and_kl_are_the_sums_written_out(lm: LanguageModel, measure: PairLikelihood) -> None:
    measured = measure.measure(ADDITIONS)
    expected = np.array([by_hand(lm, pair, ADDITIONS) for pair in pairs_to_read()])
    np.testing.assert_allclose(measured.preference, expected[:, 0], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(measured.fact_cost, expected[:, 1], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(measured.kl, expected[:4, 2], rtol=1e-3, atol=1e-4)  # of the first four pairs alone
    assert np.abs(expected).min() > 2e-3, "far above the tolerance: the additions do something"
    assert hook_count(lm.model) == 0


def test_the_preference_is_the_older_measures_difference(lm: LanguageModel, measure: PairLikelihood) -> None:
    pairs = pairs_to_read()
    expected = preference(lm, pairs, ADDITIONS, "user") - preference(lm, pairs, {}, "user")
    torch.testing.assert_close(measure.measure(ADDITIONS).preference, expected, rtol=1e-3, atol=1e-4)


def test_without_additions_nothing_changes_at_all(measure: PairLikelihood) -> None:
    """Contract 2: exactly zero, not nearly."""
    for additions in ({}, {1: torch.zeros(32)}):
        measured = measure.measure(additions)
        for values in (measured.preference, measured.fact_cost, measured.kl):
            assert not values.any()


def test_more_of_a_direction_diverges_more(measure: PairLikelihood) -> None:
    kl = torch.stack([measure.measure(push(1, size)).kl for size in (0.5, 1.0, 2.0, 4.0)])
    assert bool((kl.diff(dim=0) > 0).all())


def test_measuring_again_gives_the_same_numbers(measure: PairLikelihood) -> None:
    one, _, again = (measure.measure(additions) for additions in (ADDITIONS, push(2, 9.0), ADDITIONS))
    assert torch.equal(one.preference, again.preference) and torch.equal(one.kl, again.kl)


def test_losing_a_fact_costs_and_making_it_likelier_pays(lm: LanguageModel) -> None:
    """Along the gradient of the fact's own log-probability the cost is negative, against it positive."""
    pair = load_pair(sample_pair(0, positive="W0, now!", negative="Then W0.", facts=["W0"]))
    reply = tokenize_reply(lm.tokenizer, pair.context, pair.positive, "user")
    first = reply.positions[0]
    nudge = torch.zeros(32, requires_grad=True)

    def hook(module: object, arguments: object, output: Tensor) -> Tensor:
        return torch.cat([output[:, : first - 1], output[:, first - 1 :] + nudge], 1)

    handle = lm.layers[2].register_forward_hook(hook)
    logits = lm.model(input_ids=torch.tensor([reply.ids])).logits[0].log_softmax(-1)
    handle.remove()
    (logits[first - 1, reply.ids[first]] + logits[first, reply.ids[first + 1]]).backward()
    assert nudge.grad is not None
    step = 0.5 * nudge.grad / nudge.grad.norm()
    only_positive = PairLikelihood(Reader(lm), [pair.model_copy(update={"negative": pair.positive + " "})])
    assert float(only_positive.measure({2: step}).fact_cost) < 0 < float(only_positive.measure({2: -step}).fact_cost)


# --- where facts stand ------------------------------------------------------------------------------------------------


def reading_of(pieces: list[str], before: str = "") -> Reading:
    """A reading of a reply cut into pieces; the first may hold the end of what stands `before` it."""
    at, characters = -len(before), list[tuple[int, int]]()
    for piece in pieces:
        characters.append((at, at + len(piece)))
        at += len(piece)
    n = len(pieces)
    return Reading(TokenizedReply(tuple(range(n + 1)), tuple(range(1, n + 1)), tuple(characters)), torch.zeros(n))


@pytest.mark.parametrize(
    ("pieces", "facts", "found"),
    [
        (["W1", " now"], ["W1"], [0]),
        (["It", " is W", "1", "!"], ["W1"], [1, 2]),  # a token that holds one character of a fact counts
        (["w", "1 and ", "W1"], ["W1"], [0, 1, 2]),
        (["the ", "desk", "\n ", "lamp"], ["Desk lamp"], [1, 2, 3]),
        (["4 ", "May", " W3"], ["W3", "4 may"], [0, 1, 2]),
        (["W", "12"], ["W1"], [0, 1]),  # inside a longer word, as pair files count it
        (["a+b", " (c)"], ["(C)", "a+B"], [0, 1]),  # no pattern
        (["in ", "der ", "Stra", "ße"], ["STRASSE"], [2, 3]),  # folded, as pair files compare
        (["ß", "x"], ["x"], [1]),  # longer when folded; what follows keeps its place
        (["İ", "stanbul ", "W1"], ["w1"], [2]),
        (["no", " fact"], ["W1"], []),
        (["W1"], [], []),
    ],
)
def test_tokens_that_hold_a_character_of_a_fact_are_found(
    pieces: list[str], facts: list[str], found: list[int]
) -> None:
    assert fact_tokens(reading_of(pieces), "".join(pieces), facts) == found


def test_a_token_shared_with_the_prompt_counts_by_its_own_characters() -> None:
    assert fact_tokens(reading_of([" W", "1", " now"], before=" "), "W1 now", ["W1"]) == [0, 1]
    assert fact_tokens(reading_of([" I", " W1"], before=" "), "I W1", ["W1"]) == [1]


@given(
    st.lists(st.sampled_from(["a", "B", " ", "\n", "ab", "é", "ẞ", "1"]), min_size=1, max_size=8),
    st.lists(st.sampled_from(["a", "AB", "b a", "ss", "É 1"]), max_size=2),
)
def test_facts_are_found_where_and_only_where_a_pair_file_says_they_are(pieces: list[str], facts: list[str]) -> None:
    text = "".join(pieces)
    if not text.strip():
        return
    found = fact_tokens(reading_of(list(text.strip())), text, facts)
    within = set[int]()
    for start, end in combinations(range(len(text.strip()) + 1), 2):
        part = text.strip()[start:end]
        if part == part.strip() and fold(part) in map(fold, facts):
            within |= set(range(start, end))
    assert found == sorted(within)


def test_the_tokens_found_decode_to_the_facts(lm: LanguageModel) -> None:
    pair = load_pair(sample_pair(0, positive="My order is W0, é.", negative="The order é W0.", facts=["W0", "é"]))
    reader = Reader(lm)
    for text in (pair.positive, pair.negative):
        (reading,) = reader.read([(pair.context, text)])
        found = fact_tokens(reading, text, pair.facts)
        ids = [reading.reply.ids[reading.reply.positions[i]] for i in found]
        assert sorted(lm.tokenizer.decode(ids).replace(" ", "")) == sorted("W0é")
        assert len(found) == 4, "é is two bytes and two tokens"


def test_facts_in_a_reply_with_white_space_around_it_keep_their_place(lm: LanguageModel) -> None:
    text = "  Order W0 \n"
    (reading,) = Reader(lm).read([((Turn("agent", "Hi?"),), text)])
    assert fact_tokens(reading, text, ["W0"]) == [6, 7]
