"""The choice of layer and dose: the rule on cells made by hand, and the whole chain on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import hook_count, plain_reading
from samples import lettered_set, sample_contexts
from tiny import LAYERS, WIDTH, tiny_model

from traitbasis.engines.base import Request
from traitbasis.errors import PairError, SweepError
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.realism import is_role_flip
from traitbasis.metrics.turns import stated_facts
from traitbasis.model import LanguageModel
from traitbasis.pairs import PairSet, load_pairs
from traitbasis.select import (
    RULE,
    Likely,
    Screening,
    Selection,
    Selector,
    Summary,
    best_layers,
    bootstrap,
    choose,
    clearest,
    read_selection,
    read_selections,
    save_selections,
)
from traitbasis.sweep import UNSTEERED, Cell, Condition, Generator, SweptTurn, random_direction, read_cells

N = 10
NOISE = np.tile([-0.1, 0.1], N // 2)  # so that intervals are no points
GOOD: dict[str, Any] = {"facts": 1.0, "broken": 0.0, "role_flip": 0.0, "surprise": 3.0, "relevance": 1.0, "words": 20.0}
SCREENING = Screening((0.3,) * LAYERS, (0.9,) * LAYERS, (2.0,) * LAYERS, 2, 0.95, 1, 0.9, surprise=(3.5, 0.5))


def cell(
    layer: int | None = 1,
    dose: float = 0.2,
    gain: Any = 0.0,
    condition: Condition = "steered",
    trait: str = "impatience",
    **scores: Any,
) -> Cell:
    """A cell whose turns score as said: a number for all turns, or one a turn."""
    rows = {name: np.broadcast_to(value, N) for name, value in {**GOOD, **scores}.items()}
    rows |= {f"probe:{trait}": 0.3 + gain + NOISE, f"classifier:{trait}": 0.1 + gain - NOISE / 2}
    turns = tuple(
        SweptTurn(f"task-{i}", i, "text", {name: float(row[i]) for name, row in rows.items()}) for i in range(N)
    )
    return Cell(condition, trait if condition != "random" else None, layer, dose, turns)


def unlike(one: Cell) -> Cell:
    """With noise of its own: with the same in every cell, differences would have none."""
    turns = [
        replace(turn, scores={name: v - float(NOISE[i]) / 3 * (":" in name) for name, v in turn.scores.items()})
        for i, turn in enumerate(one.turns)
    ]
    return replace(one, turns=tuple(turns))


PLAIN = unlike(cell(None, 0.0, condition="unsteered"))
PROMPTED = cell(None, 0.0, 0.5, "prompted")


def random_cells(cells: Sequence[Cell], gain: float = 0.0) -> list[Cell]:
    return [cell(c.layer, c.dose, gain, "random") for c in cells]


def choice(
    *cells: Cell,
    likelihood: Sequence[Likely] = (),
    screening: Screening = SCREENING,
    unsteered: Cell = PLAIN,
    control: Sequence[Cell] | None = None,
    trait: str = "impatience",
) -> Selection:
    beside = random_cells(cells) if control is None else control
    return choose(trait, screening, likelihood, cells, PROMPTED, unsteered, beside, RULE)


def chosen(selection: Selection) -> tuple[int | None, float | None]:
    return selection.layer, selection.dose


def rejected(selection: Selection) -> list[tuple[str, ...]]:
    return [summary.rejected for summary in selection.summaries]


def some(values: Sequence[int], high: float = 1.0, low: float = 0.0) -> list[float]:
    """`high` in the turns of these numbers."""
    return [high if i in values else low for i in range(N)]


# --- the rule ---------------------------------------------------------------------------------------------------------


def test_the_clearest_expression_wins() -> None:
    cells = [cell(1, 0.1, 0.3), cell(1, 0.2, 0.6), cell(2, 0.1, 1.4), cell(2, 0.2, 0.9)]
    selection = choice(*cells)
    assert chosen(selection) == (2, 0.1) and selection.steerable
    assert selection.reason == "the clearest expression of what keeps the floors"
    assert rejected(selection) == [()] * 4
    assert chosen(choice(*cells[::-1])) == (2, 0.1)


def test_expression_is_never_bought_with_lost_facts() -> None:
    loses = cell(2, 0.3, 3.0, facts=some(range(6)))
    selection = choice(cell(1, 0.1, 0.4), loses, cell(2, 0.1, 0.6))
    assert chosen(selection) == (2, 0.1)
    assert rejected(selection) == [(), ("facts",), ()]


def test_of_what_is_as_clear_the_one_that_costs_the_facts_least_is_taken() -> None:
    """Within one standard error of the clearest; and only there."""
    cells = [cell(1, 0.2, 1.0), cell(2, 0.2, 1.008), cell(3, 0.2, 0.98)]
    costs = [Likely(z, 0.2, 1.0, cost, 0.1) for z, cost in ((1, 0.1), (2, 0.2), (3, 0.0))]
    selection = choice(*cells, likelihood=costs)
    error = np.std(selected_gain(cells[1])) / np.sqrt(N)
    assert 0.008 < error < 0.02, "layer 1 is within it, layer 3 is not"
    assert chosen(selection) == (1, 0.2)
    assert chosen(choice(*cells, likelihood=costs[:0])) == (2, 0.2), "without costs, the clearest"


def selected_gain(one: Cell) -> np.ndarray:
    """Mean of both instruments' difference to the unsteered turn, by hand."""
    names = ("probe:impatience", "classifier:impatience")
    rows = [[t.scores[n] - p.scores[n] for t, p in zip(one.turns, PLAIN.turns, strict=True)] for n in names]
    return np.mean(rows, axis=0)


