"""Ratings by pairwise votes: closed forms, a search for the maximum, and votes of players whose strength is known."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from traitbasis.errors import EvaluationError
from traitbasis.evaluation.bradley_terry import Vote, rate
from traitbasis.metrics.estimate import draw_tasks


def votes(*results: tuple[str, str, float], task: str = "t") -> dict[str, list[Vote]]:
    return {task: [Vote(*result) for result in results]}


def elos(by_task: Mapping[str, Sequence[Vote]]) -> dict[str, float]:
    return {rating.player: rating.elo.value for rating in rate(by_task, times=10).players}


def test_two_players_are_rated_in_closed_form() -> None:
    """A share p of wins is 400 log10(p / (1 - p)) Elo; a tie is half a win for each."""
    found = rate(votes(*[("a", "b", 1.0)] * 5, *[("b", "a", 1.0)] * 2, *[("a", "b", 0.5)] * 3))
    difference = found["a"].elo.value - found["b"].elo.value
    assert difference == pytest.approx(400 * math.log10(6.5 / 3.5))
    assert found["a"].elo.value + found["b"].elo.value == pytest.approx(3000)
    assert found["a"].win_rate.value == pytest.approx(0.65) and found["a"].comparisons == 10 and not found.bounded


def test_strengths_are_where_a_search_finds_the_highest_likelihood() -> None:
    rng = random.Random(1)
    results = [(a, b, rng.choice([0.0, 0.5, 1.0])) for a, b in itertools.combinations("xyz", 2) for _ in range(7)]

    def log_likelihood(y: float, z: float) -> float:
        theta = {"x": 0.0, "y": y, "z": z}
        chance = {(a, b): 1 / (1 + math.exp(theta[b] - theta[a])) for a, b, _ in results}
        return sum(s * math.log(chance[a, b]) + (1 - s) * math.log(1 - chance[a, b]) for a, b, s in results)

    best, width = (0.0, 0.0), 4.0
    while width > 1e-6:  # a grid around the best so far, ever finer
        steps = [width * i / 5 for i in range(-5, 6)]
        best = max(((best[0] + i, best[1] + j) for i in steps for j in steps), key=lambda at: log_likelihood(*at))
        width /= 2
    found = elos(votes(*results))
    scale = 400 / math.log(10)
    assert found["y"] - found["x"] == pytest.approx(scale * best[0], abs=0.01)
    assert found["z"] - found["x"] == pytest.approx(scale * best[1], abs=0.01)


def simulated(strengths: Mapping[str, float], tasks: int, rounds: int, seed: int = 0) -> dict[str, list[Vote]]:
    """Votes of players whose Elo is known."""
    rng = random.Random(seed)
    return {
        f"t{task:02}": [
            Vote(a, b, float(rng.random() < 1 / (1 + 10 ** ((strengths[b] - strengths[a]) / 400))))
            for a, b in itertools.combinations(strengths, 2)
            for _ in range(rounds)
        ]
        for task in range(tasks)
    }


def test_known_strengths_are_found_again_and_intervals_hold_them_as_often_as_they_say() -> None:
    truth = {"steered": 1620.0, "sft": 1560.0, "prompted": 1520.0, "lora": 1300.0}
    found = rate(simulated(truth, tasks=60, rounds=12))
    assert [rating.player for rating in found.players] == list(truth)
    assert all(found[player].elo.value == pytest.approx(strength, abs=25) for player, strength in truth.items())
    held = []
    for seed in range(40):
        ratings = rate(simulated(truth, tasks=30, rounds=2, seed=seed), times=300)
        held += [ratings[player].elo.low < strength < ratings[player].elo.high for player, strength in truth.items()]
    assert 0.88 < sum(held) / len(held) < 0.99, "95 % of them should"


def test_neither_the_order_of_votes_nor_of_names_matters() -> None:
    by_task = simulated({"a": 1600, "b": 1500, "c": 1400}, tasks=6, rounds=3)
    renamed = {"a": "z", "b": "y", "c": "x"}
    turned = {
        task: [Vote(renamed[v.b], renamed[v.a], 1 - v.score) for v in reversed(given)]
        for task, given in reversed(by_task.items())
    }
    one, other = rate(by_task), rate(turned)
    for rating in one.players:
        again = other[renamed[rating.player]]
        assert (again.elo.value, again.elo.low) == pytest.approx((rating.elo.value, rating.elo.low), abs=1e-6)
        assert again.win_rate == rating.win_rate


def test_intervals_are_those_of_tasks_drawn_again_one_draw_for_all_players() -> None:
    wins = {"t0": 3, "t1": 9, "t2": 6, "t3": 5}  # of ten
    by_task = {task: [Vote("a", "b", float(i < won)) for i in range(10)] for task, won in wins.items()}
    found = rate(by_task, times=400, seed=3)
    drawn = [sum(list(wins.values())[i] for i in row) / 40 for row in draw_tasks(4, 400, 3)]
    expected = [1500 + 200 * math.log10(share / (1 - share)) for share in drawn]
    assert (found["a"].elo.low, found["a"].elo.high) == pytest.approx(tuple(np.quantile(expected, [0.025, 0.975])))
    assert found["a"].elo.low + found["b"].elo.high == pytest.approx(3000)
    assert (found["a"].win_rate.low, found["a"].win_rate.high) == pytest.approx(
        tuple(np.quantile(drawn, [0.025, 0.975]))
    )
    assert math.isnan(rate({"t0": by_task["t0"]})["a"].elo.low), "one task says nothing of others"


def test_a_player_who_never_wins_gets_one_more_tie_with_whom_it_met() -> None:
    results = [*[("a", "b", 1.0)] * 4, ("b", "a", 1.0), *[("a", "c", 1.0)] * 2, *[("b", "c", 1.0)] * 2]
    found = rate(votes(*results))
    ties = [(a, b, 0.5) for a, b in itertools.combinations("abc", 2)]
    assert found.bounded and elos(votes(*results)) == pytest.approx(elos(votes(*results, *ties)), abs=1e-6)
    assert found["c"].win_rate.value == 0 and found["c"].comparisons == 4
    assert not rate(votes(*results, ("c", "b", 1.0))).bounded


def test_players_that_were_never_compared_are_named() -> None:
    with pytest.raises(EvaluationError, match=r"never compared: a, b \| c, d; give dialogues of one task"):
        rate(votes(("a", "b", 1), ("b", "a", 1), ("c", "d", 1), ("d", "c", 1)))
    with pytest.raises(EvaluationError, match="no vote"):
        rate({"t": []})
    for wrong in (Vote("a", "a", 1), Vote("a", "b", 2), Vote("a", "b", math.nan)):
        with pytest.raises(EvaluationError, match="no comparison of two players"):
            rate({"t": [wrong]})
