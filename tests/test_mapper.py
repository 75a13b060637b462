"""From feelings to conditions: readers, heads and vote against computations by hand, and the held-out phrasings."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tiny import tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.errors import ArtifactError, ReactionError
from traitbasis.model import LanguageModel
from traitbasis.reactive import mapper as mapping
from traitbasis.reactive.conditions import (
    DIMENSIONS,
    EMOTIONS,
    VOICES,
    Condition,
    Parts,
    all_conditions,
    shipped_parts,
)
from traitbasis.reactive.mapper import (
    HEADS,
    NEIGHBOURS,
    PREFIX,
    QUESTION,
    Anchor,
    Array,
    EmbeddingReader,
    Mapper,
    ModelReader,
    Phrasing,
    WordReader,
    choose,
    fit,
    fit_words,
    fitting_anchors,
    load_mapper,
    measure,
    model_mapper,
    phrasings_hash,
    read_phrasings,
    read_states,
    save_mapper,
)


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["emotions", "map", *map(str, arguments)], env={"COLUMNS": "160"})


def sequences(text: str, length: int = 4) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+(?:'\w+)*", text.casefold().replace("’", "'"))
    return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}


def one_hot(condition: Condition) -> Array:
    """Features of a reader that sees the labels themselves."""
    return np.array([float(label == condition.labels[head]) for head, labels in HEADS.items() for label in labels])


class LabelReader:
    """Reads texts that are conditions' names."""

    name = "labels"

    def read(self, texts: list[str] | tuple[str, ...]) -> Array:
        return np.array([one_hot(Condition.parse(text)) for text in texts])


@pytest.fixture(scope="module")
def words() -> Mapper:
    return fit_words()


@pytest.fixture(scope="module")
def by_label() -> Mapper:
    """Fitted on features that say the labels with a little noise."""
    anchors = fitting_anchors()
    features = np.array([one_hot(anchor.condition) for anchor in anchors])
    features += np.random.default_rng(0).normal(0, 0.05, features.shape)
    return fit(LabelReader(), features, anchors, 0.01, scaled=False)


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def short_parts() -> Parts:
    """Sentences of a few letters, which a byte-level model reads fast."""
    emotions = {
        name: {"cues": [name], "feels": [f"F{i}{n}." for n in range(5)], "shows": [f"S{i}{n}." for n in range(5)]}
        for i, name in enumerate(EMOTIONS)
    }
    dimensions = {
        of: {level: {"cues": [level], "says": [f"{of[0]}{level[0]}{n}." for n in range(5)]} for level in levels}
        for of, levels in DIMENSIONS.items()
    }
    return Parts.model_validate({"emotions": emotions, "dimensions": dimensions})


# --- the held-out phrasings -------------------------------------------------------------------------------------------


def test_there_are_over_200_phrasings_and_no_label_is_rare() -> None:
    phrasings = read_phrasings()
    assert len(phrasings) == len({one.text for one in phrasings}) == len({one.condition for one in phrasings}) >= 200
    assert set(Counter(one.condition.emotion for one in phrasings).values()) == {10}
    for of, levels in DIMENSIONS.items():
        found = Counter(one.condition.labels[of] for one in phrasings)
        assert set(found) == set(levels) and min(found.values()) >= 66, found


def test_no_phrasing_shares_four_words_in_a_row_with_a_sentence_of_the_anchors() -> None:
    theirs = {sequence: text for _, _, text in shipped_parts().sentences() for sequence in sequences(text)}
    shared = {sequence for one in read_phrasings() for sequence in sequences(one.text)} & set(theirs)
    assert not shared, {theirs[sequence] for sequence in shared}
    assert sequences("She says this SMALL nuisance, irritates you.") & set(theirs)  # the check can find one


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("", "mapping of emotions"),
        ("- dread", "mapping of emotions"),
        ("dread: no", "mapping of levels"),
        ("fright: {warm: It is.}", "'fright'"),
        ("dread: {warm.hot: It is.}", "'hot'"),
        ("dread: {warm: ' '}", "a text is needed"),
        ("dread: {warm: 7}", "a text is needed"),
        ("dread: {warm: a, warm: b}", "'warm' is there already"),
    ],
)
def test_a_damaged_phrasings_file_is_refused(content: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ReactionError, match=r"own\.yaml") as error:
        read_phrasings(file)
    assert word in str(error.value)


