"""Trait instruments of dialogues, fidelity and composability: against counts by hand, and on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from samples import lettered_set, to_yaml
from tiny import save_folder, tiny_model
from torch import Tensor
from typer.testing import CliRunner

from traitbasis.cli import app
from traitbasis.dialogues import Dialogue, DialogueFile, DialogueTurn
from traitbasis.errors import EvaluationError, PairError, TraitBasisError
from traitbasis.evaluation import quality, traits
from traitbasis.evaluation.composability import Composability, composability
from traitbasis.evaluation.fidelity import Fidelity, fidelity
from traitbasis.evaluation.findings import (
    Finding,
    as_judgments,
    judged_findings,
    named_findings,
    present_findings,
)
from traitbasis.evaluation.judgments import Judgment, Side, side_of, write_judgments
from traitbasis.evaluation.namer import (
    Namer,
    balanced_accuracy,
    checking_examples,
    train_namer,
    training_examples,
)
from traitbasis.evaluation.stuffing import CHECKING, TRAINING, stuffed_turns
from traitbasis.evaluation.traits import (
    TraitInstruments,
    TurnScore,
    names_of,
    read_dialogues_states,
    score_dialogues,
    strength_of,
)
from traitbasis.metrics.estimate import mean
from traitbasis.metrics.fidelity import Sides
from traitbasis.model import LanguageModel
from traitbasis.pairs import PAPER_TRAITS, PairSet, known_traits, load_pairs
from traitbasis.reading import Reader

TRAITS = {"angry": "x", "sad": "q", "terse": "z"}
STOP = "###STOP###"


def dialogue(method: str, wanted: Mapping[str, str], task: str, *said: str, trial: int = 0, **more: Any) -> Dialogue:
    """The customer says `said`, each after a question."""
    turns = [DialogueTurn(speaker, text) for words in said or ("Hm.",) for speaker, text in _exchange(words)]
    return Dialogue(method, wanted, task, trial, f"You are about {task}.", {}, tuple(turns), **more)


def _exchange(said: str) -> Any:
    return ("agent", "How can I help?"), ("customer", said)


@pytest.fixture(scope="module")
def tiny() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def pair_sets() -> list[PairSet]:
    return [lettered_set(trait, letter) for trait, letter in TRAITS.items()]


@pytest.fixture(scope="module")
def instruments(tiny: LanguageModel, pair_sets: list[PairSet]) -> TraitInstruments:
    return TraitInstruments.build(tiny, pair_sets)


def unused(*arguments: Any, **more: Any) -> Any:
    raise AssertionError("the model was asked to read what had been read")


# --- stuffed turns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trait", ["impatience", "skeptical", "code_switching", "terse"])
def test_a_stuffed_turn_names_its_trait_and_is_the_neutral_text_or_no_sentence(trait: str) -> None:
    pair_set = load_pairs(trait)
    names = {name.replace("_", " ") for name in (pair_set.trait, *pair_set.aliases)}
    pairs = [pair for pair in pair_set.select("heldout") for _ in range(2)]
    found = stuffed_turns(pair_set, CHECKING, "heldout")
    assert len(found) == len(pairs)
    for number, (pair, (context, text)) in enumerate(zip(pairs, found, strict=True)):
        assert context == pair.context
        assert any(name in text for name in names) and pair.positive not in text
        assert (pair.negative in text) == (list(CHECKING)[number % 3] != "bare")


def test_stuffed_turns_are_the_same_at_every_call_and_others_in_training_than_in_checking() -> None:
    pair_set = load_pairs("impatience")
    assert stuffed_turns(pair_set, TRAINING, "extra") == stuffed_turns(pair_set, TRAINING, "extra")
    training = {text for _, text in stuffed_turns(pair_set, TRAINING, "extra", "heldout", each=4)}
    assert not training & {text for _, text in stuffed_turns(pair_set, CHECKING, "extra", "heldout", each=3)}


@pytest.mark.parametrize("trait", known_traits())
def test_every_shipped_trait_has_words_to_be_stuffed_with(trait: str) -> None:
    bare = stuffed_turns(load_pairs(trait), {"bare": CHECKING["bare"]}, "extra", each=1)
    assert all(len(set(text.split())) >= 5 for _, text in bare)


# --- the namer --------------------------------------------------------------------------------------------------------

WIDTH, LAYERS = 24, 3


def planted(keyword: float, seed: int = 0) -> tuple[dict[str, Sides], dict[str, Tensor]]:
    """Two traits: at layer 1 a response with the trait is moved along the trait's direction, and along the direction of
    its words by `keyword`; a stuffed turn along its words alone."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.linalg.qr(torch.randn(WIDTH, 4, generator=generator))[0].T
    sides, stuffed = {}, {}
    for i, trait in enumerate(("a", "b")):

        def moved(n: int, shift: Tensor) -> Tensor:
            states = torch.randn(n, LAYERS, WIDTH, generator=generator)
            states[:, 1] += shift
            return states

        shown, words = 4 * directions[i], keyword * directions[2 + i]
        uses = {"default": 12, "extra": 16, "heldout": 24}
        sides[trait] = Sides(
            {use: moved(n, shown + words) for use, n in uses.items()},
            {use: moved(n, torch.zeros(WIDTH)) for use, n in uses.items()},
        )
        stuffed[trait] = moved(24, words)
    return sides, stuffed