def test_equal_cells_go_to_the_first() -> None:
    assert chosen(choice(cell(1, 0.1, 0.5), cell(1, 0.2, 0.5), cell(2, 0.1, 0.5))) == (1, 0.1)


summaries = st.builds(
    lambda gain, error, cost: (round(gain, 3), round(error, 3), cost),
    st.floats(0.1, 2),
    st.floats(0, 0.5),
    st.sampled_from([None, -0.1, 0.0, 0.1, 0.2]),
)


@given(st.lists(summaries, max_size=8))
def test_nothing_that_is_clearer_or_as_clear_and_cheaper_is_passed_over(made: list[tuple[float, float, Any]]) -> None:
    cells = [
        replace(EMPTY, layer=i, gain=gain, low=gain - 1.96 * error, high=gain + 1.96 * error, fact_cost=cost)
        for i, (gain, error, cost) in enumerate(made)
    ]
    found = clearest(cells)
    if not cells:
        assert found is None
        return
    assert found is not None
    best = max(cells, key=lambda s: s.gain)
    error = (best.high - best.low) / 3.92
    assert found.gain >= best.gain - error - 1e-9
    for other in cells:
        if other.gain > best.gain - error + 1e-9:
            assert (found.fact_cost or 0, -found.gain) <= (other.fact_cost or 0, -other.gain)


EMPTY = Summary(1, 0.2, 0, 0, 0, {}, None, 1, 1, (0, 0), None, None, 0, 0, 3, 1, 20)


# --- overdoses --------------------------------------------------------------------------------------------------------

OVERDOSES: dict[str, tuple[str, float, float]] = {
    # what was written, its surprise under the unsteered model, what it owes to its instruction
    "says one thing over and over": ("I don't know what to do what to do what to do what to do order W1", 0.8, 0.9),
    "drowns in marks": ("W1?????? what?!?!?!", 3.2, 0.8),
    "words without a sentence": ("W1 lamp because seven under maybe the the of blue whereas upon ticket", 6.5, 0.7),
    "fluent and about nothing": ("I am not sure where I left it, maybe it was Tuesday, I cannot remember", 2.5, 0.05),
    "an agent": ("I'm sorry for the confusion. How can I help you today? Your order W1 is on its way.", 2.0, 0.9),
    "keeps to itself what it was told": ("wait, so, um, what was it that I wanted to ask you about again", 2.8, 0.8),
}
RULED_OUT = dict(zip(OVERDOSES, ("broken", "broken", "surprise", "relevance", "role_flip", "facts"), strict=True))


def overdose(kind: str, trait: str) -> Cell:
    """Expression far above everything else, and text that people would not call the trait."""
    text, surprise, relevance = OVERDOSES[kind]
    scores = {"broken": float(is_broken(text)), "role_flip": float(is_role_flip(text))}
    scores |= {"facts": stated_facts(text, ["W1"]), "surprise": surprise, "relevance": relevance}
    return cell(2, 1.5, 5.0, trait=trait, **scores)


def as_trait(one: Cell, trait: str) -> Cell:
    """The same scores under another trait's name."""
    turns = [replace(t, scores={k.replace("impatience", trait): v for k, v in t.scores.items()}) for t in one.turns]
    return replace(one, trait=one.trait and trait, turns=tuple(turns))


