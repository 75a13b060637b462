"""Levels off a measured curve: compared with brute force and with interpolation on fine grids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import hook_count
from samples import lettered_set, sample_contexts, sample_vector
from tiny import LAYERS, tiny_model

from traitbasis.basis import Basis
from traitbasis.calibrate import (
    DOSES,
    LIMITS,
    Levels,
    Limits,
    at,
    calibrate,
    column,
    crossing,
    damaged,
    isotonic,
    read_levels,
    with_columns,
)
from traitbasis.errors import ArtifactError, SweepError
from traitbasis.metrics.likelihood import PairLikelihood
from traitbasis.model import LanguageModel
from traitbasis.reading import Reader
from traitbasis.select import Screening, Selector, bootstrap, gains
from traitbasis.sweep import UNSTEERED, Cell, Generator, SweptTurn, read_cells

numbers = st.floats(-5, 5).map(lambda value: round(value, 3))
doses_of = st.lists(st.floats(0.03, 3).map(lambda dose: round(dose, 3)), min_size=1, max_size=9, unique=True).map(
    sorted
)
TURNS = 4


# --- isotonic regression ----------------------------------------------------------------------------------------------


@given(st.lists(numbers, max_size=9))
def test_isotonic_is_the_nearest_rising_sequence(values: list[float]) -> None:
    """By the max-min formula: g_i is the largest, over beginnings a <= i, of the least mean of values a ... b >= i."""
    n = len(values)
    brute = [max(min(float(np.mean(values[a : b + 1])) for b in range(i, n)) for a in range(i + 1)) for i in range(n)]
    assert isotonic(values) == pytest.approx(brute, abs=1e-9)


@given(st.lists(numbers, min_size=1, max_size=6), st.lists(st.floats(0, 2), min_size=6, max_size=6))
def test_no_other_rising_sequence_is_nearer(values: list[float], steps: list[float]) -> None:
    found = np.array(isotonic(values))
    assert all(a <= b + 1e-9 for a, b in pairwise(found))
    other = found + np.cumsum(steps[: len(values)]) - np.mean(steps)
    assert np.sum((found - values) ** 2) <= np.sum((other - values) ** 2) + 1e-9
    assert found.mean() == pytest.approx(np.mean(values), abs=1e-9)


def test_what_rises_already_stays_as_it_is() -> None:
    assert isotonic([0.1, 0.1, 0.4]) == [0.1, 0.1, 0.4]
    assert isotonic([3, 2, 1]) == [2, 2, 2] and isotonic([]) == []


# --- reading a curve --------------------------------------------------------------------------------------------------


@st.composite
def rising_curves(draw: st.DrawFn) -> tuple[list[float], list[float]]:
    doses = draw(doses_of)
    steps = draw(st.lists(st.floats(0, 1).map(lambda v: round(v, 2)), min_size=len(doses), max_size=len(doses)))
    return doses, np.cumsum(steps).round(4).tolist()


@given(rising_curves(), st.floats(0, 5))
def test_at_interpolates_from_nothing_at_dose_0(curve: tuple[list[float], list[float]], dose: float) -> None:
    doses, values = curve
    assert at(doses, values, dose) == pytest.approx(np.interp(dose, [0, *doses], [0, *values]), abs=1e-9)


@given(rising_curves(), st.floats(0, 4).map(lambda level: round(level, 3)))
def test_a_crossing_is_the_last_place_of_a_fine_grid_within_the_level(
    curve: tuple[list[float], list[float]], level: float
) -> None:
    doses, values = curve
    found = crossing(doses, values, level)
    grid = np.linspace(0, doses[-1], 20_001)
    within = grid[np.interp(grid, [0, *doses], [0, *values]) <= level + 1e-9]
    assert found == pytest.approx(within[-1], abs=2 * doses[-1] / 20_000)
    assert at(doses, values, found) <= level + 1e-9


def test_a_crossing_beyond_the_curve_is_its_end() -> None:
    assert crossing([0.1, 0.2], [0.0, 0.1], 0.3) == 0.2
    assert crossing([0.1, 0.2], [0.3, 0.4], 0.3) == 0.1
    assert crossing([0.1, 0.2], [0.0, 0.0], 0.0) == 0.2


# --- levels -----------------------------------------------------------------------------------------------------------


@st.composite
def measured(draw: st.DrawFn) -> dict[str, Any]:
    """Curves that rise, with noise on top, or noise alone."""
    doses = draw(doses_of)
    n = len(doses)

    def curve(low: float, high: float) -> list[float]:
        noise = draw(st.lists(st.floats(low, high), min_size=n, max_size=n))
        slope = draw(st.sampled_from([0.0, 0.2, 1.0, 3.0]))
        return [round(min(max(slope * dose + value, low), high), 4) for dose, value in zip(doses, noise, strict=True)]

    expression = curve(-1, 3)
    spread = draw(st.floats(0, 1))
    return {
        "doses": doses,
        "gains": [torch.tensor([value - spread, value, value + spread]) for value in expression],
        "damage": curve(0, 1),
        "fact_cost": curve(-0.5, 4),
        "facts": curve(0, 1),
    }


@given(measured(), st.sampled_from([LIMITS, Limits(damage=0.1, high_damage=0.1, fact_cost=0.3, high_fact_cost=0.3)]))
def test_levels_always_rise_and_stay_within_the_limit(curve: dict[str, Any], limits: Limits) -> None:
    try:
        levels = read_levels(**curve, limits=limits)
    except SweepError as error:
        assert "far beyond the limit; begin with a smaller one" in str(error)
        return
    assert 0 < levels.low < levels.medium < levels.high <= levels.limit
    expression = [point.expression for point in levels.curve]
    low, medium, high = (at(curve["doses"], expression, dose) for dose in (levels.low, levels.medium, levels.high))
    if expression[0] >= 0:  # below, the curve falls from nothing at dose 0
        assert low <= medium <= high
    made = column(levels, sample_vector(), 1, True)
    assert 0 < made.low < 1 < made.high


@given(measured())
def test_damage_and_fact_cost_keep_their_limits_at_every_level(curve: dict[str, Any]) -> None:
    """Read off the fitted curves by interpolation."""
    try:
        levels = read_levels(**curve)
    except SweepError:
        return
    doses = [0, *curve["doses"]]
    for name, at_limit, at_high in (
        ("damage", LIMITS.damage, LIMITS.high_damage),
        ("fact_cost", LIMITS.fact_cost, LIMITS.high_fact_cost),
    ):
        fitted = [0, *isotonic(curve[name])]
        slope = max((b - a) / (y - x) for (x, y), (a, b) in zip(pairwise(doses), pairwise(fitted), strict=True))
        rounding = 1e-9 + 1e-4 * max(slope, 0)
        assert np.interp(levels.limit, doses, fitted) <= at_limit + rounding
        assert np.interp(levels.high, doses, fitted) <= at_high + rounding
    fitted = [0, *isotonic(curve["fact_cost"])]
    slope = max((b - a) / (y - x) for (x, y), (a, b) in zip(pairwise(doses), pairwise(fitted), strict=True))
    assert np.interp(levels.medium, doses, fitted) <= LIMITS.medium_fact_cost + 1e-9 + 1e-4 * max(slope, 0)


def straight(n: int, damage: float = 0, cost: float = 0, expression: float = 2, turns: int = 4) -> dict[str, Any]:
    """Straight lines over doses 0.1, 0.2, ...: what is given a dose of 1."""
    doses = [round(0.1 * (i + 1), 1) for i in range(n)]
    return {
        "doses": doses,
        "gains": [torch.full((turns,), expression * dose) for dose in doses],
        "damage": [damage * dose for dose in doses],
        "fact_cost": [cost * dose for dose in doses],
        "facts": [1 - 0.1 * dose for dose in doses],
    }


def levels_of(levels: Levels) -> tuple[float, float, float, float]:
    return levels.low, levels.medium, levels.high, levels.limit


def test_a_curve_that_never_passes_the_limit_is_capped_at_its_end() -> None:
    levels = read_levels(**straight(5))
    assert levels.capped and levels.limit == levels.high == 0.5
    assert levels_of(levels) == (0.2, 0.4, 0.5, 0.5), "medium four fifths of high, low where half of it is expressed"


def test_damage_alone_sets_limit_and_high() -> None:
    levels = read_levels(**straight(9, damage=1.0))
    assert not levels.capped
    assert levels_of(levels) == (0.08, 0.16, 0.2, 0.5)


def test_lost_facts_alone_set_all_levels() -> None:
    levels = read_levels(**straight(9, cost=2.5))
    assert levels_of(levels) == (0.05, 0.1, 0.24, 0.6)


def test_other_limits_are_kept() -> None:
    limits = Limits(damage=0.2, high_damage=0.1, fact_cost=9, high_fact_cost=9, medium_fact_cost=9)
    assert levels_of(read_levels(**straight(9, damage=1.0, cost=2.5), limits=limits)) == (0.04, 0.08, 0.1, 0.2)


def test_low_stays_within_a_quarter_and_three_quarters_of_medium() -> None:
    late, early = straight(5), straight(5)
    late["gains"] = [torch.full((4,), value) for value in (0.0, 0.0, 0.0, 2.0, 2.0)]  # half of it only at 0.35
    early["gains"] = [torch.full((4,), value) for value in (2.0, 2.0, 2.0, 2.0, 2.0)]
    assert read_levels(**late).low == 0.3 and read_levels(**early).low == 0.1


def test_one_good_cell_between_bad_ones_does_not_lift_the_limit() -> None:
    """Noise: a dose that does damage, and a larger one that by chance does none."""
    noisy = straight(6)
    noisy["damage"] = [0.0, 0.0, 0.9, 0.3, 0.9, 1.0]
    levels = read_levels(**noisy)
    assert 0.2 < levels.limit < 0.3, "0.9 and 0.3 are taken for 0.6 each"


def test_doses_are_capped_whatever_their_last_digit() -> None:
    curve = straight(3)
    curve["doses"] = [0.1, 0.2, 1 / 3]
    assert read_levels(**curve).capped


def test_when_the_limits_leave_no_room_that_is_said() -> None:
    with pytest.raises(SweepError, match=r"a dose of 0\.1 is far beyond the limit; begin with a smaller one"):
        read_levels(**straight(3, damage=1.0), limits=Limits(damage=0.0, high_damage=0.0))
    with pytest.raises(SweepError, match="begin with a smaller one"):
        read_levels(**straight(3, cost=1e6))


def test_the_curve_is_what_was_measured_made_monotone() -> None:
    curve = straight(4, damage=0.5)
    curve["gains"] = [torch.tensor(row) for row in ([0.0, 0.2], [0.7, 0.9], [0.3, 0.5], [1.0, 1.0])]
    levels = read_levels(**curve)
    assert [point.dose for point in levels.curve] == [0.1, 0.2, 0.3, 0.4]
    assert [point.expression for point in levels.curve] == pytest.approx([0.1, 0.6, 0.6, 1.0])
    assert [point.damage for point in levels.curve] == pytest.approx([0.05, 0.1, 0.15, 0.2])
    assert [point.facts for point in levels.curve] == pytest.approx([0.99, 0.98, 0.97, 0.96])
    for point, gain in zip(levels.curve, curve["gains"], strict=True):
        low, high = bootstrap(gain)
        assert point.expression_high - point.expression_low == pytest.approx(high - low, abs=2e-4)
        assert point.expression_low <= point.expression <= point.expression_high
    assert levels.fact_cost == (0, 0, 0, 0)


# --- damage -----------------------------------------------------------------------------------------------------------


def cell_of(**scores: Sequence[float]) -> Cell:
    n = len(next(iter(scores.values())))
    return Cell(
        "steered",
        "impatience",
        1,
        0.2,
        tuple(SweptTurn("t", i, "text", {name: row[i] for name, row in scores.items()}) for i in range(n)),
    )


def screening(surprise: tuple[float, float] = (3.0, 0.5)) -> Screening:
    return Screening((0.3,) * LAYERS, (0.9,) * LAYERS, (2.0,) * LAYERS, 2, 0.9, 1, 0.9, surprise)


def test_a_turn_is_damaged_once_however_many_things_are_wrong_with_it() -> None:
    cell = cell_of(
        broken=[0, 1, 0, 0, 1, 0], surprise=[3.0, 3.0, 4.1, 4.0, 9.0, 3.0], relevance=[1, 1, 1, 0.1, -1, 0.0]
    )
    assert damaged(cell, screening()) == pytest.approx(4 / 6)
    assert damaged(cell, screening((9.0, 0.5))) == pytest.approx(3 / 6)


# --- columns ----------------------------------------------------------------------------------------------------------


@given(measured())
def test_a_columns_levels_are_the_doses_of_its_basis(curve: dict[str, Any]) -> None:
    try:
        levels = read_levels(**curve)
    except SweepError:
        return
    vector = sample_vector()
    made = column(levels, vector, 2, True)
    basis = Basis((made,), vector.vector[2][:, None])
    spec = {name: basis.parse(f"impatience-{name}") for name in ("low", "medium", "high")}
    for name in spec:
        assert basis.dose(spec[name]) == pytest.approx(getattr(levels, name), rel=1e-3)
    assert made.limit == levels.limit and made.curve == levels.curve and made.steerable
    assert made.layer == 2 and made.aliases == vector.aliases and made.provenance == vector.provenance
    assert basis.load_share(spec["high"]) <= 1 + 1e-3, "high is served"


def test_a_column_replaces_its_own_and_leaves_the_others(tmp_path: Path) -> None:
    levels = read_levels(**straight(5))
    first, second = sample_vector("a", seed=1), sample_vector("b", seed=2)
    made = {v.trait: (column(levels, v, 1, True), v.vector[1]) for v in (first, second)}
    basis = with_columns(None, made)
    assert basis.traits == ("a", "b") and torch.equal(basis.matrix[:, 1], second.vector[1])
    less = replace(levels, medium=0.3, high=0.4)
    changed = with_columns(basis, {"a": (column(less, first, 3, False), first.vector[3])})
    assert changed.traits == ("a", "b") and changed.columns[1] == basis.columns[1]
    assert changed.columns[0].layer == 3 and not changed.columns[0].steerable
    assert torch.equal(changed.matrix, torch.stack([first.vector[3], second.vector[1]], 1))
    assert Basis.load(changed.save(tmp_path / "basis.safetensors")).columns == changed.columns
    stranger = sample_vector("c", model_fingerprint="f" * 16)
    with pytest.raises(ArtifactError, match="model_fingerprint"):
        with_columns(basis, {"c": (column(levels, stranger, 1, True), stranger.vector[1])})


# --- on a model -------------------------------------------------------------------------------------------------------

CONTEXTS = sample_contexts(2)
PAIRS = lettered_set("impatience", "x")


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def generator(lm: LanguageModel) -> Iterator[Generator]:
    with Generator(lm, CONTEXTS, turns=TURNS, max_tokens=6) as made:
        yield made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier learns from these pairs alone."""
    monkeypatch.setattr("traitbasis.select.REFERENCE_TRAITS", ())