def named(namer: Namer, states: Tensor) -> list[str]:
    return [namer.labels[i] for i in namer.probabilities(states).argmax(-1).tolist()]


def test_a_planted_trait_is_named_at_its_layer() -> None:
    sides, stuffed = planted(keyword=0)
    examples, checked = training_examples(sides, stuffed), checking_examples(sides, stuffed, "default")
    namer = train_namer(("a", "b"), examples, checked, [0, 1, 2])
    assert namer.layer == 1 and namer.labels == ("a", "b", "none")
    assert balanced_accuracy(namer, checking_examples(sides, {}, "heldout")) > 0.9


def test_words_of_a_trait_win_only_where_no_stuffed_turn_was_trained_on() -> None:
    """The words' direction tells trait from no trait as well as the trait's own does."""
    sides, stuffed = planted(keyword=8)
    seen = {trait: states[:12] for trait, states in stuffed.items()}
    unseen = torch.cat([states[12:] for states in stuffed.values()])
    without = {trait: side.negative["extra"] for trait, side in sides.items()}

    def trained(stuffed: Mapping[str, Tensor]) -> Namer:
        checked = checking_examples(sides, stuffed, "default")
        return train_namer(("a", "b"), training_examples(sides, stuffed), checked, [1])

    assert named(trained(without), unseen).count("none") < 12  # of 24
    careful = trained(seen)
    assert named(careful, unseen).count("none") > 19
    assert named(careful, sides["a"].positive["heldout"]).count("a") > 18


def test_the_namer_is_where_the_slope_of_the_penalised_loss_is_zero() -> None:
    """By hand in numpy: softmax regression on standardised features, every label of one weight, decay 0.1."""
    sides, stuffed = planted(keyword=3)
    examples = training_examples(sides, stuffed)
    namer = train_namer(("a", "b"), examples, checking_examples(sides, stuffed, "default"), [1])
    states = examples.states[:, 1].numpy().astype(np.float64)
    weights = namer.weights.numpy().astype(np.float64)
    labels = examples.labels.numpy()
    share = np.zeros(len(labels))
    for label in (0, 1):
        share[labels == label] = 1 / 3 / 16
    share[labels == 2] = np.concatenate([np.full(n, 1 / 3 / 4 / n) for n in (16, 24, 16, 24)])

    def slope(none_bias: float) -> float:
        scores = states @ weights + namer.bias.numpy() - [0, 0, none_bias]
        odds = np.exp(scores - scores.max(1, keepdims=True))
        error = (odds / odds.sum(1, keepdims=True) - np.eye(3)[labels]) * share[:, None]
        deviation = states.std(0, ddof=1)
        features = (states - states.mean(0)) / deviation
        return float(np.abs(features.T @ error + 0.2 * weights * deviation[:, None]).max())

    assert min(slope(i / 10) for i in range(-20, 21)) < 1e-4


def test_on_shuffled_labels_it_learns_nothing() -> None:
    sides, stuffed = planted(keyword=0)
    examples, held_out = training_examples(sides, stuffed), checking_examples(sides, {}, "heldout")
    accuracies = [
        balanced_accuracy(train_namer(("a", "b"), examples.shuffled(seed), held_out.shuffled(seed), [1]), held_out)
        for seed in range(20)
    ]
    assert abs(sum(accuracies) / 20 - 1 / 3) < 0.07


# --- the instruments --------------------------------------------------------------------------------------------------


