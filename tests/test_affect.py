"""State-tracked users: EIBench's formulas against examples worked by hand, and what moves a state."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from decimal import ROUND_HALF_UP, Decimal
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traitbasis.errors import ReactionError
from traitbasis.reactive.affect import (
    MAX_STEP,
    RULES,
    SCENES,
    T_MAX,
    Anchors,
    Scene,
    State,
    axis_score,
    decides_to_stop,
    direct_advantages,
    dose_scale,
    follow,
    outcome,
    process_rewards,
    trace_advantages,
    turn_advantages,
    update,
)
from traitbasis.reactive.appraisal import EVENTS, Appraisal
from traitbasis.reactive.scenarios import TABLE_3, read_scenarios

# Around the means of Table 3's Defense row.
DEFENSE = Anchors(State(75, 15), State(30, 45), State(95, 0))
numbers = st.floats(0, 100, allow_nan=False)


# --- scores (3.3) -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "score"),
    [
        (75, 0),
        (30, 1),
        (95, -1),
        (52.5, 0.5),  # 22.5 of the 45 to success
        (66, 0.2),  # 9 of 45
        (80, -0.25),  # 5 of the 20 to failure
        (10, 1),  # beyond success, clipped
        (100, -1),  # beyond failure, clipped
    ],
)
def test_equation_1_by_hand_on_negative_emotion(x: float, score: float) -> None:
    assert axis_score(x, 75, 30, 95) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(("x", "score"), [(15, 0), (45, 1), (0, -1), (30, 0.5), (21, 0.2), (12, -0.2), (90, 1)])
def test_equation_1_by_hand_on_relation_where_up_is_good(x: float, score: float) -> None:
    assert axis_score(x, 15, 45, 0) == pytest.approx(score, abs=1e-12)


@given(x=numbers, levels=st.lists(numbers, min_size=3, max_size=3, unique=True), up=st.booleans())
def test_equation_1_is_the_clipped_line_through_the_three_anchors(x: float, levels: list[float], up: bool) -> None:
    low, middle, high = sorted(levels)
    succeed, fail = (high, low) if up else (low, high)
    line = np.interp(x, [low, middle, high], [-1, 0, 1] if up else [1, 0, -1])  # flat beyond its ends
    assert axis_score(x, middle, succeed, fail) == pytest.approx(line, abs=1e-9)


def test_a_state_that_never_moved_scores_nothing_whichever_branch_is_taken() -> None:
    assert math.copysign(1, axis_score(75, 75, 30, 95)) == 1, "0.0 and not -0.0, which would print as -0.00"
    assert outcome(DEFENSE.start, DEFENSE) == 0


@pytest.mark.parametrize(
    ("start", "succeed", "fail"),
    [
        (50, 30, 40),  # success and failure on one side: toward which did 35 move?
        (50, 60, 70),
        (50, 50, 90),  # already a success: division by 0
        (50, 20, 50),  # already a failure
        (50, 50, 50),
        (math.nan, 30, 90),
        (50, 30, math.inf),
        (True, -1, 2),
    ],
)
def test_anchors_that_give_equation_1_no_meaning_are_refused(start: Any, succeed: Any, fail: Any) -> None:
    with pytest.raises(ReactionError, match="strictly between"):
        axis_score(45, start, succeed, fail)


def test_equation_2_by_hand_and_its_weight() -> None:
    # f(a) = (75 − 66)/45 = 0.2; f(t) = (39 − 15)/30 = 0.8
    final = State(66, 39)
    assert outcome(final, DEFENSE) == pytest.approx(0.5)
    assert outcome(final, DEFENSE, weight=0.25) == pytest.approx(0.25 * 0.8 + 0.75 * 0.2)
    assert outcome(final, DEFENSE, weight=1) == pytest.approx(0.8)
    # one axis better, one worse: f(a) = −5/20, f(t) = 0.5
    assert outcome(State(80, 30), DEFENSE) == pytest.approx(0.125)
    assert (outcome(DEFENSE.succeed, DEFENSE), outcome(DEFENSE.fail, DEFENSE)) == (1, -1)
    for weight in (-0.1, 1.1, math.nan, True):
        with pytest.raises(ReactionError, match="λ"):
            outcome(final, DEFENSE, weight)


# --- the case study (F.2) ---------------------------------------------------------------------------------------------


def _exact(x: int, start: int, succeed: int, fail: int) -> Fraction:
    """Eq. 1 once more, in fractions: the share of the way to the anchor on x's side."""
    if x == start:
        return Fraction(0)
    anchor, sign = (succeed, 1) if (x < start) == (succeed < start) else (fail, -1)
    return sign * min(Fraction(1), Fraction(x - start, anchor - start))


