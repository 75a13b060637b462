"""Pairs of the emotions: 22 of them and three dimensions, as distinct and as well kept as the traits' pairs."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from traitbasis.cli import app
from traitbasis.errors import PairError
from traitbasis.guards import GUARDS, Conversation
from traitbasis.pair_check import check_pair_file
from traitbasis.pairs import has_pairs, known_emotions, known_traits, load_pairs, written_out

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "contrastive_pairs"
# tau-Emotion-Bench, appendix A.1
FAMILIES = {
    "anger": {"annoyance", "frustration", "argumentativeness", "bitterness", "exasperation"},
    "fear": {"anxiety", "nervousness", "dread", "desperation"},
    "disgust": {"dislike", "aversion", "distaste", "repugnance"},
    "sadness": {"disappointment", "discouragement", "helplessness", "hopelessness", "sorrow"},
    "enjoyment": {"relief", "pride", "peace", "excitement"},
}
DIMENSIONS = {"politeness_warm", "urgency_high", "trust_trusting"}
NAMES = sorted({*DIMENSIONS, *(name for names in FAMILIES.values() for name in names)})
OWN = {"politeness_warm": {"please", "thanks", "thank"}, "excitement": {"!"}}
SIDES = ("positive", "negative")
GAP = 0.35


def read(path: Path) -> dict[str, Any]:
    """A pair file as plain YAML, past our reader."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


FILES = {name: read(FOLDER / "emotions" / f"{name}.yaml") for name in NAMES}
PAIRS = [(name, pair) for name in NAMES for pair in FILES[name]["pairs"]]


def plain(text: str) -> str:
    """Lower case, single spaces."""
    return " ".join(text.lower().split())


def sentences(text: str) -> set[str]:
    """Its sentences of six words and more: shorter ones anybody may say twice."""
    return {one for one in re.split(r"(?<=[.!?]) ", plain(text)) if len(one.split()) >= 6}


def signals(text: str) -> set[str]:
    """Counted in another way than the product counts: words split at white space, and marks."""
    found = {word.strip(".,;:?!\"'()") for word in plain(text).replace("’", "'").split()} - {""}
    return found | {mark for mark in ("?", "!", "...", "…", "—") if mark in text}


# --- which there are, and by what name --------------------------------------------------------------------------------


def test_22_emotions_and_three_dimensions_ship_and_no_file_else() -> None:
    assert known_emotions() == NAMES and len(NAMES) == 25
    assert sorted(path.stem for path in (FOLDER / "emotions").iterdir() if path.suffix) == NAMES


def test_they_are_no_traits_that_all_would_take() -> None:
    assert len(known_traits()) == 31 and not {*known_traits()} & {*NAMES}
    assert written_out(["all"]) == known_traits() and written_out(["emotions"]) == NAMES
    assert written_out(["dread", "emotions", "polite"]) == ["dread", *(n for n in NAMES if n != "dread"), "polite"]


@pytest.mark.parametrize("name", NAMES)
def test_an_emotion_is_found_by_its_name_with_or_without_the_folder(name: str) -> None:
    found = load_pairs(name)
    assert found.trait == name and has_pairs(name)
    assert found == load_pairs(f"emotions/{name}") == load_pairs(Path("emotions") / name)
    assert found == load_pairs(FOLDER / "emotions" / f"{name}.yaml")


@pytest.mark.parametrize(
    "name", ["emotions/polite", "emotions", "emotions/", "Dread", "emotions/../polite", "contexts/x"]
)
def test_what_is_no_emotion_is_refused_and_the_emotions_are_named(name: str) -> None:
    assert not has_pairs(name)
    with pytest.raises(PairError, match=r"shipped: angry, .*emotions: annoyance, .*path of a \.yaml file"):
        load_pairs(name)


def test_a_wheel_has_them() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    globs = tools["package-data"]["traitbasis.contrastive_pairs"]
    assert {path for glob in globs for path in FOLDER.glob(glob)} >= {*(FOLDER / "emotions").glob("*.yaml")}