def test_the_quality_of_a_tiny_models_instruments_is_stated_and_shuffled_labels_are_chance(
    instruments: TraitInstruments,
) -> None:
    found = instruments.quality
    assert instruments.labels == (*TRAITS, "none")
    assert {name: set(by_trait) for name, by_trait in found.auc.items()} == {
        name: set(TRAITS) for name in ("probe", "classifier", "namer")
    }
    assert min(value for by_trait in found.auc.values() for value in by_trait.values()) > 0.8
    assert all(abs(value - 0.5) < 0.15 for value in found.shuffled_auc.values())
    assert found.chance == 0.25 and found.accuracy > 0.7 and abs(found.shuffled_accuracy - 0.25) < 0.12
    assert 0 < found.threshold < 1
    assert "shuffled" in "\n".join(found.lines) and "stuffed" in "\n".join(found.lines)


def test_figures_of_quality_are_those_counted_from_the_pairs(
    tiny: LanguageModel, pair_sets: list[PairSet], instruments: TraitInstruments
) -> None:
    reader = Reader(tiny)
    positive, negative, stuffed = [], [], []
    for pair_set in pair_sets:
        pairs = pair_set.select("heldout")
        positive.append([reader.read([(p.context, p.positive)], states=True)[0].states for p in pairs])
        negative += [reader.read([(p.context, p.negative)], states=True)[0].states for p in pairs]
        stuffed.append([r.states for r in reader.read(stuffed_turns(pair_set, CHECKING, "heldout"), states=True)])
    for i, trait in enumerate(TRAITS):
        names = [instruments.names(torch.stack(states))[:, i].tolist() for states in (*positive, negative)]
        own, others = names[i], [p for j, row in enumerate(names) for p in row if j != i]
        auc = sum((a > b) + 0.5 * (a == b) for a in own for b in others) / len(own) / len(others)
        assert instruments.quality.auc["namer"][trait] == pytest.approx(auc, abs=0.02)
    hits = [
        named(instruments.namer, torch.stack(states)).count(trait)
        for states, trait in zip(stuffed, TRAITS, strict=True)
    ]
    assert instruments.quality.fooled["namer"] == pytest.approx(sum(hits) / sum(map(len, stuffed)), abs=0.03)
    recalls = [
        named(instruments.namer, torch.stack(states)).count(label) / len(states)
        for states, label in zip([*positive, negative], instruments.labels, strict=True)
    ]
    assert instruments.quality.accuracy == pytest.approx(sum(recalls) / 4, abs=0.03)


def test_the_threshold_is_one_that_gives_most_mixes_exactly_their_traits() -> None:
    generator = torch.Generator().manual_seed(3)
    mixes = []
    for _ in range(40):
        chosen = frozenset(torch.randperm(4, generator=generator)[:2].tolist())
        names = torch.rand(5, generator=generator) + torch.tensor([0.4 * (i in chosen) for i in range(4)] + [0])
        mixes.append((chosen, names / names.sum()))

    def exact(threshold: float) -> int:
        return sum({i for i in range(4) if names[i] > threshold} == chosen for chosen, names in mixes)

    assert exact(quality._threshold(mixes)) == max(exact(i / 2000) for i in range(2001))