# --- anchors ----------------------------------------------------------------------------------------------------------


def test_anchors_hold_every_condition_and_in_each_voice_every_two_levels_equally_often() -> None:
    anchors = fitting_anchors()
    assert len(anchors) == 990 and {anchor.condition for anchor in anchors} == set(all_conditions())
    assert all(anchor.text == anchor.condition.voice(anchor.voice) for anchor in anchors)
    for a, b in (("politeness", "urgency"), ("urgency", "trust"), ("trust", "politeness")):
        found = Counter((x.voice, x.condition.emotion, x.condition.labels[a], x.condition.labels[b]) for x in anchors)
        assert set(found.values()) == {1}
        assert set(found) == set(product(range(VOICES), EMOTIONS, DIMENSIONS[a], DIMENSIONS[b]))


# --- readers ----------------------------------------------------------------------------------------------------------


def test_a_bag_of_words_is_what_the_hand_makes_of_it() -> None:
    reader = WordReader(["Wait, wait. No more!", "No one's late"])
    # 2 texts; "no" is in both, the others in one: log(3/2) + 1.
    rare, common = np.log(3 / 2) + 1, 1.0
    assert list(reader.vocabulary) == ["late", "more", "no", "one's", "wait"]
    row = np.array([0, rare, common, 0, (1 + np.log(2)) * rare])
    np.testing.assert_allclose(reader.read(["wait WAIT no more, Sir"])[0], row / np.linalg.norm(row), rtol=1e-12)
    assert not reader.read(["Sir"]).any()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_states_are_the_mean_over_the_texts_own_tokens_and_the_one_after_the_question(
    lm: LanguageModel, batch_size: int
) -> None:
    texts = ["She is sad.", "Enough!", "He waits and waits, as calm as one can be."]
    means, answers = read_states(lm, texts, batch_size=batch_size)
    for i, text in enumerate(texts):
        prefix, told, whole = (len(lm.tokenizer(t)["input_ids"]) for t in (PREFIX, f"{PREFIX} {text}", text))
        assert prefix + 1 + whole == told  # a token a byte
        ids = lm.tokenizer(f"{PREFIX} {text}{QUESTION}")["input_ids"]
        with torch.inference_mode():
            hidden = lm.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in range(len(lm.layers) - 1):  # transformers gives the last one after the final norm
            states = hidden[layer + 1][0].numpy()
            np.testing.assert_allclose(means[i, layer], states[prefix:told].mean(0), atol=1e-5)
            np.testing.assert_allclose(answers[i, layer], states[-1], atol=1e-5)
    for layers in ((2, 1), (1, 1), (0, 2)):
        expected = np.hstack([means[:, layers[0]], answers[:, layers[1]]])
        np.testing.assert_allclose(ModelReader(lm, layers).read(texts), expected, atol=1e-5)


def test_reading_states_leaves_no_hook_and_tells_its_progress(lm: LanguageModel) -> None:
    told: list[int] = []
    before = [len(layer._forward_hooks) for layer in lm.layers]
    read_states(lm, ["a", "b", "c"], [1], batch_size=2, step=told.append)
    assert told == [2, 1] and [len(layer._forward_hooks) for layer in lm.layers] == before
    with pytest.raises(ReactionError, match="no feeling in the text '  '"):
        read_states(lm, ["a", "  "])


def test_without_sentence_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ReactionError, match=r"traitbasis\[emotions\]"):
        EmbeddingReader()


def test_an_embedding_model_is_read_and_one_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            if name != "there":
                raise OSError("no such model\nand much more")

        def encode(self, texts: list[str], show_progress_bar: bool) -> Array:
            return np.array([[len(text), 1.0] for text in texts], np.float32)

    module = ModuleType("sentence_transformers")
    module.SentenceTransformer = Fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    assert EmbeddingReader("there").read(["ab", "c"]).tolist() == [[2, 1], [1, 1]]
    with pytest.raises(ReactionError, match=r"'nowhere': no such model\. Give a folder"):
        EmbeddingReader("nowhere")