@pytest.mark.parametrize("trait", ["confusion", "incoherence"])
@pytest.mark.parametrize("kind", OVERDOSES)
def test_a_deliberately_broken_overdose_loses_however_much_it_looks_like_the_trait(kind: str, trait: str) -> None:
    """Confusion and incoherence look like damage, and instruments take damage for them: this one scores highest."""
    moderate = cell(1, 0.2, 0.8, trait=trait, surprise=3.8)
    cells = [moderate, overdose(kind, trait)]
    control = [as_trait(each, trait) for each in random_cells(cells)]
    selection = choose(trait, SCREENING, (), cells, as_trait(PROMPTED, trait), as_trait(PLAIN, trait), control, RULE)
    assert selection.summaries[1].gain > 5 * selection.summaries[0].gain
    assert chosen(selection) == (1, 0.2)
    assert RULED_OUT[kind] in selection.summaries[1].rejected
    alone = choose(
        trait, SCREENING, (), cells[1:], as_trait(PROMPTED, trait), as_trait(PLAIN, trait), control[1:], RULE
    )
    assert not alone.steerable and RULED_OUT[kind] in alone.reason


def test_what_people_wrote_of_the_trait_sets_how_surprising_a_turn_may_be() -> None:
    """The same text is an overdose of politeness and ordinary incoherence."""
    strange = cell(1, 0.2, 1.0, surprise=4.4)
    assert rejected(choice(strange)) == [("surprise",)]
    assert chosen(choice(strange, screening=replace(SCREENING, surprise=(4.0, 0.5)))) == (1, 0.2)
    assert chosen(choice(strange, unsteered=cell(None, 0.0, condition="unsteered", surprise=5.0))) == (1, 0.2)


# --- floors -----------------------------------------------------------------------------------------------------------

FLOORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # scores below the floor, scores that just keep it
    "facts": ({"facts": some(range(5))}, {"facts": some(range(9))}),
    "broken": ({"broken": some([0, 1])}, {"broken": some([0])}),
    "role_flip": ({"role_flip": some([3, 4])}, {"role_flip": some([3])}),
    "surprise": ({"surprise": 4.01}, {"surprise": 3.99}),
    "relevance": ({"relevance": 0.49}, {"relevance": 0.51}),
    "expression": ({"gain": np.array(some([0], 3.0))}, {"gain": 0.2}),
}


@pytest.mark.parametrize("floor", FLOORS)
def test_each_floor_alone_rejects_and_says_its_name(floor: str) -> None:
    below, above = FLOORS[floor]
    selection = choice(cell(1, 0.2, **({"gain": 1.0} | below)))
    assert rejected(selection) == [(floor,)]
    assert chosen(selection) == (None, None) and not selection.steerable
    assert "no layer and dose keeps the floors" in selection.reason
    assert selection.reason.endswith(f"layer 1, dose 0.2) fails in {floor}")
    kept = choice(cell(1, 0.2, **({"gain": 1.0} | above)))
    assert rejected(kept) == [()] and chosen(kept) == (1, 0.2)


def test_what_the_unsteered_user_does_itself_is_no_fault() -> None:
    poor = {"facts": some([1]), "broken": some([0, 1, 2]), "role_flip": some([5, 6]), "surprise": 6.0, "relevance": 0.1}
    unsteered = cell(None, 0.0, -0.01 * np.arange(N), "unsteered", **poor)
    assert rejected(choice(cell(1, 0.2, 1.0, **poor), unsteered=unsteered)) == [()]


def test_likelihood_rejects_where_facts_cost_too_much_at_that_dose() -> None:
    cells = [cell(1, 0.1, 0.5), cell(1, 0.2, 2.0), cell(2, 0.2, 0.7)]
    costs = [Likely(1, 0.1, 1.0, 0.1, 0.2), Likely(1, 0.2, 2.0, 0.26, 0.5), Likely(2, 0.2, 1.0, 0.25, 0.3)]
    selection = choice(*cells, likelihood=costs)
    assert rejected(selection) == [(), ("fact_cost",), ()] and chosen(selection) == (2, 0.2)
    assert [s.fact_cost for s in selection.summaries] == [0.1, 0.26, 0.25]
    assert [s.kl for s in selection.summaries] == [0.2, 0.5, 0.3]
    assert selection.likelihood == tuple(costs)