def test_a_command_takes_an_emotion_before_it_looks_for_the_model(tmp_path: Path) -> None:
    """The pairs are read first; what is missing then is the model."""
    for names in ("dread", "emotions/dread"):
        result = CliRunner().invoke(app, ["extract", "--trait", names, "--model", str(tmp_path / "no-model")])
        assert result.exit_code and not isinstance(result.exception, PairError)
    result = CliRunner().invoke(app, ["extract", "--trait", "dred", "--model", str(tmp_path / "no-model")])
    assert isinstance(result.exception, PairError)


def test_an_emotion_has_the_family_of_the_taxonomy() -> None:
    for family, names in FAMILIES.items():
        assert {name for name in NAMES if FILES[name]["family"] == family} == names
    assert {FILES[name]["family"] for name in DIMENSIONS} <= {"temperament", "conduct"}


def test_no_name_or_alias_means_two_emotions_or_an_emotion_and_a_trait() -> None:
    """But for one: ``anxious`` has had ``anxiety`` for an alias since before there were emotions."""
    names = [name for emotion in NAMES for name in (emotion, *FILES[emotion].get("aliases", []))]
    assert len(names) == len(set(names))
    taken = {name for trait in known_traits() for name in (trait, *load_pairs(trait).aliases)}
    assert taken & set(names) == {"anxiety"} and "anxiety" in load_pairs("anxious").aliases


# --- what is in a file ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_ready_by_the_projects_own_check(name: str) -> None:
    assert [str(finding) for finding in check_pair_file(FOLDER / "emotions" / f"{name}.yaml").findings] == []