def _rounded(value: Fraction) -> Decimal:
    return (Decimal(value.numerator) / Decimal(value.denominator)).quantize(Decimal("0.01"), ROUND_HALF_UP)


@pytest.fixture(scope="module")
def published() -> list[Anchors]:
    """All anchors in multiples of five, in order, under which (91, 8) gives −0.81 and (52, 58) gives +0.38."""
    levels = range(0, 101, 5)
    on_a, on_t = defaultdict(list), defaultdict(list)
    for start, succeed, fail in product(levels, repeat=3):
        if succeed < start < fail:
            key = _exact(91, start, succeed, fail), _exact(52, start, succeed, fail)
            on_a[key].append((start, succeed, fail))
        if fail < start < succeed:
            key = _exact(8, start, succeed, fail), _exact(58, start, succeed, fail)
            on_t[key].append((start, succeed, fail))
    found = []
    for (base_a, ours_a), (base_t, ours_t) in product(on_a, on_t):
        if abs(float(base_a + base_t) / 2 + 0.81) > 0.006:
            continue
        rounded = _rounded((base_a + base_t) / 2), _rounded((ours_a + ours_t) / 2)
        if rounded == (Decimal("-0.81"), Decimal("0.38")):
            pairs = product(on_a[base_a, ours_a], on_t[base_t, ours_t])
            found += [Anchors(*(State(a, t) for a, t in zip(*pair, strict=True))) for pair in pairs]
    return found


def _deviations(anchors: Anchors) -> float:
    """How far the furthest anchor is from Table 3's mean for Defense, in its standard deviations."""
    return max(
        abs(getattr(getattr(anchors, name), axis) - mean) / deviation
        for name, row in TABLE_3["Defense"].items()
        for axis, (mean, deviation) in zip("at", row, strict=True)
    )


def test_the_case_studys_rewards_come_out_under_forty_sets_of_anchors(published: list[Anchors]) -> None:
    assert len(published) == 40
    for anchors in published:
        assert outcome(State(91, 8), anchors) == pytest.approx(-0.81, abs=0.005 + 1e-9)
        assert outcome(State(52, 58), anchors) == pytest.approx(0.38, abs=0.005 + 1e-9)


def test_none_of_them_is_an_ordinary_defense_scenario_and_this_is_the_nearest(published: list[Anchors]) -> None:
    nearest = min(published, key=_deviations)
    assert nearest == Anchors(State(55, 45), State(25, 65), State(100, 0))
    assert [_deviations(anchors) < 3 for anchors in published].count(True) == 1
    assert 2.7 < _deviations(nearest) < 2.75, "success at t = 65 where Table 3 has 46 ± 7"
    # base: f(a) = −36/45, f(t) = −37/45, so −73/90; trained: f(a) = 3/30, f(t) = 13/20, so 3/8
    assert outcome(State(91, 8), nearest) == pytest.approx(-73 / 90)
    assert outcome(State(52, 58), nearest) == pytest.approx(3 / 8)


def test_no_anchors_within_two_deviations_of_table_3_give_the_trained_agents_reward_multiples_of_five_or_not() -> None:
    # r_out falls as t_start and t_succeed rise and as a_start (below 52) and a_fail fall, so it is least at the corner:
    # t from 38 to 60, a from 47 to 85. f(t) = 20/22, f(a) = −5/38.
    corner = Anchors(State(47, 38), State(30, 60), State(85, 0))
    assert outcome(State(52, 58), corner) == pytest.approx((20 / 22 - 5 / 38) / 2) and (20 / 22 - 5 / 38) / 2 > 0.385
    rows, random = TABLE_3["Defense"], np.random.default_rng(0)
    for _ in range(3000):
        drawn = {
            name: State(*(float(np.clip(random.uniform(m - 2 * s, m + 2 * s), 0, 100)) for m, s in row))
            for name, row in rows.items()
        }
        if (
            drawn["fail"].t < drawn["start"].t < drawn["succeed"].t
            and drawn["succeed"].a < drawn["start"].a < drawn["fail"].a
        ):
            assert outcome(State(52, 58), Anchors(**drawn)) >= outcome(State(52, 58), corner)