# --- heads and vote ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40, 7), (7, 40)])
def test_the_heads_are_ridge_regression(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    x, y = random.normal(size=shape), random.normal(size=(shape[0], 3))
    for ridge, found in zip((0.1, 2.0), mapping._solutions(x, y, (0.1, 2.0)), strict=True):
        # As least squares of a longer table, whose further rows pull each weight to 0.
        pull = np.sqrt(ridge * (x**2).sum() / shape[1]) * np.eye(shape[1])
        expected = np.linalg.lstsq(np.vstack([x, pull]), np.vstack([y, np.zeros((shape[1], 3))]), rcond=None)[0]
        np.testing.assert_allclose(found, expected, atol=1e-10)


def test_a_vote_is_the_similarity_of_the_nearest_anchors_in_the_learned_space(words: Mapper) -> None:
    text = "fed up with waiting, and now they want proof again, at once"
    mapped = words.map([text])[0]
    place = (words.reader.read([text])[0] - words.centre) @ words.weights
    edges = np.cumsum([0, 22, 3, 3, 3])

    def cosine(a: Array, b: Array) -> float:
        return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))

    near = [np.mean([cosine(place[i:j], anchor[i:j]) for i, j in pairwise(edges)]) for anchor in words.places]
    votes: Counter[Condition] = Counter()
    for i in sorted(range(len(near)), key=lambda i: -near[i])[:NEIGHBOURS]:
        votes[words.conditions[i]] += np.exp(near[i] / 0.1) / words.conditions.count(words.conditions[i])
    expected = {condition: vote / votes.total() for condition, vote in votes.items()}
    assert dict(mapped.voted) == pytest.approx(expected)
    assert [vote for _, vote in mapped.voted] == sorted((vote for _, vote in mapped.voted), reverse=True)


def test_a_condition_is_as_likely_as_its_four_labels_together(words: Mapper) -> None:
    text = "fed up with waiting, and now they want proof again, at once"
    mapped = words.map([text])[0]
    z = (words.reader.read([text])[0] - words.centre) @ words.weights
    start = 0
    for head, labels in HEADS.items():
        part = slice(start, start + len(labels))
        (by,) = set(words.sharpness[part])
        raised = np.exp(by * (z[part] + words.base[part]))
        assert list(mapped.heads[head].values()) == pytest.approx(list(raised / raised.sum()))
        start += len(labels)
    expected = {
        condition: np.prod([mapped.heads[head][label] for head, label in condition.labels.items()])
        for condition in all_conditions()
    }
    assert dict(mapped.ranked) == pytest.approx(expected) and sum(expected.values()) == pytest.approx(1)
    assert [p for _, p in mapped.ranked] == sorted((p for _, p in mapped.ranked), reverse=True)
    assert mapped.condition.trust == "skeptical" and mapped.condition.urgency == "high"


def test_a_head_is_as_sure_as_it_is_right_on_voices_that_it_has_not_seen() -> None:
    """Features that say an anchor's politeness in 70 % of the anchors, another one in the rest, and all else always."""
    anchors = fitting_anchors()
    random = np.random.default_rng(0)
    features = np.array([one_hot(anchor.condition) for anchor in anchors])
    wrong = np.flatnonzero(random.random(len(anchors)) > 0.7)
    features[wrong, 22:25] = np.roll(features[wrong, 22:25], 1, axis=1)
    mapper = fit(LabelReader(), features, anchors, 0.001, scaled=False)
    mapped = mapper.map_features(features)
    sure = np.mean([max(one.heads["politeness"].values()) for one in mapped])
    assert sure == pytest.approx(0.7, abs=0.05)
    assert np.mean([max(one.heads["urgency"].values()) for one in mapped]) > 0.95


def test_labels_that_are_in_the_features_are_found(by_label: Mapper) -> None:
    conditions = all_conditions()
    mapped = by_label.map([condition.name for condition in conditions])
    assert [one.condition for one in mapped] == [one.voted[0][0] for one in mapped] == list(conditions)
    assert min(one.ranked[0][1] for one in mapped) > 0.9


