"""A customer's patience, its end, and what an episode that ended so is worth."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import product
from math import comb
from types import SimpleNamespace
from typing import Any

import pytest

from traitbasis.chat import Turn
from traitbasis.drops import average_at_k, pass_hat_k
from traitbasis.errors import ReactionError, RequestError
from traitbasis.reactive.appraisal import EVENTS, Appraisal, appraise_all
from traitbasis.reactive.conditions import DIMENSIONS, EMOTIONS, Condition
from traitbasis.reactive.dissatisfaction import (
    STOP,
    THRESHOLD,
    UNSATISFIED,
    WEIGHTS,
    Dissatisfaction,
    Patience,
    ended_by,
    feel,
    fold,
    implied_turns,
    reward,
)

FAULTS = [event for event in EVENTS if event not in ("warmth", "progress")]
CONDITIONS = [Condition(emotion, *levels) for emotion, levels in product(EMOTIONS, product(*DIMENSIONS.values()))]


def nagging(times: int) -> list[Turn]:
    """An agent that asks the same, `times` times over, in turn in one of three ways."""
    ways = [
        "What is your order number?",
        "Could you give me the order number, please?",
        "I need the number of your order.",
    ]
    answers = ["It is W4412.", "W4412.", "As I said, W4412."]
    turns = [Turn("customer", "I'd like to exchange a lamp.")]
    for number in range(times):
        turns += [Turn("agent", ways[number % 3]), Turn("customer", answers[number % 3])]
    return turns


def helping() -> list[Turn]:
    """An agent that is warm and gets on."""
    lines = [
        "I'm upset, my lamp arrived broken. It's order W4412.",
        "I'm so sorry, that is a disappointing thing to unpack. I've found order W4412, a desk lamp.",
        "Yes, that's the one.",
        "I can send a new one today, or refund the $40. Which would you like?",
        "A new one.",
        "Done, it ships today and arrives on Friday. I'm sorry you had this trouble.",
        "Thank you!",
        "You're welcome, enjoy the lamp!",
    ]
    return [Turn("agent" if number % 2 else "customer", line) for number, line in enumerate(lines)]


# --- giving up --------------------------------------------------------------------------------------------------------


def test_a_level_is_the_sum_of_weights_times_strengths_and_never_below_zero() -> None:
    patience = Patience(3.0, {"repeated question": 1.2, "coldness": 1.4, "warmth": -0.6})
    state = feel(Dissatisfaction(), Appraisal({"warmth": 1.0}), patience)
    assert state.level == 0
    state = feel(state, Appraisal({"repeated question": 0.5, "coldness": 1.0}), patience)
    assert state.level == pytest.approx(0.5 * 1.2 + 1.4)
    state = feel(state, Appraisal({"warmth": 0.5, "refusal": 1.0}), patience)  # a refusal weighs nothing here
    assert state.level == pytest.approx(2.0 - 0.3)
    assert state.by_event == {"warmth": pytest.approx(-0.9), "repeated question": 0.6, "coldness": 1.4, "refusal": 0}
    assert (state.turns, state.ended) == (3, None)


@pytest.mark.parametrize("event", FAULTS)
@pytest.mark.parametrize("strength", [0.4, 1.0])
def test_one_fault_ends_the_episode_at_the_turn_that_patience_implies(event: str, strength: float) -> None:
    for condition in CONDITIONS[::25]:
        patience = Patience.of(condition)
        state = Dissatisfaction()
        for _ in range(60):
            state = feel(state, Appraisal({event: strength}), patience)
        assert state.ended == implied_turns(patience, event, strength)


def test_an_episode_does_not_end_at_the_first_answer_nor_at_progress_and_stays_ended() -> None:
    patience = Patience(0.5)
    awful = Appraisal({"coldness": 1.0, "no progress": 1.0})
    first = feel(Dissatisfaction(), awful, patience)
    assert first.level > patience.threshold
    assert first.ended is None
    assert feel(first, Appraisal({"coldness": 1.0, "progress": 0.5}), patience).ended is None
    second = feel(first, awful, patience)
    assert second.ended == 2
    assert feel(second, Appraisal({"warmth": 1.0, "progress": 1.0}), patience).ended == 2


def test_what_soothes_or_weighs_nothing_never_ends_an_episode() -> None:
    assert implied_turns(Patience(), "warmth") is None
    assert implied_turns(Patience(), "progress") is None
    assert implied_turns(Patience(3.0, {"coldness": 1e-9}), "coldness") is None
    assert implied_turns(Patience(3.0, {"coldness": 9.0}), "coldness") == 2
    with pytest.raises(ReactionError, match="joy"):
        implied_turns(Patience(), "joy")


def test_a_nagging_agent_is_left_in_time_under_every_condition_and_a_helping_one_never() -> None:
    nagged, helped = appraise_all(nagging(8)), appraise_all(helping())
    for condition in CONDITIONS:
        patience = Patience.of(condition)
        bad, good = Dissatisfaction(), Dissatisfaction()
        for appraisal in nagged:
            bad = feel(bad, appraisal, patience)
        for appraisal in helped:
            good = feel(good, appraisal, patience)
        implied = implied_turns(patience, "repeated question")
        assert implied is not None
        assert bad.ended is not None
        assert bad.ended <= implied + 1, condition.name  # the first time, the question is none too many
        assert good.ended is None
        assert good.level < bad.level


def test_a_fold_of_a_conversation_is_its_turns_felt_one_by_one() -> None:
    turns = nagging(4)
    state = fold(turns, Patience())
    assert state == fold(turns, Patience())
    assert state.turns == 4
    assert state.ended is not None
    assert fold(turns[: 2 * state.ended - 1], Patience()).ended is None


# --- conditions -------------------------------------------------------------------------------------------------------


def test_who_is_hurried_suspicious_curt_or_angry_bears_less() -> None:
    calm = Condition("sorrow", "neutral", "moderate", "cautious")

    def bears(**other: str) -> float:
        return Patience.of(Condition(**{**calm.labels, **other})).threshold

    assert bears(urgency="high") < bears() < bears(urgency="low")
    assert bears(trust="skeptical") < bears() < bears(trust="trusting")
    assert bears(politeness="cold") < bears() < bears(politeness="warm")
    assert bears(emotion="frustration") < bears(emotion="anxiety") < bears(emotion="relief")
    # By hand: 3 x 0.8 (anger) x 0.85 (cold) x 0.7 (high) x 0.8 (skeptical)
    hard = Patience.of(Condition("frustration", "cold", "high", "skeptical"))
    assert hard.threshold == pytest.approx(1.1424)
    assert hard.weights["contradiction"] == pytest.approx(1.2 * 1.5)
    assert hard.weights["no progress"] == pytest.approx(0.6 * 1.5)
    assert implied_turns(hard, "repeated question") == 2
    soft = Patience.of(Condition("peace", "warm", "low", "trusting"))
    assert implied_turns(soft, "repeated question") == 6  # 3 x 1.3 x 1.15 x 1.2 x 1.2 = 6.46, by 1.2 a turn


def test_an_unknown_label_is_named() -> None:
    good = {"family": "fear", "politeness": "warm", "urgency": "low", "trust": "cautious"}
    for field in good:
        with pytest.raises(ReactionError, match=f"{field} is 'odd'"):
            Patience.of(SimpleNamespace(**{**good, field: "odd"}))


@pytest.mark.parametrize("threshold", [0, -1, float("nan"), float("inf"), "3", True])
def test_a_threshold_that_is_none_is_refused(threshold: Any) -> None:
    with pytest.raises(ReactionError, match="threshold"):
        Patience(threshold)


def test_a_weight_that_is_none_is_refused() -> None:
    with pytest.raises(ReactionError, match="'joy'"):
        Patience(3.0, {"joy": 1.0})
    with pytest.raises(ReactionError, match="'warmth'"):
        Patience(3.0, {"warmth": float("nan")})
    assert set(WEIGHTS) == set(EVENTS)
    assert Patience().threshold == THRESHOLD


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_state_comes_back_from_json() -> None:
    state = fold(nagging(5), Patience())
    assert Dissatisfaction.from_record(json.loads(json.dumps(state.record))) == state


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"level": -1}, "level"),
        ({"level": float("nan")}, "level"),
        ({"level": "2"}, "level"),
        ({"by_event": []}, "by_event"),
        ({"by_event": {"joy": 1.0}}, "'joy'"),
        ({"by_event": {"warmth": None}}, "'warmth'"),
        ({"turns": -1}, "turns"),
        ({"turns": 2.5}, "turns"),
        ({"ended": 1}, "ended"),
        ({"ended": 4}, "ended"),
        ({"ended": "2"}, "ended"),
    ],
)
def test_a_damaged_state_is_refused_by_its_field(change: dict[str, Any], named: str) -> None:
    good = {"level": 1.0, "by_event": {"coldness": 1.0}, "turns": 3, "ended": None}
    assert Dissatisfaction.from_record(good).turns == 3
    with pytest.raises(ReactionError, match=named):
        Dissatisfaction.from_record({**good, **change})


@pytest.mark.parametrize("field", ["level", "by_event", "turns"])
def test_a_cut_state_is_refused(field: str) -> None:
    good = {"level": 1.0, "by_event": {}, "turns": 3, "ended": None}
    with pytest.raises(ReactionError, match=f"no {field}"):
        Dissatisfaction.from_record({key: value for key, value in good.items() if key != field})
    with pytest.raises(ReactionError, match="must be an object"):
        Dissatisfaction.from_record([good])


# --- rewards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("success", "ended", "before", "paper", "code"),
    [
        (True, False, False, 1, 1),
        (False, False, False, 0, 0),
        (False, True, False, -1, -1),
        (True, True, False, -1, -1),  # gave up first; whatever the database says afterwards
        (True, True, True, 1, -1),  # where the two differ (contract 1.2)
        (False, True, True, 0, -1),  # solved, then undone again
    ],
)
def test_giving_up_costs_by_the_papers_rule_only_before_success_and_by_the_codes_always(
    success: bool, ended: bool, before: bool, paper: int, code: int
) -> None:
    assert reward(success, ended, before) == paper
    assert reward(success, ended, before, "code") == code


def test_a_third_rule_is_refused() -> None:
    with pytest.raises(RequestError, match="rule"):
        reward(True, False, rule="mine")  # type: ignore[arg-type]


def test_of_both_tokens_unsatisfied_wins() -> None:
    assert ended_by(f"{STOP} {UNSATISFIED}") == ended_by(UNSATISFIED) == "###UNSATISFIED###"
    assert ended_by(f"Bye. {STOP}") == STOP
    assert ended_by("I am unsatisfied, stop.") is None


def test_avg_at_k_is_over_success_and_pass_hat_k_is_unbiased_as_tau_emotion_counts() -> None:
    """Contract 1.2: success is a reward of 1, not the mean of {-1, 0, 1}; C(c, k) / C(n, k), so Pass^1 == Avg@3."""
    tasks = [[1, 1, 1], [1, 0, -1], [-1, -1, -1], [0, 1, 1]]
    successes = [sum(reward >= 1 for reward in trials) for trials in tasks]
    average = sum(average_at_k(3, c, 3) for c in successes) / len(tasks)
    assert average == pytest.approx(float(Fraction(6, 12)))
    assert average != sum(map(sum, tasks)) / 12
    assert sum(pass_hat_k(3, c, 1) for c in successes) / len(tasks) == pytest.approx(average)
    by_hand = sum(Fraction(comb(c, 2), comb(3, 2)) for c in successes) / len(tasks)
    assert sum(pass_hat_k(3, c, 2) for c in successes) / len(tasks) == pytest.approx(float(by_hand))
    at_least_two = sum(c >= 2 for c in successes) / len(tasks)  # the paper's words, which its tables are not
    assert by_hand != at_least_two
