"""The 594 conditions: what they are called, what they say, and whether the check of what they say can fail."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.errors import ReactionError
from traitbasis.reactive.conditions import (
    ANCHORS,
    DIMENSIONS,
    EMOTIONS,
    FAMILIES,
    VOICES,
    Condition,
    Parts,
    all_conditions,
    check_conditions,
    contradictions,
    data_file,
    read_parts,
)

# Typed from the paper (tau-Emotion-Bench, A.1), not from the code.
PAPER = """
Anger annoyance frustration argumentativeness bitterness exasperation
Fear anxiety nervousness dread desperation
Disgust dislike aversion distaste repugnance
Sadness disappointment discouragement helplessness hopelessness sorrow
Enjoyment relief pride peace excitement
"""


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["emotions", *map(str, arguments)], env={"COLUMNS": "160"})


def changed(old: str, new: str) -> Parts:
    """The shipped sentences with one replaced."""
    text = data_file("conditions.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    return Parts.model_validate(yaml.safe_load(text.replace(old, new)))


# --- what there is ----------------------------------------------------------------------------------------------------


def test_the_taxonomy_is_the_papers() -> None:
    lines = [line.split() for line in PAPER.strip().splitlines()]
    assert {family.lower(): tuple(emotions) for family, *emotions in lines} == FAMILIES


def test_there_are_594_conditions_and_each_name_reads_back() -> None:
    conditions = all_conditions()
    assert len(conditions) == len({condition.name for condition in conditions}) == 22 * 27 == 594
    assert all(Condition.parse(condition.name) == condition for condition in conditions)
    assert all(Condition.from_record(condition.record) == condition for condition in conditions)


def test_a_name_may_be_short_and_in_any_order() -> None:
    assert Condition.parse("dread") == Condition("dread", "neutral", "moderate", "cautious")
    assert Condition.parse(" Frustration, skeptical/cold ") == Condition("frustration", "cold", "moderate", "skeptical")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no emotion"]),
        ("frustratoin.cold", ["'frustratoin'", "did you mean frustration?"]),
        ("dread.chilly", ["level 'chilly'", "skeptical"]),
        ("dread.cold.warm", ["two levels of politeness: cold, warm"]),
        ("cold.dread", ["emotion", "'cold'"]),
    ],
)
def test_a_name_that_cannot_be_read_says_what_is_wrong(text: str, words: list[str]) -> None:
    with pytest.raises(ReactionError) as error:
        Condition.parse(text)
    assert all(word in str(error.value) for word in words), error.value


def test_labels_of_a_published_task_are_a_condition() -> None:
    labels = {
        "emotion_family": "Fear",
        "emotion_leaf": "anxiety",
        "dimension_politeness": "warm",
        "dimension_urgency": "high",
        "dimension_trust_in_agent": "skeptical",
        "user_id": "anna_1",
    }
    assert Condition.from_record(labels).name == "anxiety.warm.high.skeptical"


@pytest.mark.parametrize(
    ("record", "word"),
    [
        (None, "not an object"),
        ({"politeness": "warm"}, "no 'emotion'"),
        ({"emotion": "dread", "trust": 0.5}, "unknown trust 0.5"),
        ({"emotion": ["dread"]}, "unknown emotion"),
        ({"emotion": "dread", "family": "anger"}, "belongs to fear"),
    ],
)
def test_a_damaged_record_names_its_field(record: object, word: str) -> None:
    with pytest.raises(ReactionError, match=re.escape(word)):
        Condition.from_record(record)


def test_traits_are_the_emotion_and_the_poles_and_the_middle_adds_nothing() -> None:
    assert Condition.parse("pride").traits() == {"pride": 1.0}
    assert Condition.parse("dread.cold.high.trusting").traits() == {
        "dread": 1.0,
        "politeness_warm": -1.0,
        "urgency_high": 1.0,
        "trust_trusting": 1.0,
    }
    assert Condition.parse("sorrow.warm.low.skeptical").traits(emotion=0.5, dimensions=0.25) == {
        "sorrow": 0.5,
        "politeness_warm": 0.25,
        "urgency_high": -0.25,
        "trust_trusting": -0.25,
    }


# --- what they say ----------------------------------------------------------------------------------------------------


def test_every_anchor_is_a_sentence_of_each_label_and_no_two_conditions_share_one() -> None:
    document = yaml.safe_load(data_file("conditions.yaml").read_text(encoding="utf-8"))
    seen: set[str] = set()
    for condition in all_conditions():
        own = document["emotions"][condition.emotion]
        lists = [own["feels"], own["shows"]]
        lists += [document["dimensions"][of][getattr(condition, of)]["says"] for of in DIMENSIONS]
        anchors = condition.anchors()
        assert len(set(anchors)) == ANCHORS == 10
        for anchor in anchors:
            used = [[text for text in texts if text in anchor] for texts in lists]
            assert [len(one) for one in used] == [1] * 5, anchor
            assert sum(len(one[0]) for one in used) + 4 == len(anchor), anchor
        assert seen.isdisjoint(anchors)
        seen.update(anchors)
    assert len(seen) == 5940


def test_instructions_are_drawn_by_seed_from_the_anchors_and_stay_the_same() -> None:
    condition = Condition.parse("relief.cold.low.skeptical")
    drawn = [condition.instruction(seed) for seed in range(60)]
    assert set(drawn) == set(condition.anchors())
    assert drawn == [condition.instruction(seed) for seed in range(60)]


def test_two_voices_of_a_condition_share_no_sentence() -> None:
    for condition in all_conditions()[::17]:
        voices = [set(re.findall(r"[^.]+\.", condition.voice(number))) for number in range(VOICES)]
        assert all(a.isdisjoint(b) for a, b in combinations(voices, 2))


# --- the check --------------------------------------------------------------------------------------------------------


def test_the_shipped_conditions_pass_the_check() -> None:
    assert check_conditions() == []


def test_the_published_contradiction_is_found() -> None:
    """Retail test task 0 of the published data: labelled warm (docs/harness-contract.md, 1.2)."""
    text = "Speak neutrally and avoid unnecessary politeness."
    found = contradictions(text, Condition.parse("annoyance.warm"))
    assert len(found) == 2 and "speaks for neutral" in found[0] + found[1] and "denies warm" in found[0] + found[1]
    assert contradictions(text, Condition.parse("annoyance.neutral")) == []


@pytest.mark.parametrize(
    ("text", "condition", "contradicts"),
    [
        ("Be rude.", "dread.warm", True),
        ("Never be rude.", "dread.warm", False),
        ("Be neither friendly nor rude.", "dread.neutral", False),
        ("Do not bother with thanks.", "dread.cold", False),
        ("Do not bother with thanks.", "dread.warm", True),
        ("There is no rush.", "dread.low", False),
        ("There is no rush.", "dread.high", True),
        ("This is urgent.", "dread.moderate", True),
        ("You don't trust the agent.", "dread.skeptical", False),
        ("You don't trust the agent.", "dread.trusting", True),
        ("You are proud of it.", "dread", True),
        ("You are not anxious about it; you dread it.", "dread", False),
        ("Without a doubt, you dread it.", "dread.trusting", False),
        ("You are not rude, and you are in a hurry.", "dread.cold.high", True),
    ],
)
def test_words_speak_for_a_label_or_deny_it(text: str, condition: str, contradicts: bool) -> None:
    assert bool(contradictions(text, Condition.parse(condition))) is contradicts


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("Be warm and friendly to the agent, whatever your mood.", "Avoid politeness.", "warm: politeness is warm"),
        ("Answer curtly, without a greeting and without any thanks.", "Thank the agent.", "speaks for warm"),
        (
            "A petty hitch has spoiled your mood a little.",
            "You are in a hurry.",
            "annoyance: the sentence is used with",
        ),
        ("You distrust promises here, so ask for evidence in writing.", "You trust promises.", "speaks for trusting"),
        (
            "Your thoughts keep running ahead to bad outcomes that have not happened.",
            "You are proud.",
            "speaks for pride",
        ),
        ("The thought of the outcome fills you with dread.", "You are without dread.", "denies dread"),
        ("It is urgent, and you need a solution right away.", "It is urgent, and you dread it.", "every emotion"),
        (
            "No deadline is tied to this request.",
            "You have plenty of time for this, and any date will do.",
            "same sentence",
        ),
        ("Beg for an exception.", "beg for {something}", "no clean sentence"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str, word: str) -> None:
    assert any(word in problem for problem in check_conditions(changed(f"- {old}\n", f"- '{new}'\n")))


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("  sorrow:\n", "  sorow:\n", "emotions"),
        ("    high:\n", "    hi:\n", "urgency"),
        ("      - Beg for an exception.\n", "", "emotions.desperation.shows"),
        ("    cues: [dread*]\n", "    cues: []\n", "emotions.dread.cues"),
        ("    cues: [dread*]\n", "    clues: [dread*]\n", "emotions.dread"),
        ("      - Beg for an exception.\n", "      - [Beg]\n", "emotions.desperation.shows.4"),
        ("dimensions:\n", "emotions:\n", "'emotions' is there already"),
        ("emotions:\n", "emotions: [\n", "not valid YAML"),
    ],
)
def test_a_damaged_file_names_the_place(old: str, new: str, word: str, tmp_path: Path) -> None:
    text = data_file("conditions.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    file = tmp_path / "own.yaml"
    file.write_text(text.replace(old, new), encoding="utf-8")
    with pytest.raises(ReactionError) as error:
        read_parts(file)
    assert "own.yaml" in str(error.value) and word in str(error.value), error.value


@pytest.mark.parametrize("content", ["", "7", "[]", "\x00"])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ReactionError, match=r"own\.yaml"):
        read_parts(file)
    with pytest.raises(ReactionError, match="cannot read"):
        read_parts(tmp_path / "none.yaml")


# --- commands ---------------------------------------------------------------------------------------------------------


def test_list_names_all_or_those_of_a_word(tmp_path: Path) -> None:
    assert set(run("list", "--names").output.split()) == {condition.name for condition in all_conditions()}
    some = run("list", "--names", "--only", "sadness.cold").output.split()
    assert len(some) == 5 * 9 and all(".cold." in name for name in some)
    assert all(emotion in run("list").output for emotion in EMOTIONS)
    assert run("list", "--only", "sadnes").exit_code == 1 or "unknown" in str(run("list", "--only", "sadnes").exception)


def test_show_prints_instructions_and_traits() -> None:
    shown = run("show", "dread.cold.high")
    assert shown.exit_code == 0
    flat = " ".join(shown.output.split())
    assert all(anchor in flat for anchor in Condition.parse("dread.cold.high").anchors())
    assert "dread-1+politeness_warm--1+urgency_high-1" in flat
    one = run("show", "dread", "--seed", "3")
    assert one.output.strip() == Condition.parse("dread").instruction(3)


def test_check_fails_on_a_contradiction_and_passes_the_shipped_file(tmp_path: Path) -> None:
    assert run("check").exit_code == 0
    file = tmp_path / "own.yaml"
    text = data_file("conditions.yaml").read_text(encoding="utf-8")
    file.write_text(text.replace("Be warm and friendly to the agent, whatever your mood.", "Avoid politeness."))
    result = run("check", "--file", file)
    assert result.exit_code == 1 and "denies warm" in result.output
    label = run("check", "annoyance.warm", "Speak neutrally and avoid unnecessary politeness.")
    assert label.exit_code == 1 and "speaks for neutral" in label.output


@pytest.mark.parametrize("command", ["list", "show", "check", "map"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    output = run(command, "--help").output
    assert "Example" in output and f"traitbasis emotions {command}" in output
