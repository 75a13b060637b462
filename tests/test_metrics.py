"""Measures: is it still language, is it the customer, does it show the trait. Compared with our own counts."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from samples import sample_document, sample_pair, sample_set
from tiny import LAYERS, WIDTH, tiny_model

from traitbasis.chat import Turn, render_prompt
from traitbasis.errors import PairError
from traitbasis.metrics.damage import has_runaway_punctuation, is_broken
from traitbasis.metrics.fidelity import TraitProbe, auc, preference, score
from traitbasis.metrics.realism import is_role_flip
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet, known_traits, load_pairs

VARIED = (
    "I bought the lamp on Monday and it came with a broken switch, so could you please send another one before "
    "Friday because we have guests then and the room is dark without it?"
)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "?!?!?!?!",
        "What?????",
        "no!!!!!",
        "hm........",
        "So. . . . . . .",
        "please --------",
        "I, , , , , , go",
        "what? ? ? ! ! !",
        "no no no no no",
        "I want it I want it I want it now",
        "Now, now. NOW! now? now",
        "send it to me now, send it to me now, send it to me now.",
        "a b c d e f a b c d e f a b c d e f",
        " ".join(["yes", "well", "maybe", "the", "lamp"][i % 5] + ("x" if i % 2 else "") for i in range(24)),
    ],
)
def test_repetition_is_damage(text: str) -> None:
    assert is_broken(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "No.",
        "no no",
        "What?!",
        "What??",
        "Hm... well... no...",
        "It was 1,000,000.00 dollars!",
        "no no, really no no",
        "Wait... what? No, I mean... which one?",
        "Order W-1--2, e.g. the lamp, etc.",
        VARIED,
        "the the a the the a b the the a",
        "ha ha that is fine",
        "um I I think it's it's the blue one",
    ],
)
def test_a_confused_but_whole_turn_is_no_damage(text: str) -> None:
    assert not is_broken(text)


@pytest.mark.parametrize(
    ("text", "runaway"),
    [
        ("!" * 4, False),
        ("!" * 5, True),
        ("." * 12, True),
        ("a.b,c.d!e?f;" * 2, False),  # as many letters as marks
        ("a.b,c.d!e?f;." * 2, True),  # one mark more
        ("$%&/()=?*#:", False),  # eleven marks are too few to judge
        ("$%&/()=?*#:;", True),
        (" $ % & / ( ) = ? * # : ; ", True),  # spaces do not count
    ],
)
def test_punctuation_runs_away_in_rows_and_in_share(text: str, runaway: bool) -> None:
    assert has_runaway_punctuation(text) == is_broken(text) == runaway


def test_a_person_may_say_no_four_times() -> None:
    assert not is_broken("No, no, no, no! I said a refund.")


def test_a_vocabulary_counts_only_beyond_twenty_words() -> None:
    rng = random.Random(0)
    few = ["w" + letter for letter in "abcdefghi"]
    order: list[str] = []
    while len(order) < 21:  # no phrase three times in a row
        order.append(rng.choice(few))
        if is_broken(" ".join(order)) and len(order) <= 20:
            order.pop()
    assert len(set(order)) < len(order) / 2
    assert is_broken(" ".join(order)) and not is_broken(" ".join(order[:20]))


@given(st.lists(st.sampled_from(["no", "yes", "ok"]), max_size=9), st.integers(1, 3))
def test_repetition_is_found_wherever_it_stands(words: list[str], size: int) -> None:
    brute = any(
        words[i : i + n] == words[i + n : i + 2 * n] == words[i + 2 * n : i + 3 * n]
        and len(words[i : i + 3 * n]) == 3 * n
        for n, i in product(range(2, 7), range(len(words)))
    ) or any(len(set(words[i : i + 5])) == 1 and len(words[i : i + 5]) == 5 for i in range(len(words)))
    assert is_broken(" ".join(words)) == brute
    phrase = [f"p{i}" for i in range(size)]
    assert is_broken(" ".join([*words, *phrase * (5 if size == 1 else 3), "end"]))


@pytest.mark.parametrize("trait", known_traits())
def test_no_shipped_response_counts_as_damaged_or_as_the_agent(trait: str) -> None:
    """People wrote these: a rule that rejects them would measure the trait and not the damage."""
    for pair in load_pairs(trait).pairs:
        for text in (pair.positive, pair.negative):
            assert not is_broken(text), (pair.id, text)
            assert not is_role_flip(text), (pair.id, text)


# --- who speaks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "Hello! How can I help you today?",
        "How may we assist?",
        "I'm here to help.",
        "I’m glad to help you with that.",
        "I am happy to assist.",
        "Let me help you with that.",
        "Thank you for contacting Acme.",
        "THANK YOU FOR YOUR PATIENCE.",
        "I'm glad you reached out to us.",
        "Our team will look at it.",
        "It is in our records.",
        "Could you please provide your order number?",
        "Please confirm your email.",
        "We apologize for the inconvenience.",
        "I am sorry. I'm sorry; we are sorry for any inconvenience.",
        "You are a customer of Acme.",
        "Is there anything else I can do?",
        "As an AI, I cannot.",
        "Provide me with your full name.",
    ],
)
def test_an_agents_turn_is_a_role_flip(text: str) -> None:
    assert is_role_flip(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Can you help me?",
        "How can you help me with this?",
        "I need help.",
        "My order number is W1.",
        "Where is my order?",
        "Thank you for the help.",
        "Thanks, that's all.",
        "Could you tell me where it is?",
        "Can you give me a refund?",
        "I'm glad it worked.",
        "Please send it to my address.",
        "My system crashed? No: the phone did.",
        "I am a customer since 2010.",
        "I spoke to your team and your support agents already.",
        "Your policy, your system and your records say so.",
        "Send my records.",
    ],
)
def test_a_customers_turn_is_no_role_flip(text: str) -> None:
    assert not is_role_flip(text)


FLIPS = yaml.safe_load((Path(__file__).parent / "role_flips.yaml").read_text(encoding="utf-8"))


def test_what_the_role_flip_rule_catches_of_turns_it_was_not_made_from() -> None:
    """Recall and false alarms on our own examples, stock phrases and plain words. A change of the rule changes them."""
    agent, customer = FLIPS["agent"], FLIPS["customer"]
    caught = [text for text in agent if is_role_flip(text)]
    false_alarms = [text for text in customer if is_role_flip(text)]
    assert (len(agent), len(customer)) == (72, 78)
    assert len(caught) == 64 and not false_alarms, false_alarms  # precision 1.00, recall 0.89


def test_what_the_role_flip_rule_catches_of_the_agents_in_the_shipped_pairs() -> None:
    """The agents there use few stock phrases: "Which flight was it?" is no flip by its words. No customer is taken for
    an agent."""
    turns = {
        (turn.speaker, turn.text) for trait in known_traits() for p in load_pairs(trait).pairs for turn in p.context
    }
    flips = {
        speaker: [is_role_flip(text) for who, text in turns if who == speaker] for speaker in ("agent", "customer")
    }
    assert sum(flips["customer"]) == 0
    assert 0.5 < sum(flips["agent"]) / len(flips["agent"]) < 0.65  # of 813 turns, 57 in 100


@pytest.mark.parametrize(
    "text",
    [
        'You wrote "thank you for your patience" three times.',
        "What is your order cancellation policy?",
        "Thank you for your patience, I'm looking for the order number now.",
        "Sorry for the wait, my user id is mia_li_3668.",
        "You wrote “how can I help you today” three times.",
        "Your colleague told me my refund was approved and your order number was wrong.",
        "The page keeps asking for your date of birth.",
    ],
)
def test_what_a_customer_quotes_reports_or_says_of_their_own_is_no_flip(text: str) -> None:
    assert not is_role_flip(text)


@pytest.mark.parametrize(
    "text",
    [
        "Let me find that for you.",  # a customer might; an agent does all day
        "Would you like me to process the return at a store?",
        "What is your order number?",
        "Thank you for your patience, I'm looking into the order now.",
        "Sorry for the wait, my system is slow today.",
        '"How can I help you today?"',  # a model's habit: all of it in quotation marks
        "She said no. Please confirm your email.",
        "As I said, your refund has been approved.",
        "HOW CAN I\nHELP YOU",
    ],
)
def test_quotation_marks_and_reports_excuse_no_more_than_they_hold(text: str) -> None:
    assert is_role_flip(text)


# --- fidelity ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.lists(st.integers(0, 5), min_size=1, max_size=12))
def test_auc_is_the_counted_share_of_pairs_in_order(positive: list[int], negative: list[int]) -> None:
    wins = sum(1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative)
    measured = auc(torch.tensor(positive).float(), torch.tensor(negative).float())
    assert measured == pytest.approx(wins / (len(positive) * len(negative)), abs=1e-6)


def marked_set(swap: Any = lambda i: False, n: int = 12) -> PairSet:
    """Positives are marked with x, negatives with o, unless swapped; every second pair is held out."""
    rng = random.Random(1)
    pairs = []
    for i in range(n):
        filler = "".join(rng.choice("abcdefgh ") for _ in range(20))
        sides = [f"W{i} {filler[:10]} {mark * 6} {filler[10:]}z" for mark in ("x", "o")]
        positive, negative = sides[::-1] if swap(i) else sides
        pairs.append(sample_pair(i, positive=positive, negative=negative, use=("heldout", "extra")[i % 2]))
    return PairSet.model_validate(sample_document(*pairs))


def own_means(lm: LanguageModel, pair: Any, text: str, layer: int) -> Any:
    """Mean hidden state of a reply at a layer that is not the last, from ``output_hidden_states``."""
    prompt = lm.tokenizer(render_prompt(lm.tokenizer, pair.context, "user"), add_special_tokens=False)["input_ids"]
    reply = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        states = lm.model(torch.tensor([prompt + reply]), output_hidden_states=True).hidden_states[layer + 1]
    return states[0, len(prompt) :].double().mean(0).numpy()


def test_a_probe_scores_its_held_out_sides_0_and_1_on_average(lm: LanguageModel) -> None:
    pair_set = marked_set()
    probe = TraitProbe.from_held_out(lm, pair_set, layer=2)
    held_out = pair_set.select("heldout")
    means = {
        side: torch.mean(probe.score(lm, [(pair.context, getattr(pair, side)) for pair in held_out])).item()
        for side in ("positive", "negative")
    }
    assert means == {"positive": pytest.approx(1, abs=1e-4), "negative": pytest.approx(0, abs=1e-4)}
    assert probe.auc == 1.0 and probe.direction.shape == (WIDTH,)


def test_a_score_is_the_projection_computed_by_hand(lm: LanguageModel) -> None:
    pair_set = marked_set()
    held_out = pair_set.select("heldout")
    sides = [
        np.stack([own_means(lm, pair, getattr(pair, side), 1) for pair in held_out]).mean(0)
        for side in ("positive", "negative")
    ]
    difference = sides[0] - sides[1]
    probe = TraitProbe.from_held_out(lm, pair_set, layer=1)
    other = pair_set.select("extra")
    scores = probe.score(lm, [(pair.context, pair.positive) for pair in other])
    by_hand = [
        (own_means(lm, pair, pair.positive, 1) - sides[1]) @ difference / (difference @ difference) for pair in other
    ]
    np.testing.assert_allclose(scores, by_hand, rtol=1e-3, atol=1e-4)


def test_the_probe_is_checked_on_pairs_it_was_not_made_from(lm: LanguageModel) -> None:
    """Extra pairs with the marks the other way round: a probe measured on its own pairs would not notice."""
    assert TraitProbe.from_held_out(lm, marked_set(swap=lambda i: i % 2 == 1), layer=2).auc == 0.0


def test_with_shuffled_labels_the_auc_is_near_chance(lm: LanguageModel) -> None:
    """Averaged over shuffles, since one shuffle's direction can point either way."""
    aucs = []
    for seed in range(8):
        swapped = set(random.Random(seed).sample(range(1, 48, 2), 12))  # half of the 24 checked pairs
        aucs.append(TraitProbe.from_held_out(lm, marked_set(swap=lambda i, s=swapped: i in s, n=48), layer=2).auc)
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.1)