def test_an_anchor_is_nearest_to_its_own_condition(words: Mapper) -> None:
    conditions = all_conditions()[::23]
    mapped = words.map([condition.voice(1) for condition in conditions])
    assert [one.voted[0][0] for one in mapped] == list(conditions)


def test_words_without_meaning_get_an_answer_and_none_is_an_error(words: Mapper) -> None:
    assert len(words.map(["xyzzy"])[0].ranked) == 594
    assert words.map([]) == []
    with pytest.raises(ReactionError, match="no feeling"):
        words.map(["sad", "\n"])


def test_leaving_voices_out_finds_the_layer_that_holds_and_not_the_one_that_knows_by_heart() -> None:
    anchors = fitting_anchors()
    random = np.random.default_rng(0)
    noise = random.normal(size=(len(anchors), 40))
    # Layer 0 says the sentences, which another voice does not have; layer 1 the labels, in noise; layer 2 nothing.
    names = sorted({(anchor.voice, anchor.condition.emotion) for anchor in anchors})
    by_heart = np.zeros((len(anchors), 110))
    for row, anchor in zip(by_heart, anchors, strict=True):
        row[names.index((anchor.voice, anchor.condition.emotion))] = 1
    labels = np.array([one_hot(anchor.condition) for anchor in anchors])
    layers = [by_heart, np.hstack([labels, 0.5 * noise]), noise]
    states = np.stack([np.pad(layer, ((0, 0), (0, 110 - layer.shape[1]))) for layer in layers], axis=1)
    found = choose(states, anchors, ridges=(0.01, 1.0))
    assert found[0].layer == 1 and found[0].accuracy > 0.95
    chance = (1 / 22 + 3 / 3) / 4
    assert all(choice.accuracy < chance + 0.05 for choice in found if choice.layer != 1)


# --- kept on disk -----------------------------------------------------------------------------------------------------


def test_a_fitted_mapper_is_kept_and_read_again(
    lm: LanguageModel, short_parts: Parts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAITBASIS_CACHE", str(tmp_path))
    told: list[int] = []
    mapper = model_mapper(lm, short_parts, told.append)
    assert sum(told) == 990
    again = model_mapper(lm, short_parts, lambda done: pytest.fail("read again"))
    texts = ["F11. S22.", "F00."]
    for a, b in zip(mapper.map(texts), again.map(texts), strict=True):
        assert a.condition == b.condition
        assert a.heads["emotion"] == pytest.approx(b.heads["emotion"], abs=1e-3)
    (file,) = (tmp_path / "emotions").iterdir()
    with pytest.raises(ReactionError, match="another sentences"):
        load_mapper(lm, file)
    other = tiny_model("qwen2", seed=1)
    with pytest.raises(ReactionError, match="another model_fingerprint"):
        load_mapper(other, file, short_parts)
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ArtifactError, match="damaged"):
        load_mapper(lm, file, short_parts)
    with pytest.raises(ArtifactError, match="no file"):
        load_mapper(lm, tmp_path / "none.safetensors", short_parts)


@pytest.mark.parametrize(
    ("name", "value"), [("weights", np.zeros((64, 30))), ("centre", np.full(64, np.nan)), ("places", np.zeros((5, 31)))]
)
def test_a_file_whose_parts_do_not_fit_is_refused(name: str, value: Array, lm: LanguageModel, tmp_path: Path) -> None:
    anchors = [Anchor(condition, number % 2, "") for number, condition in enumerate(all_conditions()[:40])]
    mapper = fit(ModelReader(lm, (1, 3)), np.random.default_rng(0).normal(size=(40, 64)), anchors, 1.0)
    path = save_mapper(mapper, tmp_path / "good")
    assert load_mapper(lm, path).conditions == mapper.conditions
    with pytest.raises(ReactionError, match="do not fit together"):
        load_mapper(lm, save_mapper(replace(mapper, **{name: value}), tmp_path / "bad"))