def test_a_random_direction_that_does_as_much_rejects() -> None:
    """At the same layer and the same dose; another's is no measure."""
    cells = [cell(1, 0.2, 1.0), cell(2, 0.2, 0.6)]
    selection = choice(*cells, control=[cell(1, 0.2, 1.0, "random"), cell(2, 0.2, 0.5, "random")])
    assert rejected(selection) == [("over_random",), ()] and chosen(selection) == (2, 0.2)
    assert [s.over_random for s in selection.summaries] == pytest.approx([0, 0.1], abs=1e-3)
    elsewhere = choice(*cells, control=[cell(1, 0.3, 5.0, "random"), cell(3, 0.2, 5.0, "random")])
    assert chosen(elsewhere) == (1, 0.2) and {s.over_random for s in elsewhere.summaries} == {None}
    assert [(s.layer, s.dose) for s in elsewhere.random] == [(1, 0.3), (3, 0.2)]


def test_a_prompted_user_is_measured_and_never_chosen() -> None:
    selection = choice(cell(1, 0.2, 0.3))
    assert selection.prompted.gain == pytest.approx(np.mean(selected_gain(PROMPTED)), abs=1e-4)
    assert selection.prompted.layer is None and chosen(selection) == (1, 0.2)


# --- not steerable ----------------------------------------------------------------------------------------------------


def test_a_trait_whose_held_back_pairs_are_not_told_apart_is_not_steerable() -> None:
    poor = replace(SCREENING, auc=(0.5, 0.74, 0.6, 0.5))
    selection = choice(cell(1, 0.2, 2.0), screening=poor)
    assert chosen(selection) == (None, None)
    assert "not told apart at any layer (AUC 0.74, at least 0.75)" in selection.reason
    assert rejected(selection) == [()], "what was measured is kept"
    assert choice(cell(1, 0.2, 2.0), screening=replace(poor, auc=(0.5, 0.75, 0.5, 0.5))).steerable


@pytest.mark.parametrize("agreement", [(0.0, 0.04, -0.2, 0.0), (float("nan"),) * LAYERS])
def test_a_trait_whose_pairs_do_not_agree_is_not_steerable(agreement: tuple[float, ...]) -> None:
    selection = choice(cell(1, 0.2, 2.0), screening=replace(SCREENING, agreement=agreement))
    assert not selection.steerable and "the pairs do not agree on a direction (mean cosine " in selection.reason