# --- turn credit (4) --------------------------------------------------------------------------------------------------


def test_equation_3_by_hand() -> None:
    # a −10, t +6: (10 + 6)/200; then a +4, t −2: −6/200; then nothing
    states = [State(75, 15), State(65, 21), State(69, 19), State(69, 19)]
    assert process_rewards(states) == pytest.approx([0.08, -0.03, 0])
    assert process_rewards(states[:1]) == []


def test_equation_3_counts_what_the_state_moved_and_not_what_was_clipped_away() -> None:
    end = State(4, 98).moved(-10, 10)
    assert end == State(0, 100)
    assert process_rewards([State(4, 98), end]) == pytest.approx([(4 + 2) / 200])


def test_equation_4_by_hand_with_the_groups_and_the_samples_deviation() -> None:
    # mean 0.3, deviations −0.5, 0.1, 0.4: squares 0.42; /3 = 0.14, /2 = 0.21
    outcomes = [-0.2, 0.4, 0.7]
    assert trace_advantages(outcomes) == pytest.approx([d / math.sqrt(0.14) for d in (-0.5, 0.1, 0.4)])
    assert trace_advantages(outcomes, ddof=1) == pytest.approx([d / math.sqrt(0.21) for d in (-0.5, 0.1, 0.4)])


def test_equation_4_has_a_floor_so_that_near_ties_stay_small() -> None:
    # σ = 0.01 < σ_min: divided by 0.1, ±0.1 instead of ±1
    assert trace_advantages([0.49, 0.51]) == pytest.approx([-0.1, 0.1])
    assert trace_advantages([0.49, 0.51], floor=0.001) == pytest.approx([-1, 1])
    assert trace_advantages([0.3]) == trace_advantages([0.3], ddof=1) == [0]


@pytest.mark.parametrize(("outcomes", "floor"), [([], 0.1), ([math.nan], 0.1), ([0.1, 0.2], 0), ([0.1], math.nan)])
def test_equation_4_refuses_what_it_cannot_normalise(outcomes: list[float], floor: float) -> None:
    with pytest.raises(ReactionError):
        trace_advantages(outcomes, floor)


def test_equations_5_and_7_by_hand() -> None:
    # mean of the three is 0.02; α = 15
    process = [0.08, -0.03, 0.01]
    assert direct_advantages(0.5, process) == pytest.approx([0.5 + 1.2, 0.5 - 0.45, 0.5 + 0.15])
    assert turn_advantages(0.5, process) == pytest.approx([0.5 + 0.9, 0.5 - 0.75, 0.5 - 0.15])
    assert turn_advantages(0.5, process, alpha=0) == [0.5, 0.5, 0.5]
    assert turn_advantages(0.5, []) == direct_advantages(0.5, []) == []


@given(trace=st.floats(-3, 3), process=st.lists(st.floats(-1, 1), min_size=1, max_size=8), alpha=st.floats(0, 50))
def test_centred_credit_leaves_the_rollouts_mean_and_differs_from_direct_credit_by_the_offset_of_equation_6(
    trace: float, process: list[float], alpha: float
) -> None:
    centred, direct = turn_advantages(trace, process, alpha), direct_advantages(trace, process, alpha)
    assert sum(centred) / len(centred) == pytest.approx(trace, abs=1e-9)
    offset = alpha * sum(process) / len(process)
    assert [d - c for d, c in zip(direct, centred, strict=True)] == pytest.approx([offset] * len(process), abs=1e-9)


# --- states and anchors -----------------------------------------------------------------------------------------------


def test_an_update_is_clipped_to_the_scale() -> None:
    assert State(95, 3).moved(12, -8) == State(100, 0)
    assert State(95, 3).moved(-12, 8) == State(83, 11)
    for move in (math.nan, math.inf, "3", None, True, 10**400):
        with pytest.raises(ReactionError, match="moved"):
            State(50, 50).moved(move, 0)  # type: ignore[arg-type]