def here(generator: Generator, home: Path) -> Selector:
    """As the command makes it."""
    return Selector(generator, home, folder="calibration")


def test_a_trait_is_calibrated_on_a_model_and_goes_on_where_it_was(
    lm: LanguageModel, generator: Generator, tmp_path: Path
) -> None:
    doses = (0.1, 0.4, 0.2, 0.4)
    mild = screening((8.0, 2.0))
    selector, done = here(generator, tmp_path), list[int]()
    levels = calibrate(selector, PAIRS, 2, mild, doses=doses, progress=done.append)
    assert 0 < levels.low < levels.medium < levels.high <= levels.limit
    assert sum(done) == len(levels.curve) == 3 and [point.dose for point in levels.curve] == [0.1, 0.2, 0.4]

    header, cells = read_cells(tmp_path / "calibration" / "impatience-layer-2.jsonl")
    assert header["layer"] == 2 and header["trait"] == "impatience"
    vector = selector.vector(PAIRS)
    pairs = PairLikelihood(Reader(lm), PAIRS.select("extra"))
    for i, (cell, point) in enumerate(zip(cells, levels.curve, strict=True)):
        assert (cell.condition, cell.layer, cell.dose) == ("steered", 2, point.dose)
        expected = pairs.measure({2: vector.vector[2] * point.dose / vector.dose(2)}).fact_cost.mean()
        assert levels.fact_cost[i] == pytest.approx(float(expected), abs=2e-4)
        assert point.facts == pytest.approx(float(cell.scores("facts").mean()), abs=1e-4)
    (plain,) = selector.baselines([UNSTEERED], selector.instruments(PAIRS))
    shown = [float(torch.stack(list(gains(cell, "impatience", plain).values())).mean()) for cell in cells]
    assert [point.expression for point in levels.curve] == pytest.approx(isotonic(shown), abs=1e-3)

    drawn = generator._engine.stats().prompt_tokens
    assert calibrate(here(generator, tmp_path), PAIRS, 2, mild, doses=doses) == levels
    assert generator._engine.stats().prompt_tokens == drawn, "everything was there"
    more = calibrate(here(generator, tmp_path), PAIRS, 2, mild, doses=(*doses, 0.8))
    assert generator._engine.stats().prompt_tokens > drawn and more.curve[1].dose == 0.2
    assert hook_count(lm.model) == 0
    made = column(levels, vector, 2, True)
    assert Basis((made,), vector.vector[2][:, None]).dose({"impatience": made.high}) == pytest.approx(
        levels.high, rel=1e-3
    )