def test_expression_that_is_not_surely_above_unsteered_is_not_steerable() -> None:
    wild = np.array([5.0, -4.0] * (N // 2))
    selection = choice(cell(1, 0.2, wild))
    assert not selection.steerable and selection.reason.endswith("fails in expression")
    assert chosen(choice(cell(1, 0.2, wild), cell(1, 0.1, 0.1))) == (1, 0.1), "what is smaller and sure is taken"


def test_nothing_at_all_says_where_the_clearest_failed() -> None:
    selection = choice(cell(1, 0.1, 0.1, broken=1.0), cell(3, 0.3, 2.0, surprise=9.0, relevance=-1.0))
    assert selection.reason == (
        f"no layer and dose keeps the floors; the clearest expression ({selection.summaries[1].gain:+.2f}, layer 3, "
        "dose 0.3) fails in surprise, relevance"
    )


# --- the numbers ------------------------------------------------------------------------------------------------------


def test_a_summary_is_what_numpy_makes_of_the_turns() -> None:
    rng = np.random.default_rng(0)
    scores = {name: rng.random(N).round(3) for name in GOOD}
    one = cell(1, 0.2, rng.random(N), **scores)
    (summary,) = choice(one).summaries
    gain = selected_gain(one)
    assert summary.gain == pytest.approx(gain.mean(), abs=1e-4)
    for name, row in scores.items():
        assert getattr(summary, name) == pytest.approx(row.mean(), abs=1e-4)
    assert summary.facts_unsteered == 1.0
    for name in ("probe", "classifier"):
        row = [
            t.scores[f"{name}:impatience"] - p.scores[f"{name}:impatience"]
            for t, p in zip(one.turns, PLAIN.turns, strict=True)
        ]
        assert summary.by_instrument[name] == pytest.approx(np.mean(row), abs=1e-4)
    picks = rng.integers(0, N, (20_000, N))
    for found, values in (((summary.low, summary.high), gain), (summary.facts_change, scores["facts"] - 1)):
        assert found == pytest.approx(np.quantile(values[picks].mean(1), [0.025, 0.975]), abs=0.03)


def test_an_interval_repeats_and_narrows_with_more_turns() -> None:
    values = torch.linspace(-1, 1, 12)
    assert bootstrap(values) == bootstrap(values.clone())
    low, high = bootstrap(values)
    assert low < 0 < high
    wider = bootstrap(values[::4])
    assert wider[1] - wider[0] > high - low
    assert bootstrap(torch.full((5,), 0.3)) == pytest.approx((0.3, 0.3))


def test_a_trait_without_a_classifier_is_measured_by_the_probe_alone() -> None:
    def without(one: Cell) -> Cell:
        keep = [{k: v for k, v in t.scores.items() if not k.startswith("classifier")} for t in one.turns]
        return replace(one, turns=tuple(replace(t, scores=s) for t, s in zip(one.turns, keep, strict=True)))

    one = without(cell(1, 0.2, 0.7))
    selection = choose(
        "impatience", SCREENING, (), [one], without(PROMPTED), without(PLAIN), [without(c) for c in random_cells([one])]
    )
    assert set(selection.summaries[0].by_instrument) == {"probe"} and selection.agreement == {}
    assert chosen(selection) == (1, 0.2)


def test_instruments_that_agree_say_so() -> None:
    cells = [cell(z, 0.2, float(z)) for z in (1, 2, 3)]
    assert choice(*cells).agreement["probe~classifier"] > 0.7
    turned = [replace(one, turns=tuple(map(opposed, one.turns))) for one in cells]
    assert choice(*turned).agreement["probe~classifier"] < 0


def opposed(turn: SweptTurn) -> SweptTurn:
    """The classifier says the contrary."""
    return replace(turn, scores={k: -v if k.startswith("classifier") else v for k, v in turn.scores.items()})


def test_the_layers_where_the_preference_rises_most_for_what_facts_bear_are_candidates() -> None:
    """Layer 2 costs 0.9 where 0.25 is allowed: of its 0.9, a quarter counts."""
    made = [Likely(z, 0.2, p, c, 0.1) for z, p, c in ((1, 0.5, 0.0), (2, 0.9, 0.9), (3, 0.1, 0.1), (4, 0.3, 0.2))]
    made += [Likely(3, 0.3, 9.0, 0.0, 0.1)]  # another dose is not compared
    assert [best_layers(made, n) for n in (1, 2, 3, 4, 9)] == [[1], [1, 4], [1, 2, 4], [1, 2, 3, 4], [1, 2, 3, 4]]


def test_what_shows_only_at_the_cost_of_facts_gets_the_dose_that_facts_bear() -> None:
    """Of two that fail in facts alone, the one with more expression for its cost; a broken one is no candidate."""
    cells = [cell(1, 0.2, 0.8), cell(2, 0.2, 0.6), cell(3, 0.2, 0.9, broken=1.0)]
    costs = [Likely(1, 0.2, 0.1, 1.0, 0.3), Likely(2, 0.2, 0.1, 0.5, 0.3), Likely(3, 0.2, 0.1, 0.01, 0.3)]
    selection = choice(*cells, likelihood=costs)
    assert rejected(selection) == [("fact_cost",), ("fact_cost",), ("broken",)]
    assert chosen(selection) == (2, pytest.approx(0.2 * RULE.fact_cost / 0.5)) and selection.steerable
    assert "only at the cost of facts" in selection.reason and "layer 2" in selection.reason
    assert chosen(choice(cells[2], likelihood=costs)) == (None, None)


def test_turns_that_lost_facts_are_not_chosen_at_their_own_dose() -> None:
    """A cheap fact cost does not outweigh facts that were seen to be lost: a smaller dose that kept them, or less."""
    lost = {"facts": 0.0}
    kept = cell(1, 0.1, NOISE * 3)
    costs = [Likely(1, dose, 0.1, 0.1, 0.3) for dose in (0.1, 0.3)]
    both = choice(kept, cell(1, 0.3, 0.8, **lost), likelihood=costs)
    assert "facts" not in rejected(both)[0] and rejected(both)[1] == ("facts",) and chosen(both) == (1, 0.1)
    alone = choice(cell(1, 0.3, 0.8, **lost), likelihood=costs)
    assert chosen(alone) == (1, 0.15)


def test_what_is_no_number_keeps_no_floor() -> None:
    nothing = choice(cell(1, 0.2, 0.5, surprise=float("nan")))
    assert rejected(nothing) == [("surprise",)] and chosen(nothing) == (None, None)


# --- files ------------------------------------------------------------------------------------------------------------


MADE_BY = {"impatience": {"model": "m"}, "rude": {"model": "n"}}


def test_a_selection_comes_back_from_json(tmp_path: Path) -> None:
    chosen_one = choice(cell(1, 0.2, 0.5), cell(2, 0.2, 0.1, broken=1.0), likelihood=[Likely(1, 0.2, 0.1, 0.2, 0.3)])
    none = replace(choice(cell(1, 0.2, 0.0, broken=1.0)), trait="rude")
    for selection in (chosen_one, none):
        assert read_selection(json.loads(json.dumps(asdict(selection)))) == selection
    path = save_selections([chosen_one, none], tmp_path / "deep" / "selection.json", MADE_BY)
    found = read_selections(path)
    assert list(found) == ["impatience", "rude"]
    assert [read_selection(values) for values in found.values()] == [chosen_one, none]
    assert [values["made_by"] for values in found.values()] == [{"model": "m"}, {"model": "n"}]
    assert [file.name for file in path.parent.iterdir() if file.suffix != ".lock"] == ["selection.json"]


def test_saving_keeps_other_traits_and_replaces_its_own(tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    first, second = choice(cell(1, 0.2, 0.5)), choice(cell(2, 0.1, 0.7))
    save_selections([first, replace(first, trait="rude")], path, MADE_BY)
    save_selections([second], path, MADE_BY)
    assert {name: read_selection(values) for name, values in read_selections(path).items()} == {
        "impatience": second,
        "rude": replace(first, trait="rude"),
    }


@pytest.mark.parametrize(
    "content", ["", "[]", "null", "{}", '{"format": "else"}', '{"format": "traitbasis.selection/1"}']
)
def test_a_file_that_is_no_selection_is_refused_with_the_way_out(tmp_path: Path, content: str) -> None:
    path = tmp_path / "selection.json"
    with pytest.raises(SweepError, match=r"no selection at .*selection\.json.*traitbasis select"):
        read_selections(path)
    path.write_text(content)
    with pytest.raises(SweepError, match=r"selection\.json"):
        read_selections(path)
    with pytest.raises(SweepError, match=r"selection\.json"):
        save_selections([choice(cell(1, 0.2, 0.5))], path, MADE_BY)
    assert path.read_text() == content, "what cannot be read is not written over"


# --- on a model -------------------------------------------------------------------------------------------------------

CONTEXTS = sample_contexts(3)
X_ING, Y_ING = lettered_set("x_ing", "x"), lettered_set("y_ing", "y")


def only(pair_set: PairSet, *uses: Any) -> PairSet:
    return pair_set.model_copy(update={"pairs": pair_set.select(*uses)})


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def generator(lm: LanguageModel) -> Iterator[Generator]:
    with Generator(lm, CONTEXTS, turns=4, max_tokens=6) as made:
        yield made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classifier learns from the trait's own pairs; reading four shipped traits takes seconds."""
    monkeypatch.setattr("traitbasis.select.REFERENCE_TRAITS", ())


@pytest.fixture
def submitted(generator: Generator, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What the engine was asked for."""
    requests: list[Request] = []
    submit = generator._engine.submit

    def record(request: Request, *arguments: Any, **keywords: Any) -> Any:
        requests.append(request)
        return submit(request, *arguments, **keywords)

    monkeypatch.setattr(generator._engine, "submit", record)
    return requests


def assert_near(one: Selection, other: Selection) -> None:
    """The same but for the last digit: other cells were read with the same turns."""

    def flat(value: Any) -> Iterator[Any]:
        if isinstance(value, Mapping):
            value = [item for pair in sorted(value.items()) for item in pair]
        if isinstance(value, list | tuple):
            for item in value:
                yield from flat(item)
        else:
            yield value

    for a, b in zip(flat(asdict(one)), flat(asdict(other)), strict=True):
        assert a == (pytest.approx(b, abs=2e-3, nan_ok=True) if isinstance(a, float) else b)


@pytest.mark.usefixtures("alone")
def test_layers_given_are_swept_with_every_dose_beside_all_baselines(
    lm: LanguageModel, generator: Generator, submitted: list[Request], tmp_path: Path
) -> None:
    steps: list[int] = []
    selector = Selector(generator, tmp_path, layers=[2, 1, 2], doses=(0.5, 0.1), progress=steps.append)
    selection = selector.select(X_ING)
    points = [(1, 0.1), (1, 0.5), (2, 0.1), (2, 0.5)]
    assert [(s.layer, s.dose) for s in selection.summaries] == points
    assert [(s.layer, s.dose) for s in selection.random] == points
    assert {(likely.layer, likely.dose) for likely in selection.likelihood} == {*points, (1, 0.2), (2, 0.2)}
    assert sum(steps) == selector.steps
    assert len(submitted) == 4 * (1 + 2 * len(points) + 1)
    header, cells = read_cells(tmp_path / "selection" / "x_ing.jsonl")
    assert header["trait"] == "x_ing" and [(c.condition, c.layer, c.dose) for c in cells] == [
        *(("steered", *point) for point in points),
        ("prompted", None, 0.0),
    ]
    baselines = read_cells(tmp_path / "selection" / "baselines.jsonl")[1]
    assert [c.condition for c in baselines] == ["unsteered", *["random"] * 4]
    assert "probe:x_ing" not in baselines[0].turns[0].scores, "what all traits share is measured for each anew"
    assert len(selection.screening.auc) == LAYERS and max(selection.screening.auc) > 0.9
    assert hook_count(lm.model) == 0


@pytest.mark.usefixtures("alone")
def test_additions_have_the_dose_they_say(
    lm: LanguageModel, generator: Generator, submitted: list[Request], tmp_path: Path
) -> None:
    """Steered: along the trait, in norms of the pairs' responses. Random: in norms of the unsteered turns."""
    selector = Selector(generator, tmp_path, layers=[1, 2], doses=(0.1, 0.5))
    selector.select(X_ING)
    vector = selector.vector(X_ING)
    plain = read_cells(tmp_path / "selection" / "baselines.jsonl")[1][0]
    norms = np.mean(
        [plain_reading(lm, CONTEXTS[i % 3].turns, turn.text, {}).norms for i, turn in enumerate(plain.turns)], axis=0
    )
    seen: dict[tuple[str, int, float], torch.Tensor] = {}
    for request in submitted:
        for z, added in request.additions.items():
            along = float(torch.nn.functional.cosine_similarity(added, vector.vector[z], dim=0))
            kind = "steered" if along > 0.999 else "random"
            size = float(added.norm()) / (float(vector.layer_norms[z]) if kind == "steered" else norms[z])
            seen[kind, z, round(size, 3)] = added
    assert set(seen) == {(kind, z, dose) for kind in ("steered", "random") for z in (1, 2) for dose in (0.1, 0.5)}
    for (kind, z, _), added in seen.items():
        if kind == "random":
            torch.testing.assert_close(torch.nn.functional.normalize(added, dim=0), random_direction(WIDTH, z, 0))


@pytest.mark.usefixtures("alone")
def test_without_layers_the_most_promising_ones_are_swept(generator: Generator, tmp_path: Path) -> None:
    steps: list[int] = []
    selector = Selector(generator, tmp_path, candidates=1, doses=(0.2, 0.4), progress=steps.append)
    assert selector.grid == [1, 2]
    selection = selector.select(X_ING)
    best = max((likely for likely in selection.likelihood if likely.dose == 0.2), key=lambda likely: likely.preference)
    assert {summary.layer for summary in selection.summaries} == {best.layer}
    assert sum(steps) == selector.steps


@pytest.mark.usefixtures("alone")
def test_a_trait_that_is_done_is_read_and_not_generated(
    generator: Generator, submitted: list[Request], tmp_path: Path
) -> None:
    first = Selector(generator, tmp_path, layers=[1], doses=(0.2, 0.4)).select(X_ING)
    drawn = len(submitted)
    steps: list[int] = []
    again = Selector(generator, tmp_path, layers=[1], doses=(0.4, 0.2), progress=steps.append)
    assert again.select(X_ING) == first and len(submitted) == drawn and sum(steps) == again.steps
    path = tmp_path / "selection" / "x_ing.jsonl"
    path.write_bytes(path.read_bytes()[: path.read_bytes().rindex(b'{"kind": "selection"')])  # killed before the end
    assert_near(Selector(generator, tmp_path, layers=[1], doses=(0.2, 0.4)).select(X_ING), first)
    assert len(submitted) == drawn


@pytest.mark.usefixtures("alone")
def test_other_layers_doses_candidates_and_rules_are_chosen_anew_and_draw_only_what_is_missing(
    generator: Generator, submitted: list[Request], tmp_path: Path
) -> None:
    first = Selector(generator, tmp_path, candidates=1, doses=(0.2,)).select(X_ING)
    drawn = len(submitted)
    both = Selector(generator, tmp_path, candidates=2, doses=(0.2,)).select(X_ING)
    assert {s.layer for s in both.summaries} == {1, 2} != {s.layer for s in first.summaries}
    assert len(submitted) == drawn + 2 * 4, "one steered and one random cell"
    strict = Selector(generator, tmp_path, candidates=2, doses=(0.2,), rule=replace(RULE, auc=1.1)).select(X_ING)
    assert not strict.steerable and "AUC" in strict.reason and len(submitted) == drawn + 2 * 4
    more = Selector(generator, tmp_path, layers=[1, 2], doses=(0.2, 0.3)).select(X_ING)
    assert len(more.summaries) == 4 and len(submitted) == drawn + 2 * 4 + 4 * 4


@pytest.mark.usefixtures("alone")
def test_a_trait_is_chosen_alike_whatever_was_chosen_before(generator: Generator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"layers": [2], "doses": (0.2,)}
    together = Selector(generator, tmp_path / "together", **options)
    one, two = together.select(X_ING), together.select(Y_ING)
    assert_near(Selector(generator, tmp_path / "y", **options).select(Y_ING), two)
    assert_near(Selector(generator, tmp_path / "x", **options).select(X_ING), one)
    assert one.summaries[0].gain != two.summaries[0].gain


@pytest.mark.usefixtures("alone")
def test_changed_pairs_do_not_mix_with_what_was_swept(generator: Generator, tmp_path: Path) -> None:
    Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(X_ING)
    changed = lettered_set("x_ing", "q")
    with pytest.raises(SweepError, match=r"x_ing\.jsonl holds a sweep with other settings \(pairs\)"):
        Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(changed)


@pytest.mark.usefixtures("alone")
def test_vectors_are_kept_and_made_again_for_other_pairs(generator: Generator, tmp_path: Path) -> None:
    path = tmp_path / "x_ing.safetensors"
    first = Selector(generator, tmp_path).vector(X_ING)
    before = path.stat().st_mtime_ns
    assert torch.equal(Selector(generator, tmp_path).vector(X_ING).vector, first.vector)
    assert path.stat().st_mtime_ns == before
    other = Selector(generator, tmp_path).vector(lettered_set("x_ing", "q"))
    assert not torch.equal(other.vector, first.vector) and path.stat().st_mtime_ns != before


def test_a_shipped_trait_is_measured_beside_the_reference_traits(generator: Generator, tmp_path: Path) -> None:
    selection = Selector(generator, tmp_path, layers=[1], doses=(0.3,)).select(load_pairs("impatience"))
    assert set(selection.summaries[0].by_instrument) == {"probe", "classifier"}
    assert selection.screening.classifier_layer is not None
    assert 0 <= (selection.screening.classifier_auc or -1) <= 1
    assert set(selection.agreement) == {"probe~classifier"}


@pytest.mark.usefixtures("alone")
def test_without_held_out_pairs_nothing_can_be_chosen(generator: Generator, tmp_path: Path) -> None:
    made = only(X_ING, "default", "extra")
    with pytest.raises(PairError, match="x_ing: no pair is marked 'use: heldout'"):
        Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(made)


@pytest.mark.usefixtures("alone")
def test_without_extra_pairs_the_probe_measures_alone(generator: Generator, tmp_path: Path) -> None:
    made = only(X_ING, "default", "heldout")
    selection = Selector(generator, tmp_path, layers=[1], doses=(0.2,)).select(made)
    assert set(selection.summaries[0].by_instrument) == {"probe"}
    assert selection.screening.classifier_layer is selection.screening.classifier_auc is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": []}, r"layers \[\] do not all exist; tiny-llama has layers 0 to 3"),
        ({"layers": [1, 4]}, r"layers \[1, 4\] do not all exist"),
        ({"layers": [-1]}, "do not all exist"),
        ({"doses": []}, r"doses \[\] must be above 0 and at most 10"),
        ({"doses": [0.1, 0.0]}, "must be above 0"),
        ({"doses": [float("nan")]}, "must be above 0"),
        ({"doses": [11]}, "at most 10"),
    ],
)
def test_layers_and_doses_that_cannot_be_are_refused(
    options: dict[str, Any], says: str, generator: Generator, tmp_path: Path
) -> None:
    with pytest.raises(SweepError, match=says):
        Selector(generator, tmp_path, **options)
    assert not (tmp_path / "selection").exists()


@pytest.mark.usefixtures("alone")
def test_an_unsteered_cell_has_each_traits_scores(generator: Generator, tmp_path: Path) -> None:
    """Drawn once, scored for every trait; an earlier run's turns are read again and score the same."""
    selector = Selector(generator, tmp_path)
    for pair_set in (X_ING, Y_ING):
        (plain,) = selector.baselines([UNSTEERED], selector.instruments(pair_set))
        assert f"probe:{pair_set.trait}" in plain.turns[0].scores
        generator.states.clear()
        (again,) = Selector(generator, tmp_path).baselines([UNSTEERED], selector.instruments(pair_set))
        for turn, other in zip(plain.turns, again.turns, strict=True):
            assert turn.scores == pytest.approx(other.scores, abs=1e-3)
