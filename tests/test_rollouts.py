"""Rollouts of state-tracked users: on disk, scored by scene, and as what a GRPO trainer reads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from traitbasis.chat import Turn
from traitbasis.cli import app
from traitbasis.errors import ReactionError
from traitbasis.reactive.affect import Anchors, State
from traitbasis.reactive.appraisal import Appraisal
from traitbasis.reactive.rollouts import (
    Exchange,
    Rollout,
    RolloutFile,
    export_training,
    group_advantages,
    groups,
    read_rollouts,
    rollout_of,
    scene_scores,
    training_lines,
)
from traitbasis.reactive.scenarios import find_scenario, read_scenarios

ANCHORS = Anchors(State(75, 15), State(30, 45), State(95, 0))
PROMPT = ({"role": "system", "content": "Front desk."}, {"role": "user", "content": "I'm cancelling."})


def made(number: int, states: Sequence[tuple[float, float]], scenario: str = "defense-x", **more: Any) -> Rollout:
    exchanges = tuple(Exchange(f"a{i}", f"c{i}", State(*state), "why") for i, state in enumerate(states, 1))
    return Rollout(scenario, "Defense", number, ANCHORS, PROMPT, exchanges, **more)


# r_out: f(a) = 9/45, f(t) = 24/30, so 0.5; r_proc (10 + 12)/200 and (−1 + 12)/200
GOOD = made(0, [(65, 27), (66, 39)])
# r_out: f(a) = −5/20, f(t) = −3/15, so −0.225; r_proc (−5 − 3)/200
BAD = made(1, [(80, 12)])


def test_a_rollouts_rewards_by_hand() -> None:
    assert GOOD.outcome() == pytest.approx(0.5) and GOOD.process == pytest.approx([0.11, 0.055])
    assert BAD.outcome() == pytest.approx(-0.225) and BAD.process == pytest.approx([-0.04])


def test_the_groups_advantages_by_hand() -> None:
    # mean 0.1375, σ 0.3625: A_trace is ±1. Centred: 15 · (0.11 − 0.0825) = 0.4125; a single turn has nothing to share.
    assert group_advantages([GOOD, BAD])[0] == pytest.approx([1.4125, 0.5875])
    assert group_advantages([GOOD, BAD])[1] == pytest.approx([-1])
    assert group_advantages([GOOD, BAD], credit="direct")[0] == pytest.approx([1 + 1.65, 1 + 0.825])
    assert group_advantages([GOOD, BAD], credit="direct")[1] == pytest.approx([-1 - 0.6])
    assert group_advantages([GOOD, BAD], credit="none") == [pytest.approx([1, 1]), pytest.approx([-1])]
    # the sample's deviation of two values is √2 times the group's
    assert group_advantages([GOOD, BAD], credit="none", ddof=1)[1] == pytest.approx([-(0.5**0.5)])


def test_a_line_a_turn_holds_all_that_was_said_before_it_and_the_one_reply() -> None:
    lines = list(training_lines([BAD, GOOD]))
    assert [(line["uid"], line["rollout"], line["turn"]) for line in lines] == [
        ("defense-x", 0, 1), ("defense-x", 0, 2), ("defense-x", 1, 1),
    ]  # fmt: skip
    second = lines[1]
    assert second["prompt"] == [
        *PROMPT, {"role": "assistant", "content": "a1"}, {"role": "user", "content": "c1"},
    ]  # fmt: skip
    assert second["completion"] == [{"role": "assistant", "content": "a2"}]
    assert second["advantage"] == pytest.approx(0.5875) and second["r_proc"] == pytest.approx(0.055)
    assert second["r_out"] == pytest.approx(0.5)


def test_a_line_a_rollout_holds_the_whole_dialogue_and_an_advantage_for_each_of_the_agents_turns() -> None:
    first, second = training_lines([GOOD, BAD], "rollout")
    assert first["prompt"] == list(PROMPT)
    assert [message["content"] for message in first["completion"]] == ["a1", "c1", "a2"]
    assert [message["role"] for message in first["completion"]] == ["assistant", "user", "assistant"]
    assert first["advantages"] == pytest.approx([1.4125, 0.5875])
    assert len(second["advantages"]) == len(second["r_proc"]) == 1


def test_the_customers_private_reasons_are_in_no_training_line() -> None:
    assert "why" in json.dumps(GOOD.record)
    for per in ("turn", "rollout"):
        assert "why" not in json.dumps(list(training_lines([GOOD, BAD], per)))  # type: ignore[arg-type]


def test_trl_takes_the_lines_for_conversational_prompts_and_completions() -> None:
    trl_data = pytest.importorskip("trl.data_utils")
    for per in ("turn", "rollout"):
        for line in training_lines([GOOD, BAD], per):  # type: ignore[arg-type]
            assert trl_data.is_conversational({"prompt": line["prompt"], "completion": line["completion"]})


def test_groups_with_different_anchors_are_refused() -> None:
    other = Rollout(
        "defense-x", "Defense", 2, Anchors(State(70, 15), State(30, 45), State(95, 0)), PROMPT, GOOD.exchanges
    )
    with pytest.raises(ReactionError, match="different anchors"):
        groups([GOOD, other])


@pytest.mark.parametrize("arguments", [{"per": "token"}, {"credit": "eq7"}, {"floor": 0}, {"weight": 2}])
def test_an_unknown_choice_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ReactionError):
        list(training_lines([GOOD, BAD], **arguments))


def test_scores_by_scene_are_means_over_rollouts_times_a_hundred() -> None:
    other = made(0, [(30, 45)], "defense-y")
    scores = scene_scores([GOOD, BAD, other])
    assert list(scores) == ["Defense", "all"]
    assert scores["Defense"].value == pytest.approx((50 - 22.5 + 100) / 3)
    assert scores["Defense"].low < scores["Defense"].value < scores["Defense"].high


# --- from a dialogue --------------------------------------------------------------------------------------------------


def test_a_rollout_is_made_from_speaker_turns_and_their_appraisals() -> None:
    scenario = find_scenario(read_scenarios(), "defense-gym-contract")
    turns = [
        *scenario.opening,
        Turn("agent", "That is a long way to come."),
        Turn("agent", "What changed?"),
        Turn("customer", "I moved."),
        Turn("agent", "Then let's move the contract, too."),
    ]
    rollout = rollout_of(scenario, 3, turns, [Appraisal({"warmth": 1}), Appraisal({"progress": 0.5})])
    # Defense: warmth (−6, 5), progress (−8, 7), from (70, 20)
    assert rollout.states == [State(70, 20), State(64, 25), State(60, 28.5)]
    assert [exchange.customer for exchange in rollout.exchanges] == ["I moved.", ""]
    assert rollout.exchanges[0].agent == "That is a long way to come.\n\nWhat changed?"
    assert rollout.messages[-1] == {"role": "assistant", "content": "Then let's move the contract, too."}
    assert rollout.prompt == tuple(scenario.prompt) and rollout.ended == "turns"
    without_opening = rollout_of(scenario, 3, turns[2:], [Appraisal({"warmth": 1}), Appraisal({"progress": 0.5})])
    assert without_opening == rollout


def test_in_charm_the_agents_first_turn_counts_although_it_answers_nobody() -> None:
    scenario = find_scenario(read_scenarios(), "charm-carpool")
    turns = [*scenario.opening, Turn("agent", "Morning! We stop once, at a big station."), Turn("customer", "Good.")]
    rollout = rollout_of(scenario, 0, turns, [Appraisal({"progress": 1})])
    assert len(rollout.exchanges) == 1 and rollout.outcome() > 0
    for appraisals in ([], [Appraisal(), Appraisal()]):
        with pytest.raises(ReactionError, match="one for each"):
            rollout_of(scenario, 0, turns, appraisals)
    with pytest.raises(ReactionError, match="0 agent turns"):
        rollout_of(scenario, 0, scenario.opening, [])


def test_by_the_rules_alone_an_agent_with_an_offer_is_worth_more_than_one_with_a_refrain() -> None:
    scenario = find_scenario(read_scenarios(), "defense-gym-contract")
    replies = ["I'm not using it.", "I want out, I'm furious.", "I'll write a review.", "My lawyer will call you."]
    refrain = ["Sorry, contracts run for twelve months. We can't cancel before that."] * 4
    offers = [
        "I understand, that is frustrating. What has changed since January?",
        "I'm sorry, I see why you are furious. I can move your contract to any of our nine branches today.",
        "I understand. I have looked it up: the branch on Mill Street opens at six. Shall I move it?",
        "Done, your contract is moved to Mill Street. Thank you for your patience.",
    ]
    rollouts = []
    for number, agent in enumerate((refrain, offers)):
        said = [
            Turn(speaker, text)  # type: ignore[arg-type]
            for pair in zip(agent, replies, strict=True)
            for speaker, text in zip(("agent", "customer"), pair, strict=True)
        ]
        rollouts.append(rollout_of(scenario, number, [*scenario.opening, *said]))
    base, trained = rollouts
    assert base.outcome() < -0.5 and trained.outcome() > 0.3
    assert all("rigid refrain" in exchange.reason for exchange in base.exchanges[2:])


# --- on disk ----------------------------------------------------------------------------------------------------------


def test_a_file_goes_on_after_a_kill_and_refuses_other_settings(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.jsonl"
    RolloutFile(path, {"agent": "m"}).append(GOOD)
    with path.open("a") as file:
        file.write('{"scenario": "cut o')
    again = RolloutFile(path, {"agent": "m"})
    assert again.rollouts == [GOOD] and again.keys == {("defense-x", 0)}
    again.append(BAD)
    assert read_rollouts([path]) == [GOOD, BAD]
    with pytest.raises(ReactionError, match="already"):
        again.append(BAD)
    with pytest.raises(ReactionError, match=r"other settings \(agent\)"):
        RolloutFile(path, {"agent": "another"})


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "no whole line"),
        ("{}\n", "line 1"),
        ('{"format": "traitbasis.rollouts/9"}\n', "line 1: its format"),
        ("no json\n", "line 1"),
        ('{"format": "traitbasis.rollouts/1"}\n', "there is no rollout"),
        ('{"format": "traitbasis.rollouts/1"}\nnull\n', "line 2: a rollout must be an object"),
    ],
)
def test_a_file_without_rollouts_is_named(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "rollouts.jsonl"
    path.write_text(content)
    with pytest.raises(ReactionError, match=words) as caught:
        read_rollouts([path])
    assert str(path) in str(caught.value)
    with pytest.raises(ReactionError, match="no rollouts at"):
        read_rollouts([tmp_path / "missing.jsonl"])


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("scene", "Sales", "scene is 'Sales'"),
        ("number", "0", "number is '0'"),
        ("ended", "bored", "ended is 'bored'"),
        ("exchanges", [], "exchanges are empty"),
        ("exchanges", {}, "exchanges must be a list"),
        ("exchanges.0.state.a", 120, "a is 120"),
        ("exchanges.0.state.t", float("nan"), "t is nan"),
        ("exchanges.0.agent", None, "'agent' is None"),
        ("exchanges.0.customer", "", "the customer says nothing"),
        ("exchanges.0.mood", 1, "has 'mood'"),
        ("anchors.start.a", 20, "anchors on a"),
        ("prompt.0.content", 3, "'content' is 3"),
        ("prompt.0", "hello", "a message must be an object"),
        ("extra", 1, "has 'extra'"),
    ],
)
def test_a_damaged_rollout_is_named(path: str, value: Any, words: str) -> None:
    record: Any = json.loads(json.dumps(GOOD.record))
    assert Rollout.from_record(record) == GOOD
    *folders, name = path.split(".")
    place = record
    for folder in folders:
        place = place[int(folder)] if isinstance(place, list) else place[folder]
    place[int(name) if isinstance(place, list) else name] = value
    with pytest.raises(ReactionError, match=words):
        Rollout.from_record(record)


@pytest.mark.parametrize("field", ["scenario", "scene", "number", "anchors", "prompt", "exchanges"])
def test_a_missing_field_is_named(field: str) -> None:
    with pytest.raises(ReactionError, match=f"no '{field}'"):
        Rollout.from_record({name: value for name, value in GOOD.record.items() if name != field})


def test_a_rollout_that_is_in_two_files_or_twice_in_one_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path in paths:
        RolloutFile(path, {}).append(GOOD)
    with pytest.raises(ReactionError, match="both hold rollout 0"):
        read_rollouts(paths)
    paths[0].write_text(paths[0].read_text() + json.dumps(GOOD.record) + "\n")
    with pytest.raises(ReactionError, match="second time"):
        read_rollouts(paths[:1])


def test_an_export_is_whole_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    assert export_training(path, training_lines([GOOD, BAD])) == 3
    assert [json.loads(line) for line in path.read_text().splitlines()] == list(training_lines([GOOD, BAD]))


def test_the_command_scores_and_exports(tmp_path: Path) -> None:
    source, target, scores = tmp_path / "rollouts.jsonl", tmp_path / "train.jsonl", tmp_path / "scores.json"
    file = RolloutFile(source, {})
    for rollout in (GOOD, BAD, made(0, [(30, 45)], "defense-y", ended="succeeded")):
        file.append(rollout)
    run = CliRunner().invoke
    scored = run(app, ["scenarios", "score", str(source), "--out", str(scores)])
    assert scored.exit_code == 0 and "Defense" in scored.output
    record = json.loads(scores.read_text())["scores"]["all"]
    assert (record["value"], record["scenarios"], record["rollouts"]) == (42.5, 2, 3)
    assert record["ended"] == {"turns": 2, "succeeded": 1}
    exported = run(app, ["scenarios", "export", str(source), "--out", str(target), "--credit", "none", "--sample-std"])
    assert exported.exit_code == 0 and "1 groups have one rollout only" in exported.output
    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["advantage"] for line in lines] == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5), 0])