def test_states_and_anchors_go_through_json() -> None:
    for thing in (State(12.5, 100), DEFENSE):
        assert type(thing).from_record(json.loads(json.dumps(thing.record))) == thing


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "object"),
        ([1, 2], "object"),
        ({"a": 1}, "'t'"),
        ({"a": 1, "t": 2, "x": 3}, "'x'"),
        ({"a": 101, "t": 2}, "a is 101"),
        ({"a": 1, "t": -1}, "t is -1"),
        ({"a": "1", "t": 2}, "a is '1'"),
        ({"a": True, "t": 2}, "a is True"),
        ({"a": math.nan, "t": 2}, "a is nan"),
        ({"a": 1, "t": 10**400}, "t is"),
    ],
)
def test_a_damaged_state_is_named(record: Any, words: str) -> None:
    with pytest.raises(ReactionError, match=words):
        State.from_record(record)
    with pytest.raises(ReactionError, match="anchor 'start'"):
        Anchors.from_record({"start": record, "succeed": {"a": 0, "t": 100}, "fail": {"a": 100, "t": 0}})


@pytest.mark.parametrize(
    ("start", "succeed", "fail", "axis"),
    [
        ((75, 15), (80, 45), (95, 0), "a"),
        ((75, 15), (75, 45), (95, 0), "a"),
        ((95, 15), (30, 45), (95, 0), "a"),
        ((75, 15), (30, 15), (95, 0), "t"),
        ((75, 0), (30, 45), (95, 0), "t"),
        ((75, 15), (30, 45), (95, 20), "t"),
    ],
)
def test_anchors_out_of_order_are_refused(start: Any, succeed: Any, fail: Any, axis: str) -> None:
    with pytest.raises(ReactionError, match=f"anchors on {axis}"):
        Anchors(State(*start), State(*succeed), State(*fail))


# --- what moves the state ---------------------------------------------------------------------------------------------


def test_every_scene_has_a_rule_for_every_event_and_kindness_alone_helps() -> None:
    assert set(RULES) == set(SCENES)
    for scene, rules in RULES.items():
        assert set(rules) == set(EVENTS), scene
        for event, (da, dt) in rules.items():
            helps = event in ("warmth", "progress")
            assert (da < 0 < dt) if helps else (da > 0 > dt), (scene, event)


def test_an_update_by_hand() -> None:
    # Defense: warmth (−6, 5) at half strength, refusal (2, −1): a −3 + 2, t 2.5 − 1
    appraisal = Appraisal({"refusal": 1.0, "warmth": 0.5}, {"warmth": "'a frustrating place'"})
    after, reason = update(State(75, 15), appraisal, "Defense")
    assert (after.a, after.t) == (74, 16.5)
    assert reason == "refusal; warmth ('a frustrating place'): a -1, t +2"
    twice, _ = update(State(75, 15), appraisal, "Defense", sensitivity=2)
    assert (twice.a, twice.t) == (73, 18)
    assert update(State(75, 15), Appraisal(), "Defense") == (State(75, 15), "nothing that matters: a +0, t +0")
    assert update(State(75, 15), appraisal, "Defense", sensitivity=0)[0] == State(75, 15)


@given(
    events=st.dictionaries(st.sampled_from(EVENTS), st.floats(0.01, 1)), scene=st.sampled_from(SCENES),
    a=numbers, t=numbers, sensitivity=st.floats(0, 100),
)  # fmt: skip
def test_one_turn_moves_an_axis_by_a_bounded_step_within_the_scale(
    events: dict[str, float], scene: Scene, a: float, t: float, sensitivity: float
) -> None:
    after, _ = update(State(a, t), Appraisal(events), scene, sensitivity)
    assert abs(after.a - a) <= MAX_STEP + 1e-9 and abs(after.t - t) <= MAX_STEP + 1e-9


@pytest.mark.parametrize(("scene", "sensitivity"), [("defense", 1), ("Sales", 1), (None, 1), ("Charm", -1)])
def test_an_unknown_scene_or_a_negative_sensitivity_is_refused(scene: Any, sensitivity: float) -> None:
    with pytest.raises(ReactionError):
        update(State(50, 50), Appraisal(), scene, sensitivity)


