"""experiments/saturation.py, selection.py and ratings.py: from end to end on a tiny model, and their rules on figures
made by hand."""

from __future__ import annotations

import csv
import json
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "experiments"))

import common  # noqa: E402
import ratings  # noqa: E402
import saturation  # noqa: E402
import selection  # noqa: E402
from common import Interval  # noqa: E402
from samples import random_basis, sample_document, sample_pair  # noqa: E402
from tiny import LAYERS, tiny_model  # noqa: E402

from traitbasis import select  # noqa: E402
from traitbasis.errors import AnnotationError, PairError, SweepError  # noqa: E402
from traitbasis.extract import extract  # noqa: E402
from traitbasis.metrics.fidelity import auc, preference  # noqa: E402
from traitbasis.pairs import PairSet  # noqa: E402
from traitbasis.reading import Reader  # noqa: E402
from traitbasis.sweep import UNSTEERED, Cell, Generator, Spec, Store, SweptTurn  # noqa: E402

PLOT = saturation.plot
WORDS = ["now", "soon", "today", "at", "once", "please", "finally", "again", "still", "maybe"]


def short_pairs(trait: str) -> PairSet:
    """As many pairs as the paper's traits have, but short: a byte is a token to the tiny model."""
    made = []
    for i in range(24):
        use = "heldout" if i % 3 == 2 else "default" if i < 6 else "extra"
        positive = f"Order W{i} {trait[:4]} {WORDS[i % 9]}!"
        made.append(sample_pair(i, use=use, positive=positive, negative=f"So {WORDS[i % 7]} order W{i}, thanks."))
    return PairSet.model_validate(sample_document(*made, trait=trait, aliases=[]))


IMPATIENCE = short_pairs("impatience")


@pytest.fixture(scope="module")
def lm():
    return tiny_model()


@pytest.fixture(scope="module", autouse=True)
def small(lm):
    """Both scripts load the tiny model and short pairs, whatever they ask for; a classifier knows two traits."""
    with pytest.MonkeyPatch.context() as patch:
        for script in (saturation, selection):
            patch.setattr(script, "load_model", lambda name, dtype: lm)
        for module in (saturation, selection, ratings, select):
            patch.setattr(module, "load_pairs", short_pairs)
        patch.setattr(saturation, "plot", lambda found, path: False)  # it takes a second
        patch.setattr(select, "REFERENCE_TRAITS", ("confusion", "impatience"))
        yield