def test_only_a_language_models_mapper_is_kept(words: Mapper, tmp_path: Path) -> None:
    with pytest.raises(ReactionError, match="not bag of words"):
        save_mapper(words, tmp_path / "words")


# --- how well it does -------------------------------------------------------------------------------------------------


def test_accuracies_are_counted_as_by_hand(by_label: Mapper) -> None:
    """Four phrasings: right; another emotion of the family; another trust; all wrong."""
    said = [
        "dread.cold.high.trusting",
        "dread.cold.high.trusting",
        "peace.warm.low.trusting",
        "pride.warm.low.trusting",
    ]
    wanted = ["dread.cold.high.trusting", "anxiety.cold.high.trusting", "peace.warm.low.skeptical", "dread.cold.high"]
    found = measure(by_label, [Phrasing(Condition.parse(w), s) for s, w in zip(said, wanted, strict=True)])
    assert found.n == 4 and found.n_named == 1  # the first text names its emotion; "peace" alone is no cue
    assert found.top1.value == found.vote1.value == 0.25
    assert {head: one.value for head, one in found.heads.items()} == {
        "emotion": 0.5,
        "politeness": 0.75,
        "urgency": 0.75,
        "trust": 0.5,
    }
    assert found.family.value == 0.75
    with pytest.raises(ReactionError, match="no phrasing"):
        measure(by_label, [])


def test_chance_is_what_a_guess_gets() -> None:
    random = np.random.default_rng(0)
    conditions = all_conditions()
    guesses = [conditions[i] for i in random.integers(0, 594, 12_000)]
    wanted = [conditions[i] for i in np.arange(12_000) % 594]
    for name, chance in mapping.CHANCE.items():
        if name in ("top1", "top5", "vote1", "vote5"):
            continue
        right = np.mean([getattr(g, name) == getattr(w, name) for g, w in zip(guesses, wanted, strict=True)])
        assert right == pytest.approx(chance, abs=0.02), name
    assert mapping.CHANCE["top1"] == 1 / 594 and mapping.CHANCE["top5"] == 5 / 594


def test_bags_of_words_find_emotions_more_often_than_chance(words: Mapper) -> None:
    measured = measure(words)
    assert measured.heads["emotion"].low > 2 / 22
    assert measured.top5.value >= measured.top1.value


# --- commands ---------------------------------------------------------------------------------------------------------


def test_map_ranks_conditions_and_writes_json() -> None:
    result = run("--reader", "words", "--json", "He argues every point and wants proof", "So relieved!")
    first, second = (json.loads(line) for line in result.output.splitlines())
    assert first["text"].startswith("He argues") and len(first["ranked"]) == 5
    assert Condition.parse(first["condition"]).trust == "skeptical"
    assert Condition.parse(second["condition"]).emotion == "relief"
    assert len(run("--reader", "words", "--top", "2", "So relieved!").output.splitlines()) == 3


def test_map_measures_and_writes_what_made_the_figures(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    result = run("--measure", "--reader", "words", "--out", file)
    assert result.exit_code == 0 and "chance" in result.output
    figures = json.loads(file.read_text())
    (record,) = figures["readers"]
    assert record["n"] == len(read_phrasings()) and record["top1"]["low"] <= record["top1"]["value"]
    assert set(figures["chance"]) <= set(record) and figures["made_by"]["phrasings"] == phrasings_hash()


@pytest.mark.parametrize("arguments", [(), ("sad", "--measure"), ("sad", "--out", "x.json"), ("--reader", "x", "sad")])
def test_map_says_what_it_takes(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).exit_code == 2


def test_nothing_imports_torch() -> None:
    code = "import sys; import traitbasis.reactive.mapper, traitbasis.cli.emotions; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_committed_figures_are_of_these_phrasings_and_sentences() -> None:
    file = Path(__file__).parent.parent / "experiments" / "results" / "emotion_mapper.json"
    figures = json.loads(file.read_text())
    assert figures["made_by"]["phrasings"] == phrasings_hash()
    baseline = next(record for record in figures["readers"] if record["reader"] == "bag of words")
    again = measure(fit_words()).record
    assert {name: baseline[name] for name in again} == json.loads(json.dumps(again))