def test_several_probes_read_the_turns_once_and_agree_with_each_alone(lm: LanguageModel) -> None:
    one = TraitProbe.from_held_out(lm, marked_set(), layer=1)
    two = TraitProbe.from_held_out(
        lm, marked_set(swap=lambda i: True).model_copy(update={"trait": "confusion"}), layer=2
    )
    turns = [((Turn("agent", "Hello."),), text) for text in ("xxxx yes", "oooo no", VARIED)]
    together = score([one, two], lm, turns)
    for probe in (one, two):
        torch.testing.assert_close(together[probe.trait], probe.score(lm, turns))
    with pytest.raises(ValueError, match="same header"):
        score([one, replace(two, as_="assistant")], lm, turns)


def test_without_held_out_pairs_there_is_no_probe(lm: LanguageModel) -> None:
    with pytest.raises(PairError, match="impatience: no pair is marked 'use: heldout'"):
        TraitProbe.from_held_out(lm, sample_set(), layer=1)


def own_preference(lm: LanguageModel, pair: Any, additions: dict[int, torch.Tensor]) -> float:
    """One uncached forward; our own hook adds from the last prompt position on."""
    prompt = lm.tokenizer(render_prompt(lm.tokenizer, pair.context, "user"), add_special_tokens=False)["input_ids"]

    def adding(addition: torch.Tensor) -> Any:
        def hook(module: Any, arguments: Any, output: Any) -> Any:
            hidden = (output if isinstance(output, torch.Tensor) else output[0]).clone()
            hidden[:, len(prompt) - 1 :] += addition
            return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

        return hook

    likely = []
    for text in (pair.positive, pair.negative):
        reply = lm.tokenizer(text, add_special_tokens=False)["input_ids"]
        handles = [lm.layers[z].register_forward_hook(adding(addition)) for z, addition in additions.items()]
        with torch.no_grad():
            logprobs = lm.model(torch.tensor([prompt + reply])).logits[0].double().log_softmax(-1)
        for handle in handles:
            handle.remove()
        likely.append(np.mean([logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(reply)]))
    return float(likely[0] - likely[1])


def test_a_preference_is_the_difference_of_mean_log_probabilities(lm: LanguageModel) -> None:
    """Contract 4: the prompt stays clean. Compared with one whole forward and a hook of our own."""
    pairs = sample_set(3).pairs
    generator = torch.Generator().manual_seed(0)
    steered = {z: torch.randn(WIDTH, generator=generator) for z in (1, LAYERS - 1)}
    for additions in (steered, {}):
        expected = [own_preference(lm, pair, additions) for pair in pairs]
        np.testing.assert_allclose(preference(lm, pairs, additions, "user"), expected, rtol=1e-3, atol=1e-4)
    moved = preference(lm, pairs, steered, "user") - preference(lm, pairs, {}, "user")
    assert moved.abs().min() > 1e-3