@pytest.fixture
def kill(monkeypatch) -> Callable[[int], None]:
    """Ends a run, as Ctrl-C would, in the place of its n-th line on disk; 0: never."""
    real = Store.append

    def after(lines: int) -> None:
        left = [lines]

        def append(self: Store, line: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            real(self, line)

        monkeypatch.setattr(Store, "append", append)

    return after


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    """The first two of the scenarios."""
    scenarios = yaml.safe_load((ROOT / "experiments" / "scenarios.yaml").read_text(encoding="utf-8"))["scenarios"]
    path = tmp_path_factory.mktemp("tasks") / "tasks.yaml"
    path.write_text(yaml.safe_dump({"scenarios": scenarios[:2]}, allow_unicode=True), encoding="utf-8")
    return path


# ---- Saturation


@pytest.fixture(scope="module")
def saturate(tasks, tmp_path_factory) -> Callable[..., dict[str, Any]]:
    """Runs the script, and gives what it wrote."""
    folder = tmp_path_factory.mktemp("saturation")
    sizes = ["--subsets", "2", "--written", "1", "--turns", "2", "--max-tokens", "4"]

    def run(name: str, *more: str) -> dict[str, Any]:
        out = folder / f"{name}.json"
        given = ["--traits", "impatience", "--contexts", str(tasks), *sizes, "--out", str(out), *more]
        saturation.main(given)
        return json.loads(out.read_text())

    run.folder = folder
    return run


@pytest.fixture(scope="module")
def saturated(saturate) -> dict[str, Any]:
    return saturate("whole")


@pytest.fixture(scope="module")
def pairs(lm):
    return saturation.Pairs(Reader(lm), IMPATIENCE, 2)


def test_saturation_measures_every_subset_and_says_where_it_saturates(saturated, saturate, capsys):
    found = saturate("whole")  # reads what was measured
    assert found == saturated
    of = found["traits"]["impatience"]
    assert [vector["n"] for vector in of["vectors"]] == [1, 1, 2, 2, 4, 4, 8, 8, 16]
    assert all(len(vector["pairs"]) == vector["n"] for vector in of["vectors"])
    assert all(len(vector[name]) == 8 for vector in of["vectors"] for name in ("preference", "fact_cost", "auc"))
    assert ["agreement" in vector for vector in of["vectors"]] == [False, False, *[True] * 7]
    assert [len(vector.get("expression", ())) for vector in of["vectors"]] == [2, 0, 2, 0, 2, 0, 2, 0, 2]
    assert [(row["n"], len(row["turns"])) for row in of["turns"]] == [(n, 2) for n in (0, *saturation.SIZES)]
    assert of["vectors"][-1]["cosine_all"] == [1.0]
    assert of["curves"]["preference"][-1]["difference"] is None
    assert set(of["saturation"]) == set(saturation.RULED)
    assert found["made_by"]["model"] == "tiny-llama" and of["layer"] == LAYERS // 2  # no basis: the middle
    told = capsys.readouterr().out
    assert "| impatience | 16 | 1 |" in told and "n = 4 is within the band of n = 16 for" in told
    assert "no plot: that needs" in told


@pytest.mark.parametrize("lines", [3, 10])  # among the vectors, and in the place of the turns
def test_a_killed_saturation_run_goes_on_where_it_was(saturated, saturate, monkeypatch, kill, lines):
    kill(lines)
    with pytest.raises(KeyboardInterrupt):
        saturate(f"killed{lines}")
    assert not (saturate.folder / f"killed{lines}.json").exists()
    kill(0)
    measured = []
    real = saturation.PairLikelihood.measure
    monkeypatch.setattr(
        saturation.PairLikelihood, "measure", lambda self, added: measured.append(added) or real(self, added)
    )
    assert saturate(f"killed{lines}") == saturated
    assert len(measured) == 9 - (lines - 1)


def test_more_subsets_keep_those_that_are_measured(saturated, saturate):
    shutil.copytree(saturate.folder / "whole", saturate.folder / "more")
    before, after = (
        found["traits"]["impatience"]["vectors"] for found in (saturated, saturate("more", "--subsets", "3"))
    )
    assert len(after) == len(before) + 4 and all(vector in after for vector in before)


def test_the_vector_of_all_pairs_is_the_extracted_one(lm, pairs):
    vector = extract(lm, IMPATIENCE, pairs=pairs.pairs)
    torch.testing.assert_close(pairs.addition(range(16), 0.3)[2], vector.at_dose(2, 0.3), rtol=1e-4, atol=1e-5)
    agreement = pairs.compare(range(16))["agreement"][0]
    assert agreement == pytest.approx(float(vector.agreement[2]), abs=1e-4)


def test_a_subset_is_measured_on_held_out_pairs(lm, pairs):
    subset = (3, 7, 11)
    chosen = [pairs.pairs[i] for i in subset]
    vector = extract(lm, IMPATIENCE, pairs=chosen).vector[2]
    held = [extract(lm, IMPATIENCE, pairs=[pair]) for pair in IMPATIENCE.select("heldout")]
    direction = torch.stack([one.vector[2] for one in held]).mean(0)
    found = pairs.compare(subset)
    assert found["cosine_heldout"][0] == pytest.approx(float(torch.cosine_similarity(vector, direction, 0)), abs=1e-3)
    rank = auc(pairs.held_positive @ vector, pairs.held_negative @ vector)
    assert np.mean(found["auc"]) == pytest.approx(rank, abs=1e-3)
    assert pairs.compare((3,)).get("agreement") is None


def test_the_preference_is_that_of_the_other_implementation(lm, saturated):
    found = saturated["traits"]["impatience"]
    measured = next(vector for vector in found["vectors"] if vector["n"] == 4)
    by_id = {pair.id: pair for pair in IMPATIENCE.pairs}
    vector = extract(lm, IMPATIENCE, pairs=[by_id[name] for name in measured["pairs"]])
    added = {2: vector.vector[2] / vector.vector[2].norm() * 0.2 * found["layer_norm"]}
    heldout = IMPATIENCE.select("heldout")
    expected = preference(lm, heldout, added, "user") - preference(lm, heldout, {}, "user")
    torch.testing.assert_close(torch.tensor(measured["preference"]), expected, rtol=0, atol=5e-4)


def test_too_few_pairs_are_refused(lm):
    few = IMPATIENCE.model_copy(update={"pairs": IMPATIENCE.pairs[:4]})
    with pytest.raises(PairError, match="takes 16 pairs"):
        saturation.Pairs(Reader(lm), few, 2)


def test_a_layer_that_does_not_exist_is_refused(saturate):
    with pytest.raises(SweepError, match="layer 9 does not exist; tiny-llama has layers 0 to 3"):
        saturate("layer", "--layer", "9")


def test_subsets_are_different_seeded_and_begin_alike():
    for n in (1, 2, 4, 8):
        drawn = saturation.draw_subsets("impatience", n, 8)
        assert len(set(drawn)) == 8 and all(len(set(subset)) == n for subset in drawn)
        assert saturation.draw_subsets("impatience", n, 3) == drawn[:3]
        assert saturation.draw_subsets("impatience", n, 8, seed=1) != drawn
    assert len(saturation.draw_subsets("impatience", 1, 40)) == 16  # there are no more
    assert saturation.draw_subsets("impatience", 16, 8) == [tuple(range(16))]


def test_a_band_is_that_of_the_mean():
    values = torch.randn(1, 400, generator=torch.Generator().manual_seed(1))
    found = saturation.band(values)
    expected = 1.96 * float(values.std()) / 20
    assert found.mean == pytest.approx(float(values.mean()), abs=1e-4)
    assert found.high - found.mean == pytest.approx(expected, rel=0.15)
    assert found.mean - found.low == pytest.approx(expected, rel=0.15)


def test_a_band_counts_what_subsets_differ_by():
    alike = saturation.band(torch.tensor([[1.0, 2.0], [1.0, 2.0]]))
    apart = saturation.band(torch.tensor([[1.0, 2.0], [5.0, 6.0]]))
    assert alike.high - alike.low == pytest.approx(1.0) and apart.high - apart.low == pytest.approx(5.0)


def vectors(by_size: dict[int, list[float]]) -> list[dict[str, Any]]:
    return [{"n": n, "preference": values} for n, values in by_size.items()]


def curve(by_size: dict[int, list[float]]) -> saturation.Saturation:
    return saturation.saturation(saturation.curve(vectors(by_size), "preference"))


def test_an_effect_that_saturates_at_four_is_said_to():
    wide = [0.8, 1.2, 0.9, 1.1]
    low = [value - 0.9 for value in wide]
    found = curve({1: low, 2: low, 4: [0.81, 1.19, 0.9, 1.1], 8: [0.8, 1.21, 0.9, 1.09], 16: wide})
    assert (found.within, found.no_different) == (4, 4)
    assert found.share == pytest.approx(1.0)


def test_an_effect_that_grows_is_not_said_to_saturate():
    wide = [0.8, 1.2, 0.9, 1.1]
    found = curve({n: [value * share for value in wide] for n, share in {2: 0.2, 4: 0.4, 8: 0.6, 16: 1.0}.items()})
    assert (found.within, found.no_different) == (None, None)
    assert found.share == pytest.approx(0.4)


def test_what_lies_in_a_wide_band_can_still_be_surely_less():
    wide = [0.1, 2.0, 0.5, 1.5]
    less = [value - 0.1 for value in wide]
    found = curve({4: less, 8: less, 16: wide})
    assert found.within == 4 and found.no_different is None


def test_without_an_effect_there_is_nothing_to_saturate():
    noise = [-0.5, 0.6, -0.4, 0.5]
    assert curve({4: noise, 8: noise, 16: noise}) == saturation.Saturation(False, None, None, None)
    points = saturation.curve(vectors({4: [0.4, 0.7], 16: [0.4, 0.7]}), "preference")
    assert not saturation.saturation(points, nothing=0.5).effect and saturation.saturation(points).effect


def test_a_lucky_small_n_does_not_count_where_a_larger_one_fails():
    wide = [0.8, 1.2, 0.9, 1.1]
    assert curve({4: wide, 8: [0.1, 0.1, 0.1, 0.1], 16: wide}).within is None


@pytest.mark.parametrize("agreement", [0.1, 0.5])
def test_the_expected_cosine_is_that_of_drawn_vectors(agreement):
    rng = np.random.default_rng(0)
    noise = math.sqrt(1 / agreement - 1)
    true = np.zeros(4000)
    true[0] = 1.0
    for n in (1, 4):
        drawn = true + (rng.standard_normal((60, n, 4000)) * noise / math.sqrt(4000))
        means = drawn.mean(1)
        cosine = float((means[:, 0] / np.linalg.norm(means, axis=1)).mean())
        assert saturation.expected_cosine(agreement, n) == pytest.approx(cosine, abs=0.02)
    assert saturation.expected_cosine(-0.1, 4) == 0.0


def test_without_matplotlib_there_is_no_plot_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert PLOT({}, tmp_path / "s.svg") is False and not list(tmp_path.iterdir())


def test_the_plot_is_the_same_for_the_same_figures(saturated, tmp_path):
    pytest.importorskip("matplotlib")
    drawn = []
    for name in ("one.svg", "two.svg"):
        assert PLOT(saturated["traits"], tmp_path / name)
        drawn.append((tmp_path / name).read_text(encoding="utf-8"))
    assert drawn[0] == drawn[1] and "<svg" in drawn[0]


# ---- Selection


@pytest.fixture(scope="module")
def measure(tmp_path_factory, tasks) -> Callable[..., dict[str, Any]]:
    """Runs the script on a made-up choice, and gives what it wrote."""
    folder = tmp_path_factory.mktemp("selection")
    choice = folder / "selection.json"
    traits = {
        "impatience": {"layer": 1, "dose": 0.3, "reason": "the clearest"},
        "confusion": {"layer": None, "dose": None, "reason": "nothing passed"},
    }
    choice.write_text(json.dumps({"format": "traitbasis.selection/1", "made_by": {}, "traits": traits}))

    def measure(name: str = "out", *more: str) -> dict[str, Any]:
        out = folder / f"{name}.json"
        given = ["--selection", str(choice), "--contexts", str(tasks), "--seeds", "2", "--max-tokens", "4"]
        selection.main([*given, "--traits", "impatience", "--out", str(out), *more])
        return json.loads(out.read_text(encoding="utf-8"))

    measure.folder = folder
    return measure


@pytest.fixture(scope="module")
def measured(measure) -> dict[str, Any]:
    return measure("whole")


def test_selection_measures_all_conditions_on_the_same_tasks_and_seeds(measured, measure, capsys):
    found = measure("whole")  # reads what was measured
    assert found == measured
    of = found["traits"]["impatience"]
    points = {name: (row["layer"], row["dose"]) for name, row in of["conditions"].items()}
    assert points == {
        "unsteered": (None, 0.0),
        "prompted": (None, 0.0),
        "middle": (2, 0.2),
        "chosen": (1, 0.3),
        "middle, same dose": (2, 0.3),
        "random": (1, 0.3),
    }
    cases: dict[str, list[Any]] = {}
    for turn in found["turns"]:
        cases.setdefault(turn["condition"], []).append((turn["context"], turn["seed"]))
        assert {"probe:impatience", "classifier:impatience", "facts"} <= turn["scores"].keys()
    assert all(case == cases["unsteered"] and len(case) == 4 for case in cases.values()) and len(cases) == 6
    assert of["conditions"]["unsteered"]["expression"] == {"mean": 0.0, "low": 0.0, "high": 0.0}
    assert list(of["agreement"]) == ["probe~classifier"]
    assert len(of["verdicts"]) == 7
    told = capsys.readouterr().out
    assert "## impatience" in told and told.count("- impatience: ") == 7
    assert "the basis is not calibrated" in told


def test_conditions_write_other_turns(measured):
    texts: dict[str, list[str]] = {}
    for turn in measured["turns"]:
        texts.setdefault(turn["condition"], []).append(turn["text"])
    assert len({tuple(text) for text in texts.values()}) == 6


@pytest.mark.parametrize("lines", [1, 2, 4])  # the unsteered cell, the random one, the second of the trait
def test_a_killed_selection_run_goes_on_where_it_was(measured, measure, monkeypatch, kill, lines):
    kill(lines)
    with pytest.raises(KeyboardInterrupt):
        measure(f"killed{lines}")
    kill(0)
    drawn = []
    real = Generator.draw
    monkeypatch.setattr(Generator, "draw", lambda self, a, p: drawn.append(len(a)) or real(self, a, p))
    assert measure(f"killed{lines}") == measured
    assert sum(drawn) == 6 - (lines - 1)


def test_a_trait_without_a_choice_says_so(measure, capsys):
    found = measure("none", "--traits", "confusion")["traits"]["confusion"]
    assert list(found["conditions"]) == ["unsteered", "prompted", "middle"] and found["verdicts"] == []
    assert "- confusion: no layer and dose was chosen: nothing passed" in capsys.readouterr().out


def test_what_was_not_selected_is_refused(measure):
    with pytest.raises(SweepError, match="has no choice for angry; make it with: traitbasis select --trait angry"):
        measure("angry", "--traits", "angry")
    with pytest.raises(SweepError, match="traitbasis select"):
        measure("missing", "--selection", "no-such-file.json")


def test_scripts_end_with_the_message_of_an_error():
    def main() -> None:
        raise SweepError("no such layer")

    with pytest.raises(SystemExit, match="error: no such layer"):
        common.run(main)


CHOICE = {"layer": 1, "dose": 0.3, "reason": ""}


def calibrated(lm, layer: int = 1, **changes: Any):
    basis = random_basis(lm, "impatience", dose=0.25)
    values = {"layer": layer, "limit": 0.6, "high": 1.6, **changes}
    return replace(basis, columns=(replace(basis.columns[0], **values),))


def test_the_chosen_dose_is_the_calibrated_medium(lm):
    specs, remark = selection.conditions("impatience", CHOICE, calibrated(lm), 4)
    assert specs["chosen"] == Spec("steered", "impatience", 1, 0.25) and specs["high"].dose == pytest.approx(0.4)
    assert specs["random"] == Spec("random", None, 1, 0.25) and specs["middle, same dose"].dose == 0.25
    assert remark is None


def test_what_must_be_forced_is_said_to(lm):
    assert selection.conditions("impatience", CHOICE, calibrated(lm, steerable=False), 4)[1] == (
        "served only when forced"
    )


@pytest.mark.parametrize("changes", [{"layer": 3}, {"limit": None}])
def test_a_basis_of_another_layer_or_without_levels_is_not_the_choice(lm, changes):
    specs, remark = selection.conditions("impatience", CHOICE, calibrated(lm, **changes), 4)
    assert specs["chosen"].dose == 0.3 and "high" not in specs and "not calibrated" in remark


def test_the_chosen_middle_layer_is_not_measured_twice(lm):
    specs, _ = selection.conditions("impatience", {**CHOICE, "layer": 2}, None, 4)
    assert "middle, same dose" not in specs and specs["chosen"].layer == specs["middle"].layer == 2


UP, DOWN, UNSURE = Interval(0.3, 0.1, 0.5), Interval(-0.3, -0.5, -0.1), Interval(0.1, -0.1, 0.3)
CLAIMS = {
    "chosen - unsteered": ("above unsteered", UP, DOWN),
    "chosen - prompted": ("above prompt-only", UP, UNSURE),
    "facts: chosen - prompted": ("facts not fewer than prompt-only's", UNSURE, DOWN),
    "random": ("random shows no trait", UNSURE, UP),
    "chosen - random": ("above random", UP, UNSURE),
    "chosen - middle": ("beats the middle-layer default", UP, UNSURE),
    "chosen - middle, same dose": ("beats the middle layer at the same dose", UP, DOWN),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_each_verdict_comes_out_yes_and_no(name):
    good = {key: yes for key, (_, yes, _) in CLAIMS.items()}
    claim, _, bad = CLAIMS[name]
    assert all(verdict.holds for verdict in selection.verdicts(good))
    found = {verdict.claim: verdict for verdict in selection.verdicts({**good, name: bad})}
    assert [c for c, verdict in found.items() if not verdict.holds] == [claim]
    assert str(found[claim]) == f"{claim}: no, {bad}"


def test_facts_that_are_as_many_are_not_fewer():
    good = {key: yes for key, (_, yes, _) in CLAIMS.items()}
    same = Interval(0.0, -0.1, 0.1)
    (facts,) = [v for v in selection.verdicts({**good, "facts: chosen - prompted": same}) if "facts" in v.claim]
    assert facts.holds


def test_nothing_is_claimed_of_what_was_not_chosen():
    assert selection.verdicts({"prompted": UP, "middle": UP}) == []


def cell(spec: Spec, **scores: list[float]) -> Cell:
    """A cell with these scores."""
    rows = [dict(zip(scores, values, strict=True)) for values in zip(*scores.values(), strict=True)]
    turns = tuple(
        SweptTurn(f"task-{i % 2}", i, f"turn {i}", {k.replace("_of", ":impatience"): v for k, v in row.items()})
        for i, row in enumerate(rows)
    )
    return Cell(spec.condition, spec.trait, spec.layer, spec.dose, turns)


FLAT = {name: [0.0] * 4 for name in selection.COUNTED}


def cells(judge: bool = False) -> dict[str, Cell]:
    """Two tasks, two seeds; a judge could not say of the last turn."""

    def made(spec: Spec, probe: list[float], classifier: list[float], facts: list[float]) -> Cell:
        more = {"judge_of": [*probe[:3], math.nan]} if judge else {}
        return cell(spec, probe_of=probe, classifier_of=classifier, facts=facts, **more, **FLAT)

    half = [0.5] * 4
    return {
        "unsteered": made(UNSTEERED, [0.0, 0.1, 0.2, 0.3], [0.0] * 4, half),
        "prompted": made(Spec("prompted", "impatience"), [0.2, 0.3, 0.4, 0.5], [0.2] * 4, half),
        "middle": made(Spec("steered", "impatience", 2, 0.2), [0.1, 0.2, 0.3, 0.4], [0.1] * 4, half),
        "chosen": made(Spec("steered", "impatience", 1, 0.3), [1.0, 1.1, 1.2, 1.3], [0.5] * 4, [0.5, 0.0, 0.5, 0.5]),
        "random": made(Spec("random", None, 1, 0.3), [0.0, 0.1, 0.2, 0.3], [0.0] * 4, half),
    }


def test_differences_are_paired_and_averaged_over_both_instruments():
    found = selection.differences("impatience", cells(), seeds=2)
    assert found["chosen - unsteered"] == Interval(0.75, 0.75, 0.75)  # (1.0 + 0.5) / 2 in every turn
    assert found["chosen - prompted"].mean == pytest.approx(0.55)
    assert found["random"] == Interval(0.0, 0.0, 0.0)
    assert found["facts: chosen - prompted"] == Interval(-0.125, -0.25, 0.0)  # one task lost half its facts once
    assert {v.claim: v.holds for v in selection.verdicts(found)}["facts not fewer than prompt-only's"] is False


def test_figures_stand_beside_the_unsteered_turns():
    row = selection.summarize("impatience", cells(judge=True), seeds=2)["chosen"]
    assert row["by_instrument"]["probe"]["mean"] == pytest.approx(1.0)
    assert row["by_instrument"]["classifier"]["mean"] == pytest.approx(0.5)
    assert row["by_instrument"]["judge"]["mean"] == pytest.approx(1.0)  # of the turns that it could read
    # Without the judge (1 + 0.5) / 2, with it (1 + 0.5 + 1) / 3: it said nothing of one of the second task's turns.
    assert row["expression"]["mean"] == pytest.approx((2.5 / 3 + (2.5 / 3 + 0.75) / 2) / 2, abs=1e-4)
    assert (row["facts"], row["facts_lost"]["mean"]) == (0.375, 0.125)


def test_what_a_judge_could_not_say_leaves_no_nan_in_the_file(tmp_path):
    found = cells(judge=True)
    row = selection.summarize("impatience", found, seeds=1)
    turns = selection.as_turns("impatience", found)
    assert [turn["scores"]["judge:impatience"] for turn in turns[:4]] == [0.0, 0.1, 0.2, None]
    common.write_json(tmp_path / "out.json", [row, turns])


def test_an_interval_keeps_turns_of_one_task_together():
    values = torch.tensor([0.0, 1.0, 0.0, 1.0])  # two tasks, two seeds
    assert common.over_tasks(values, 2) == Interval(0.5, 0.0, 1.0)
    assert common.over_tasks(torch.tensor([0.0, 0.0, 1.0, 1.0]), 2) == Interval(0.5, 0.5, 0.5)


def test_a_judge_is_a_third_instrument(lm, tasks):
    class Half:
        """Says 0.5, and of every third turn nothing."""

        def score(self, definition, opposite, trait, items, progress):
            assert definition == IMPATIENCE.definition and trait == "impatience"
            assert all(context[-1].speaker == "agent" for context, _ in items)
            self.texts = [text for _, text in items]
            return [None if i % 3 == 2 else i / 100 for i in range(len(items))]

    from traitbasis.contexts import read_contexts

    judge = Half()
    with Generator(lm, read_contexts(tasks), turns=4, max_tokens=4) as generator:
        given = {name: value for name, value in cells().items() if name in ("unsteered", "chosen")}
        found = selection.judged(judge, IMPATIENCE, generator, given)
    assert judge.texts == [f"turn {i}" for i in range(4)] * 2
    scores = [turn.scores["judge:impatience"] for each in found.values() for turn in each.turns]
    assert scores == pytest.approx([0.0, 0.01, math.nan, 0.03, 0.04, math.nan, 0.06, 0.07], nan_ok=True)
    assert list(selection.summarize("impatience", found, 2)["chosen"]["by_instrument"])[-1] == "judge"


# ---- Ratings


@pytest.fixture
def sheet(measured, measure, tmp_path, tasks) -> tuple[Path, Path]:
    """A sheet of twelve turns and its key, of a small measurement."""
    paths = tmp_path / "sheets" / "sheet.csv", tmp_path / "key.json"
    given = ["--out", str(measure.folder / "whole.json"), "--contexts", str(tasks), "--items", "12"]
    selection.main([*given, "--sheet", str(paths[0]), "--key", str(paths[1])])
    return paths


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def rate(path: Path, ratings: list[str]) -> None:
    rows = read(path)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "rating": rating} for row, rating in zip(rows, ratings, strict=True))