def test_doses_at_which_the_facts_are_gone_are_not_drawn_but_for_the_first(
    generator: Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {0.1: 0.2, 0.2: 0.9, 0.3: 2.0, 0.4: 3.0, 0.5: 4.0}
    monkeypatch.setattr("traitbasis.calibrate._fact_costs", lambda *arguments: [costs[d] for d in arguments[-1]])
    levels = calibrate(here(generator, tmp_path), PAIRS, 2, screening((8.0, 2.0)), doses=tuple(costs))
    assert [point.dose for point in levels.curve] == [0.1, 0.2, 0.3] and levels.fact_cost == (0.2, 0.9, 2.0)
    assert levels.limit <= 0.2 + 0.1 * 0.6 / 1.1 + 1e-4 and not levels.capped


def test_another_layer_is_measured_anew(generator: Generator, tmp_path: Path) -> None:
    mild = screening((8.0, 2.0))
    one, two = (calibrate(here(generator, tmp_path), PAIRS, layer, mild, doses=(0.1, 0.4)) for layer in (1, 2))
    assert one.curve != two.curve
    assert calibrate(here(generator, tmp_path), PAIRS, 1, mild, doses=(0.1, 0.4)) == one


def test_it_works_beside_a_selection_with_other_turns(lm: LanguageModel, generator: Generator, tmp_path: Path) -> None:
    """As the commands are by default: ten turns of seed 0, then twelve of seed 1, in one folder."""
    Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(PAIRS)
    with Generator(lm, CONTEXTS, turns=TURNS + 1, seed=1, max_tokens=6) as other:
        levels = calibrate(here(other, tmp_path), PAIRS, 1, screening((8.0, 2.0)), doses=(0.1,))
    assert levels.low < levels.medium < levels.high
    Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(PAIRS)


@pytest.mark.parametrize("doses", [(), (0.0, 0.1), (-0.1,), (11.0,), (float("nan"),)])
def test_doses_that_cannot_be_are_refused(generator: Generator, tmp_path: Path, doses: tuple[float, ...]) -> None:
    with pytest.raises(SweepError, match="must be above 0 and at most 10"):
        calibrate(here(generator, tmp_path), PAIRS, 2, screening(), doses=doses)
    assert all(0 < dose <= 10 for dose in DOSES)