def test_instruments_are_kept_beside_the_scores_and_others_are_not_taken_for_them(
    tiny: LanguageModel, pair_sets: list[PairSet], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "scores.jsonl"
    two = TraitInstruments.build(tiny, pair_sets[:2], cache=cache)
    (kept,) = tmp_path.iterdir()
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", unused)
        again = TraitInstruments.build(tiny, pair_sets[:2], cache=cache)
        with pytest.raises(AssertionError):
            TraitInstruments.build(tiny, pair_sets[1:], cache=cache)
    states = torch.randn(3, 4, 32)
    assert torch.equal(two.names(states), again.names(states))
    assert two.quality == again.quality and two.quality.lines == again.quality.lines
    for trait, by_name in two.expression(states).items():
        for name, values in by_name.items():
            torch.testing.assert_close(values, again.expression(states)[trait][name])
    kept.write_bytes(kept.read_bytes()[:100])  # damaged: made again
    assert TraitInstruments.build(tiny, pair_sets[:2], cache=cache).hash == two.hash


def test_instruments_need_one_pair_set_a_trait_with_all_three_uses(
    tiny: LanguageModel, pair_sets: list[PairSet]
) -> None:
    with pytest.raises(PairError, match="angry, angry"):
        TraitInstruments.build(tiny, [pair_sets[0], pair_sets[0]])
    with pytest.raises(PairError, match="none"):
        TraitInstruments.build(tiny, [])
    some = pair_sets[0].model_copy(update={"pairs": pair_sets[0].select("default", "extra")})
    with pytest.raises(PairError, match="angry: no pair is marked 'use: heldout'"):
        TraitInstruments.build(tiny, [some])


# --- scores of dialogues ----------------------------------------------------------------------------------------------


def sample_dialogues() -> list[Dialogue]:
    return [
        dialogue("steered", {"angry": "low"}, "lamp", "W1 xxxx it", "W1 xxxxxxxx now", stop_tokens=(STOP,)),
        dialogue("steered", {}, "lamp", "W1 oooo it", STOP, stop_tokens=(STOP,)),
        dialogue("prompted", {"angry": "low"}, "lamp", "W1 xxxx it", f"bye {STOP}", stop_tokens=(STOP,)),
    ]


def test_a_turns_scores_are_those_of_the_turn_read_alone(tiny: LanguageModel, instruments: TraitInstruments) -> None:
    dialogues = sample_dialogues()
    scores = score_dialogues(instruments, tiny, dialogues)
    for told, turns in zip(dialogues, scores, strict=True):
        for context, text, score in zip(told.contexts(), told.said, turns, strict=True):
            if text == STOP:
                continue
            states = Reader(tiny).read([(context, text.replace(STOP, "").strip())], states=True)[0].states
            assert states is not None
            assert list(score.names.values()) == pytest.approx(instruments.names(states[None])[0].tolist(), abs=1e-4)
            for trait, by_name in instruments.expression(states[None]).items():
                assert score.expression[trait] == pytest.approx({n: float(v) for n, v in by_name.items()}, abs=1e-3)
    states = read_dialogues_states(Reader(tiny), dialogues)
    assert [len(turns) for turns in states] == [2, 2, 2]
    assert list(scores[0][1].names.values()) == pytest.approx(instruments.names(states[0])[1].tolist(), abs=1e-4)


def test_a_turn_that_is_a_stop_token_says_nothing_and_does_not_count(
    tiny: LanguageModel, instruments: TraitInstruments
) -> None:
    _, with_stop, _ = score_dialogues(instruments, tiny, sample_dialogues())
    assert all(np.isnan(p) for p in with_stop[1].names.values())
    assert names_of(with_stop) == with_stop[0].names
    assert strength_of(with_stop, "sad") == pytest.approx(sum(with_stop[0].expression["sad"].values()) / 2)
    assert read_dialogues_states(Reader(tiny), sample_dialogues())[1][1].isnan().all()
    silent = dialogue("steered", {}, "lamp", STOP, stop_tokens=(STOP,))
    assert named_findings([silent], score_dialogues(instruments, tiny, [silent])) == {}


def test_what_was_scored_is_not_read_again_and_a_killed_run_goes_on(
    tiny: LanguageModel, instruments: TraitInstruments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "scores.jsonl"
    progress: list[int] = []
    scores = score_dialogues(instruments, tiny, sample_dialogues(), cache, progress.append)
    lines = cache.read_text().splitlines(keepends=True)
    assert len(lines) == sum(progress) == 4  # one turn is said twice, one says nothing
    with monkeypatch.context() as patch:
        patch.setattr(Reader, "read", unused)
        assert repr(score_dialogues(instruments, tiny, sample_dialogues(), cache)) == repr(scores)
    cache.write_text("".join(lines[:2]) + "no line\n" + lines[2][:40])
    again = score_dialogues(instruments, tiny, sample_dialogues(), cache)
    assert [s.names for row in again for s in row if s.names["none"] >= 0] == [
        pytest.approx(s.names, abs=1e-4) for row in scores for s in row if s.names["none"] >= 0
    ]
    assert len([line for line in cache.read_text().splitlines() if line.startswith("{")]) == 4


def test_scores_of_other_instruments_are_not_taken_and_another_model_is_refused(
    tiny: LanguageModel, pair_sets: list[PairSet], instruments: TraitInstruments, tmp_path: Path
) -> None:
    cache = tmp_path / "scores.jsonl"
    score_dialogues(instruments, tiny, sample_dialogues(), cache)
    two = TraitInstruments.build(tiny, pair_sets[:2])
    assert set(score_dialogues(two, tiny, sample_dialogues(), cache)[0][0].names) == {"angry", "sad", "none"}
    with pytest.raises(EvaluationError, match="made on tiny-llama"):
        score_dialogues(instruments, tiny_model(seed=1), sample_dialogues())


# --- fidelity ---------------------------------------------------------------------------------------------------------

KNOWN = ("angry", "sad", "terse")
LOW, MEDIUM, HIGH = ({"angry": level} for level in ("low", "medium", "high"))


def finding(*names: str, strength: float = 0.0, **more: Any) -> Finding:
    return Finding(dict.fromkeys(names, "present"), dict.fromkeys(KNOWN, strength), **more)


def told(*cases: tuple[Mapping[str, str], str, str | None, float]) -> tuple[list[Dialogue], dict[Side, Finding]]:
    """Dialogues and findings of (intended, task, named, strength)."""
    dialogues = [dialogue("steered", wanted, task) for wanted, task, _, _ in cases]
    found = [finding(*([named] if named else []), strength=strength) for _, _, named, strength in cases]
    return dialogues, {side_of(d): f for d, f in zip(dialogues, found, strict=True)}


def one(dialogues: list[Dialogue], found: Mapping[Side, Finding]) -> Fidelity:
    (row,) = fidelity(dialogues, {"namer": found}, KNOWN)
    return row


def test_fidelity_is_the_share_named_as_intended_with_and_without_neutral_dialogues() -> None:
    row = one(
        *told(
            ({"angry": "low"}, "t1", "angry", 0),
            ({"sad": "low"}, "t1", "angry", 0),
            ({}, "t1", None, 0),
            ({"angry": "low"}, "t2", None, 0),
            ({"sad": "low"}, "t2", "sad", 0),
            ({}, "t2", "terse", 0),
            ({"sad": "low"}, "t3", "sad", 0),
        )
    )
    assert (row.dialogues, row.chance) == (7, 0.25)
    assert row.named.value == pytest.approx(4 / 7) and row.named.low < 4 / 7 < row.named.high
    assert row.of_traits.value == pytest.approx(3 / 5) and row.neutral.value == 0.5
    assert {trait: figure.value for trait, figure in row.by_trait.items()} == {
        "angry": 0.5,
        "sad": pytest.approx(2 / 3),
    }
    assert row.confusion == {
        "angry": {"angry": 1, "none": 1},
        "none": {"none": 1, "terse": 1},
        "sad": {"angry": 1, "sad": 2},
    }
    assert np.isnan(row.level.value) and row.level_pairs == 0 and np.isnan(row.named_level.value)
    json.dumps(row.record, allow_nan=False)


def test_the_shuffled_figure_is_the_mean_over_all_ways_to_deal_the_intended_traits() -> None:
    cases = [
        ({"angry": "low"}, "t1", "angry", 0.0),
        ({"sad": "low"}, "t1", "angry", 0.0),
        ({}, "t1", None, 0.0),
        ({"angry": "medium"}, "t1", None, 0.0),
    ]
    names = [named or "none" for _, _, named, _ in cases]
    intended = [next(iter(wanted), "none") for wanted, *_ in cases]
    dealt = [sum(a == b for a, b in zip(order, names, strict=True)) / 4 for order in permutations(intended)]
    assert one(*told(*cases)).shuffled.value == pytest.approx(sum(dealt) / len(dealt))


def test_where_all_dialogues_of_a_task_intend_the_same_nothing_can_be_dealt_anew() -> None:
    row = one(*told((LOW, "t1", "angry", 0), (HIGH, "t1", "angry", 0)))
    assert row.named.value == 1 and np.isnan(row.shuffled.value)


def test_a_rater_who_always_says_the_same_is_no_better_than_shuffled() -> None:
    cases = [(wanted, f"t{i}", "angry", 0.0) for i in range(4) for wanted in ({}, {"angry": "low"}, {"sad": "low"})]
    row = one(*told(*cases))
    assert row.named.value == pytest.approx(row.shuffled.value) == pytest.approx(1 / 3)


def test_levels_are_in_order_where_the_higher_one_shows_more() -> None:
    row = one(
        *told(
            (LOW, "t1", "angry", 0.1),
            (MEDIUM, "t1", "angry", 0.5),
            (HIGH, "t1", "angry", 0.3),
            (LOW, "t2", None, 0.2),
            (HIGH, "t2", None, 0.2),
            ({"sad": "high"}, "t1", None, 9.0),
            (LOW, "t3", None, float("nan")),
            (HIGH, "t3", None, 1.0),
        )
    )
    assert row.level.value == pytest.approx((1 + 1 + 0 + 0.5) / 4) and row.level_pairs == 4


def test_levels_of_dialogues_of_different_length_are_compared_as_far_as_both_go() -> None:
    """The same beginning, and an agent who later asks what nobody is angry at."""
    shown = {"low": [0.2, 0.2], "medium": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0], "high": [0.8, 0.8]}
    dialogues, found = told(*[({"angry": level}, "t1", "angry", mean(turns)) for level, turns in shown.items()])
    rated = {side_of(d): replace(found[side_of(d)], course={"angry": shown[d.traits["angry"]]}) for d in dialogues}
    assert (one(dialogues, found).level.value, one(dialogues, rated).level.value) == (pytest.approx(2 / 3), 1)


def test_only_dialogues_of_one_trial_and_of_one_way_to_steer_are_a_pair_of_levels() -> None:
    dialogues = [
        dialogue("steered", LOW, "t1"),
        dialogue("steered", HIGH, "t1", trial=1),
        dialogue("steered", HIGH, "t1", positions="all"),
    ]
    rows = fidelity(dialogues, {"namer": {side_of(d): finding("angry") for d in dialogues}}, KNOWN)
    assert [(row.method, row.level_pairs) for row in rows] == [("steered", 0), ("steered (positions=all)", 0)]


def test_a_rater_who_names_several_means_the_strongest_and_levels_count_where_they_are_stated() -> None:
    dialogues = [dialogue("steered", wanted, f"t{i}") for i, wanted in enumerate((LOW, HIGH, HIGH, {}))]
    said = ({"angry": "low"}, {"angry": "medium", "sad": "low"}, {"angry": "high", "sad": "high"}, {})
    judgments = [Judgment(*side_of(d), "anna", named) for d, named in zip(dialogues, said, strict=True)]
    (row,) = fidelity(dialogues, judged_findings(judgments), KNOWN)
    assert row.rater == "anna" and row.named.value == 0.75 and row.confusion["angry"] == {"angry": 2, "several": 1}
    assert row.named_level.value == pytest.approx(1 / 3) and row.by_turn == ()
    vague = Finding({"angry": "present", "sad": "low"}), Finding({"angry": "present", "sad": "present"})
    assert [f.label(KNOWN) for f in vague] == ["several", "several"]
    assert sorted(as_judgments("anna", judged_findings(judgments)["anna"]), key=str) == sorted(judgments, key=str)


def test_every_turn_has_a_figure_and_turns_that_say_nothing_do_not_count() -> None:
    dialogues = [dialogue("steered", LOW, f"t{i}") for i in range(2)]
    turns = (("angry", "none", "angry"), ("none", ""))
    found = {side_of(d): finding("angry", by_turn=t) for d, t in zip(dialogues, turns, strict=True)}
    assert [figure.value for figure in one(dialogues, found).by_turn] == [0.5, 0, 1]


def test_mixes_are_left_out_of_fidelity_and_a_trait_that_is_not_evaluated_is_an_error() -> None:
    mix = dialogue("steered", {"angry": "low", "sad": "low"}, "t1")
    plain = dialogue("steered", LOW, "t1")
    found = {side_of(d): finding("angry") for d in (mix, plain)}
    assert one([mix, plain], found).dialogues == 1
    with pytest.raises(EvaluationError, match="one trait or none"):
        one([mix], found)
    with pytest.raises(EvaluationError, match="dialogues have rude"):
        one([dialogue("steered", {"rude": "low"}, "t1")], found)


# --- composability ----------------------------------------------------------------------------------------------------

MIX, OTHER = {"angry": "low", "sad": "low"}, {"sad": "low", "terse": "low"}


def mixed(*cases: tuple[Mapping[str, str], str, tuple[str, ...], tuple[str, ...]]) -> Composability:
    """Of (intended, task, present, ranked)."""
    dialogues = [dialogue("steered", wanted, task, trial=i) for i, (wanted, task, *_) in enumerate(cases)]
    found = {
        side_of(d): finding(*present, ranked=ranked)
        for d, (_, _, present, ranked) in zip(dialogues, cases, strict=True)
    }
    (row,) = composability([*dialogues, dialogue("steered", LOW, "t1")], {"namer": found}, KNOWN)
    return row


def test_composability_is_the_share_of_mixes_with_exactly_their_traits() -> None:
    row = mixed(
        (MIX, "t1", ("angry", "sad"), ("sad", "angry", "terse")),
        (MIX, "t1", ("angry", "sad", "terse"), ("terse", "angry", "sad")),
        (MIX, "t2", ("sad",), ("sad", "terse", "angry")),
        (OTHER, "t2", ("terse", "sad"), ("terse", "sad", "angry")),
    )
    assert row.dialogues == 4 and row.exact.value == 0.5 and row.every.value == 0.75
    assert row.each.value == pytest.approx((1 + 1 + 0.5 + 1) / 4) and row.false.value == 0.25
    assert row.ranked.value == 0.5 and row.chance_ranked == pytest.approx(1 / 3)
    assert {mix: figure.value for mix, figure in row.by_mix.items()} == {
        "angry+sad": pytest.approx(1 / 3),
        "sad+terse": 1,
    }
    assert {trait: figure.value for trait, figure in row.by_trait.items()} == {
        "angry": pytest.approx(2 / 3),
        "sad": 1,
        "terse": 1,
    }
    assert row.by_false == {"terse": 1}
    assert row.shuffled.value == pytest.approx((0 + 0.5) / 2)  # of t2 alone: t1 has one mix
    assert row.exact.low <= 0.5 <= row.exact.high
    json.dumps(row.record, allow_nan=False)


def test_raters_without_an_order_have_no_ranked_figure_and_one_mix_no_shuffled_one() -> None:
    row = mixed((MIX, "t1", ("angry", "sad"), ()))
    assert row.exact.value == 1 and np.isnan(row.ranked.value) and np.isnan(row.chance_ranked)
    assert np.isnan(row.shuffled.value) and np.isnan(row.exact.low)  # one task has no interval


def test_without_a_mix_there_is_no_composability() -> None:
    with pytest.raises(EvaluationError, match="several traits"):
        composability([dialogue("steered", LOW, "t1")], {}, KNOWN)


def score(**names: float) -> TurnScore:
    return TurnScore(names, {trait: {"probe": p, "classifier": 3 * p} for trait, p in names.items() if trait != "none"})


def test_a_dialogue_shows_what_its_turns_show_on_average() -> None:
    both = dialogue("steered", MIX, "t1", "a", "b")
    scores = [[score(angry=0.7, sad=0.1, none=0.2), score(angry=0.1, sad=0.5, none=0.4)]]
    (named,) = named_findings([both], scores).values()
    assert dict(named.named) == {"angry": "present"} and named.by_turn == ("angry", "sad")
    assert named.strength["angry"] == pytest.approx(0.8) and named.label(KNOWN) == "angry"
    (present,) = present_findings([both], scores, 0.25).values()
    assert set(present.named) == {"angry", "sad"} and present.ranked == ("angry", "sad")
    assert set(next(iter(present_findings([both], scores, 0.35).values())).named) == {"angry"}


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tiny: LanguageModel, pair_sets: list[PairSet], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, pair files and dialogues of two methods: one writes the trait's letter, one does not."""
    folder = tmp_path_factory.mktemp("eval-traits")
    save_folder(tiny, folder / "model")
    for pair_set in pair_sets:
        document = pair_set.model_dump(mode="json", exclude_none=True)
        for pair in document["pairs"]:
            pair["context"] = [{turn["speaker"]: turn["text"]} for turn in pair["context"]]
        (folder / f"{pair_set.trait}.yaml").write_text(to_yaml(document))
    for method in ("steered", "unsteered"):
        file = DialogueFile(folder / f"{method}.jsonl", {"method": method})
        for task in ("t1", "t2", "t3"):
            for wanted in ({}, {"angry": "high"}, {"sad": "high"}, {"angry": "low", "sad": "low"}):
                letters = [TRAITS[trait] for trait in wanted] if method == "steered" else []
                said = [f"W1 dddd {letter * 8} it" for letter in letters or ["o"]]
                file.append(dialogue(method, wanted, task, *said, *said))
    return folder


def run(command: str, files: Path, *more: str) -> Any:
    pairs = [part for trait in TRAITS for part in ("--pairs", str(files / f"{trait}.yaml"))]
    paths = [str(files / f"{method}.jsonl") for method in ("steered", "unsteered")]
    options = ["--model", str(files / "model"), "--dtype", "float32", "--threads", "1", "--traits", ",".join(TRAITS)]
    return CliRunner().invoke(app, ["eval", command, *paths, *pairs, *options, *more])


def test_the_fidelity_command_tells_methods_apart_and_says_what_read(files: Path) -> None:
    made = run(
        "fidelity",
        files,
        *("--cache", str(files / "scores.jsonl"), "--out", str(files / "f.json"), "--html", str(files / "f.html")),
    )
    assert made.exit_code == 0, made.output + repr(made.exception)
    figures = json.loads((files / "f.json").read_text())
    steered, unsteered = figures["rows"]
    assert (steered["rater"], steered["method"], steered["dialogues"]) == ("namer", "steered", 9)
    assert steered["of_traits"]["value"] > 0.8 > 0.3 > unsteered["of_traits"]["value"]
    assert steered["chance"] == 0.25 and len(steered["by_turn"]) == 2
    made_by = figures["made_by"]
    assert made_by["instruments"]["model"] in ("model", str(files / "model")) and made_by["headers"]
    assert {"auc", "fooled", "shuffled_auc"} <= made_by["quality"].keys() and made_by["versions"]
    assert "read by" in made.output and "unsteered" in (files / "f.html").read_text()
    assert sorted(path.suffix for path in files.glob("scores*")) == [".jsonl", ".safetensors"]


def test_the_composability_command_finds_both_traits_where_they_are(files: Path) -> None:
    made = run("composability", files, "--cache", str(files / "scores.jsonl"), "--out", str(files / "c.json"))
    assert made.exit_code == 0, made.output + repr(made.exception)
    steered, unsteered = json.loads((files / "c.json").read_text())["rows"]
    assert steered["ranked"]["value"] == 1 and steered["each"]["value"] > unsteered["each"]["value"]
    assert unsteered["exact"]["value"] == 0


def test_judgments_are_measured_alike_without_a_model_and_agreement_is_reported(files: Path, tmp_path: Path) -> None:
    judgments = []
    for method in ("steered", "unsteered"):
        for task in ("t1", "t2", "t3"):
            for wanted in ({}, {"angry": "high"}, {"sad": "high"}):
                side = side_of(dialogue(method, wanted, task))
                judgments.append(Judgment(*side, "anna", wanted if method == "steered" else {}))
                judgments.append(Judgment(*side, "ben", wanted if task != "t1" else {"terse": "low"}))
    path = write_judgments(tmp_path / "people.jsonl", "fidelity", judgments, {"by": "hand"})
    options = ("--no-instruments", "--judgments", str(path), "--out", str(tmp_path / "f.json"))
    made = run("fidelity", files, *options)
    assert made.exit_code == 0, made.output + repr(made.exception)
    figures = json.loads((tmp_path / "f.json").read_text())
    value = {(row["rater"], row["method"]): row["named"]["value"] for row in figures["rows"]}
    assert value == {
        ("anna", "steered"): 1.0,
        ("anna", "unsteered"): pytest.approx(1 / 3, abs=1e-3),
        ("ben", "steered"): pytest.approx(2 / 3, abs=1e-3),
        ("ben", "unsteered"): pytest.approx(2 / 3, abs=1e-3),
    }
    assert list(figures["agreement"]) == ["anna / ben"] and "Krippendorff" in made.output


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (["--no-instruments"], "there must be --judgments"),
        (["--judgments", "missing.jsonl"], "missing.jsonl"),
        (["--traits", "sad"], "leaves out angry"),
    ],
)
def test_what_cannot_be_measured_is_said_before_a_model_is_loaded(
    files: Path, more: list[str], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("traitbasis.cli.evaluate.load_lm", unused)
    made = run("fidelity", files, *more)
    said = made.output + (str(made.exception) if isinstance(made.exception, TraitBasisError) else "")
    assert made.exit_code != 0 and what in " ".join(said.replace("│", " ").split())


def test_the_papers_traits_are_evaluated_by_default(files: Path) -> None:
    from traitbasis.cli.evaluate import choose_pairs

    found = choose_pairs("", [files / "angry.yaml"], [dialogue("steered", {"sad": "low"}, "t1")])
    assert {pair_set.trait for pair_set in found} == {*PAPER_TRAITS, "angry", "sad"}


def test_names_of_no_turns_are_none() -> None:
    assert names_of([]) == {} and traits.FORMAT.startswith("traitbasis.")