def test_a_sheet_is_blind_and_its_key_is_not(sheet):
    rows, key = read(sheet[0]), json.loads(sheet[1].read_text())
    assert len(rows) == 12 and list(rows[0]) == ["item", "trait", "definition", "agent", "text", "rating"]
    counts: dict[str, int] = {}
    for row in rows:
        hidden = key["items"][row["item"]]
        assert row["rating"] == "" and row["definition"] == IMPATIENCE.definition
        counts[hidden["condition"]] = counts.get(hidden["condition"], 0) + 1
    assert set(counts.values()) == {2} and len(counts) == 6  # equal parts
    text = sheet[0].read_text(encoding="utf-8")
    assert not any(word in text for word in ("steered", "prompted", "middle", "chosen", "probe", "0.3"))


def test_ratings_say_how_good_an_instrument_is(sheet, capsys):
    key = json.loads(sheet[1].read_text())
    probe = [key["items"][row["item"]]["scores"]["probe:impatience"] for row in read(sheet[0])]
    order = np.argsort(np.argsort(probe))
    rate(sheet[0], [str(min(3, rank // 3)) for rank in order])  # as the probe has it
    rated = ratings.read_ratings(*sheet)
    area, rho = ratings.validity(rated, "probe")
    assert area == 1.0 and rho > 0.9
    selection.main(["--rated", str(sheet[0]), "--key", str(sheet[1])])
    told = capsys.readouterr().out
    assert "| impatience | 12 | 3/3/3/3 | 1.00 |" in told and "mean rating (turns)" in told


def test_validity_is_computed_as_by_hand():
    def rated(rating: int, score: float) -> ratings.Rated:
        return ratings.Rated("impatience", "chosen", rating, {"probe": score})

    turns = [rated(0, 0.1), rated(0, 0.6), rated(1, 9.0), rated(2, 0.5), rated(3, 0.7)]
    # Of four pairs of a clear and an empty turn three are in order; the turn that is rated 1 does not count.
    assert ratings.validity(turns, "probe")[0] == 0.75
    ranks = np.corrcoef([1.5, 1.5, 3, 4, 5], [1, 3, 5, 2, 4])[0, 1]
    assert ratings.validity(turns, "probe")[1] == pytest.approx(ranks)
    assert all(math.isnan(figure) for figure in ratings.validity(turns[:2], "probe"))


def test_turns_without_a_rating_are_left_out(sheet):
    rate(sheet[0], ["0", "3", *[""] * 10])
    assert sorted(turn.rating for turn in ratings.read_ratings(*sheet)) == [0, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [(["4", *["1"] * 11], "line 2.*'4'; it must be 0, 1, 2 or 3"), ([""] * 12, "has no ratings; fill in")],
)
def test_bad_ratings_are_refused_with_their_line(sheet, given, message):
    rate(sheet[0], given)
    with pytest.raises(AnnotationError, match=message):
        ratings.read_ratings(*sheet)


def test_items_of_another_sheet_and_items_given_twice_are_refused(sheet):
    rate(sheet[0], ["1"] * 12)
    lines = sheet[0].read_text(encoding="utf-8")
    name = read(sheet[0])[0]["item"]
    sheet[0].write_text(lines.replace(name, "t1"), encoding="utf-8")
    with pytest.raises(AnnotationError, match="item 't1' is not in"):
        ratings.read_ratings(*sheet)
    other = read(sheet[0])[1]["item"]
    sheet[0].write_text(lines.replace(name, other), encoding="utf-8")
    with pytest.raises(AnnotationError, match=f"{other!r} is there twice"):
        ratings.read_ratings(*sheet)


def test_a_sheet_needs_a_measurement_of_the_same_tasks(measured, measure, tmp_path, tasks):
    given = ["--contexts", str(tasks), "--sheet", str(tmp_path / "x.csv"), "--key", str(tmp_path / "x.json")]
    with pytest.raises(AnnotationError, match="measure first"):
        selection.main([*given, "--out", str(tmp_path / "nothing.json")])
    with pytest.raises(AnnotationError, match="measured on other contexts"):
        given[1] = str(ROOT / "experiments" / "scenarios.yaml")
        selection.main([*given, "--out", str(measure.folder / "whole.json")])


def test_a_turn_that_looks_like_a_formula_or_holds_line_breaks_comes_back(tmp_path, tasks, measured):
    text = '=1+1\nsecond\u2028line, "quoted"'
    found = {**measured, "turns": [{**turn, "text": text} for turn in measured["turns"]]}
    (tmp_path / "odd.json").write_text(json.dumps(found))
    ratings.write_sheet(tmp_path / "odd.json", tasks, tmp_path / "odd.csv", tmp_path / "odd.key", 5)
    rows = read(tmp_path / "odd.csv")
    assert [row["text"] for row in rows] == ['\'=1+1\nsecond\u2028line, "quoted"'] * 5
    rate(tmp_path / "odd.csv", ["2"] * 5)
    assert len(ratings.read_ratings(tmp_path / "odd.csv", tmp_path / "odd.key")) == 5