@pytest.mark.parametrize("name", NAMES)
def test_four_pairs_of_four_domains_make_a_vector_and_eight_measure_it(name: str) -> None:
    pairs = FILES[name]["pairs"]
    assert [pair["use"] for pair in pairs] == ["default"] * 4 + ["heldout"] * 8
    assert len({pair["domain"] for pair in pairs[:4]}) == 4 and len({pair["domain"] for pair in pairs}) >= 10
    late = [any("customer" in turn for turn in pair["context"]) for pair in pairs]
    assert (sum(late[:4]), sum(late[4:])) == (2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_both_sides_keep_every_fact(name: str) -> None:
    for pair in FILES[name]["pairs"]:
        for side in SIDES:
            assert [fact for fact in pair["facts"] if plain(fact) not in plain(pair[side])] == [], (pair["id"], side)


@pytest.mark.parametrize("name", NAMES)
def test_what_has_a_number_in_it_the_customer_was_told(name: str) -> None:
    for pair in FILES[name]["pairs"]:
        told = plain(" ".join(text for turn in pair["context"] for text in turn.values()))
        numbers = [number for fact in pair["facts"] for number in re.findall(r"\d+", fact)]
        assert [number for number in numbers if number not in told] == [], pair["id"]


@pytest.mark.parametrize("name", NAMES)
def test_length_does_not_give_an_emotion_away(name: str) -> None:
    totals = dict.fromkeys(SIDES, 0)
    for pair in FILES[name]["pairs"]:
        lengths = {side: len(pair[side].split()) for side in SIDES}
        assert max(lengths.values()) <= 1.3 * min(lengths.values()), pair["id"]
        totals = {side: totals[side] + lengths[side] for side in SIDES}
    assert 0.9 < totals["positive"] / totals["negative"] < 1.1


@pytest.mark.parametrize("name", NAMES)
def test_no_word_or_mark_gives_an_emotion_away(name: str) -> None:
    """But for its own: kind words to warmth, ``!`` to excitement. Two counts, of which one is not the product's."""
    pair_set = load_pairs(name)
    assert set(pair_set.markers) == OWN.get(name, set()) and pair_set.shortcuts(GAP) == {}
    pairs = FILES[name]["pairs"]
    gaps: Counter[str] = Counter()
    for pair in pairs:
        gaps.update(signals(pair["positive"]))
        gaps.subtract(signals(pair["negative"]))
    assert {one: n for one, n in gaps.items() if abs(n) > 5 and one not in OWN.get(name, set())} == {}


def test_openings_vary() -> None:
    for side in SIDES:
        openings = Counter(" ".join(plain(pair[side]).split()[:3]) for _, pair in PAIRS)
        assert max(openings.values()) <= 6
        for name in NAMES:
            own = Counter(" ".join(plain(pair[side]).split()[:2]) for pair in FILES[name]["pairs"])
            assert max(own.values()) <= 3, (name, side, own.most_common(1))


def test_no_shipped_response_is_rejected_in_its_context() -> None:
    """People wrote these: a guard that rejects one would take the emotion for a fault."""
    for name in NAMES:
        for pair in load_pairs(name).pairs:
            turns = tuple(pair.context)
            said = [(turn.text, turns[:i]) for i, turn in enumerate(turns) if turn.speaker == "customer"]
            for text, before in [(pair.positive, turns), (pair.negative, turns), *said]:
                for guard in GUARDS:
                    assert guard.passes(text, Conversation(before)), (guard.name, name, pair.id, text)


# --- nothing twice ----------------------------------------------------------------------------------------------------


def test_no_response_is_there_twice() -> None:
    told = Counter(plain(pair[side]) for _, pair in PAIRS for side in SIDES)
    assert len(told) == 2 * len(PAIRS) == 600


def test_no_sentence_of_one_pair_is_in_another() -> None:
    owners: dict[str, set[tuple[str, str]]] = {}
    for name, pair in PAIRS:
        for sentence in sentences(pair["positive"]) | sentences(pair["negative"]):
            owners.setdefault(sentence, set()).add((name, pair["id"]))
    assert {sentence: pairs for sentence, pairs in owners.items() if len(pairs) > 1} == {}
    shipped = {
        one for t in known_traits() for p in load_pairs(t).pairs for s in SIDES for one in sentences(getattr(p, s))
    }
    assert len(shipped) > 1000 and not shipped & owners.keys()


def test_no_context_is_like_another_here_or_in_the_traits_pairs_and_contexts() -> None:
    others = [
        *(FOLDER / f"{trait}.yaml" for trait in known_traits()),
        FOLDER / "contexts/selection.yaml",
        FOLDER / "contexts/scaffold.yaml",
    ]
    entries = [entry for path in others for entry in (lambda d: d.get("pairs") or d["scenarios"])(read(path))]
    ids = [pair["id"] for _, pair in PAIRS]
    assert len(entries) > 500 and len(ids) == len(set(ids)) and not {*ids} & {entry["id"] for entry in entries}
    own = [(pair["id"], set(plain(pair["context"][0]["system"]).split())) for _, pair in PAIRS]
    told = [
        (entry["id"], set(plain(entry["context"][0]["system"]).split()))
        for entry in entries
        if "system" in entry["context"][0]
    ]
    for (one, here), (other, there) in [*combinations(own, 2), *((a, b) for a in own for b in told)]:
        assert len(here & there) < 0.5 * len(here | there), (one, other)


def test_definitions_are_told_apart_by_their_words() -> None:
    """Near relations, of one family: each says what its customer does in words that the others' definitions lack."""
    said = {name: {w for w in re.findall(r"[a-z]+", FILES[name]["definition"].lower()) if len(w) > 4} for name in NAMES}
    for one, other in (pair for names in FAMILIES.values() for pair in combinations(sorted(names), 2)):
        assert len(said[one] & said[other]) < 0.2 * min(len(said[one]), len(said[other])), (one, other)
    for name in NAMES:
        assert FILES[name]["definition"] != FILES[name]["opposite"] and "\n" not in FILES[name]["definition"].strip()