def _played(scenario: Any, appraisal: Appraisal) -> tuple[State, str]:
    """A dialogue in which the agent does the same in every turn, up to where the customer stops."""
    state = scenario.anchors.start
    for turn in range(1, T_MAX + 1):
        state, _ = update(state, appraisal, scenario.scene, scenario.sensitivity)
        if ended := decides_to_stop(state, scenario.anchors, turn):
            return state, ended
    raise AssertionError("nobody stopped")


def test_in_every_shipped_scenario_a_warm_and_useful_agent_succeeds_and_a_cold_one_fails() -> None:
    for scenario in read_scenarios():
        warm, ended = _played(scenario, Appraisal({"warmth": 0.9, "progress": 0.9}))
        assert (ended, outcome(warm, scenario.anchors)) == ("succeeded", 1), scenario.id
        cold, ended = _played(scenario, Appraisal({"coldness": 0.9, "ignored cue": 0.9}))
        assert (ended, outcome(cold, scenario.anchors)) == ("failed", -1), scenario.id
        stuck, ended = _played(scenario, Appraisal({"repeated question": 0.9}))
        assert outcome(stuck, scenario.anchors) < -0.5, (scenario.id, stuck, ended)


def test_in_defense_a_refusal_with_warmth_and_an_offer_wins_where_its_refrain_loses() -> None:
    """F.2's two agents: both refuse; one says the same line again, the other acknowledges and offers a fix."""
    refrain = [Appraisal({"refusal": 1})] + [Appraisal({"refusal": 1, "rigid refrain": 1})] * 5
    firm_and_warm = [Appraisal({"warmth": 1, "refusal": 0.5}), Appraisal({"warmth": 0.5, "progress": 1})] * 3
    base, trained = (follow(DEFENSE.start, turns, "Defense")[0][-1] for turns in (refrain, firm_and_warm))
    assert base.a > DEFENSE.start.a > trained.a and base.t < DEFENSE.start.t < trained.t
    assert outcome(base, DEFENSE) < -0.8 and outcome(trained, DEFENSE) > 0.38


def test_follow_is_update_from_turn_to_turn() -> None:
    turns = [Appraisal({"warmth": 1}), Appraisal({"no progress": 0.5}), Appraisal()]
    states, reasons = follow(State(75, 15), turns, "Repair", 1.5)
    assert len(states) == 4 and len(reasons) == 3
    for before, turn, after, reason in zip(states, turns, states[1:], reasons, strict=False):
        assert update(before, turn, "Repair", 1.5) == (after, reason)


# --- stopping and coupling --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "t", "turns", "ended"),
    [
        (30, 45, 1, "succeeded"),
        (20, 90, 8, "succeeded"),  # at the limit, too
        (30, 44, 3, None),  # calm, and not yet won over
        (95, 0, 3, "failed"),
        (100, 5, 3, None),  # furious, and still talking
        (60, 20, 7, None),
        (60, 20, 8, "turns"),
    ],
)
def test_the_customer_stops_where_nothing_is_left_to_win_or_lose(a: float, t: float, turns: int, ended: Any) -> None:
    assert decides_to_stop(State(a, t), DEFENSE, turns) == ended


def test_without_a_gain_the_dose_is_exactly_what_was_asked_for() -> None:
    assert {dose_scale(State(a, 50), DEFENSE) for a in range(101)} == {1.0}


def test_a_rising_a_raises_the_dose_and_a_falling_one_lowers_it() -> None:
    def scale(a: float, gain: float = 0.5, cap: float = 2) -> float:
        return dose_scale(State(a, 50), DEFENSE, gain, cap)

    assert (scale(75), scale(95), scale(30)) == (1, 1.5, 0.5)
    assert scale(85) == pytest.approx(1.25)  # half way to failure
    assert scale(52.5) == pytest.approx(0.75)  # half way to success
    assert (scale(100, gain=3), scale(30, gain=3)) == (2, 0), "the cap, and never the opposite pole"
    with pytest.raises(ReactionError, match="gain"):
        scale(50, gain=-1)
    for cap in (0.9, math.nan):
        with pytest.raises(ReactionError, match="cap"):
            scale(50, cap=cap)
