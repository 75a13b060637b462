"""Scenario files: what ships keeps the rules, what is wrong is named, and the checks find planted faults."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from traitbasis.cli import app
from traitbasis.errors import ReactionError
from traitbasis.reactive.affect import SCENES, Anchors, State
from traitbasis.reactive.scenarios import (
    TABLE_3,
    Scenario,
    allowed_range,
    anchor_problems,
    check_scenarios,
    count_by_scene,
    find_scenario,
    read_scenarios,
    shipped_scenarios,
)


def document() -> dict[str, Any]:
    """Two scenarios that are sound, to be damaged."""
    found = yaml.safe_load(shipped_scenarios().read_text(encoding="utf-8"))["scenarios"]
    by_scene = {entry["scene"]: entry for entry in found}
    return copy.deepcopy({"scenarios": [by_scene["Defense"], by_scene["Charm"]]})


def written(tmp_path: Path, content: Any) -> Path:
    file = tmp_path / "scenarios.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content, allow_unicode=True), "utf-8")
    return file


# --- what ships -------------------------------------------------------------------------------------------------------


def test_there_are_at_least_ten_shipped_scenarios_of_each_scene_and_none_has_a_problem() -> None:
    scenarios = read_scenarios()
    counts = count_by_scene(scenarios)
    assert len(scenarios) >= 40 and all(counts[scene] >= 10 for scene in SCENES), counts
    assert check_scenarios(scenarios) == []


def test_the_shipped_scenarios_vary_in_setting_relationship_and_anchors_within_each_scene() -> None:
    for scene in SCENES:
        some = [scenario for scenario in read_scenarios() if scenario.scene == scene]
        assert len({scenario.setting for scenario in some}) >= 6, scene
        assert len({scenario.relationship for scenario in some}) >= 9, scene
        assert len({scenario.anchors.start for scenario in some}) >= 5, scene


def test_only_in_charm_the_agent_opens() -> None:
    for scenario in read_scenarios():
        speakers = [turn.speaker for turn in scenario.opening]
        roles = [message["role"] for message in scenario.prompt]
        if scenario.scene == "Charm":
            assert (speakers, roles) == (["system"], ["system"])
            assert "You open the conversation" in scenario.prompt[0]["content"]
        else:
            assert (speakers, roles) == (["system", "customer"], ["system", "user"])
            assert scenario.opening[1].text == scenario.prompt[1]["content"] == scenario.opening_line


def test_neither_side_is_told_what_only_the_other_one_knows() -> None:
    for scenario in read_scenarios():
        customer, agent = scenario.opening[0].text, scenario.prompt[0]["content"]
        profile = scenario.simulated_user_profile
        assert all(part in customer for part in (profile.role, profile.background, *profile.rules, profile.goal))
        assert all(fact in agent for fact in scenario.model_profile.known_facts)
        assert profile.background not in agent and not any(rule in agent for rule in profile.rules), scenario.id
        assert not any(fact in customer for fact in scenario.model_profile.known_facts), scenario.id


# --- the check finds what is planted ----------------------------------------------------------------------------------


def test_ranges_are_two_deviations_about_table_3_outwards_to_multiples_of_five() -> None:
    # Defense's success: a 30 ± 7 is 16 to 44, t 46 ± 7 is 32 to 60; its start's a 75 ± 14 would end at 103
    assert allowed_range("Defense", "succeed", "a") == (15, 45)
    assert allowed_range("Defense", "succeed", "t") == (30, 60)
    assert allowed_range("Defense", "start", "a") == (45, 100)
    assert allowed_range("Support", "fail", "t") == (0, 25)  # 9 ± 7


def test_the_means_of_table_3_themselves_are_in_order_and_pass_when_rounded() -> None:
    for scene, rows in TABLE_3.items():
        means = {name: State(*(5 * round(mean / 5) for mean, _ in row)) for name, row in rows.items()}
        assert anchor_problems(Anchors(means["start"], means["succeed"], means["fail"]), scene) == [], scene


@pytest.mark.parametrize(
    ("anchor", "axis", "value", "words"),
    [
        ("start", "a", 72, "multiples of 5"),
        ("succeed", "t", 44.5, "multiples of 5"),
        ("succeed", "t", 65, "from 30 to 60"),  # F.2's, see test_affect
        ("succeed", "a", 10, "from 15 to 45"),
        ("fail", "a", 80, "from 85 to 100"),
        ("succeed", "t", 20, "less than 10 from the start's 15"),
    ],
)
def test_an_anchor_that_is_off_is_named(anchor: str, axis: str, value: float, words: str) -> None:
    record = Anchors(State(70, 15), State(30, 45), State(95, 0)).record
    assert anchor_problems(Anchors.from_record(record), "Defense") == []
    record[anchor][axis] = value
    problems = anchor_problems(Anchors.from_record(record), "Defense")
    assert any(f"{anchor} {axis} is {value:g}" in problem and words in problem for problem in problems), problems


def test_a_failure_too_near_the_start_is_named() -> None:
    close = Anchors(State(83, 4), State(30, 45), State(85, 0))
    assert [problem for problem in anchor_problems(close, "Repair") if "less than 5 from" in problem] == [
        "fail a is 85, less than 5 from the start's 83",
        "fail t is 0, less than 5 from the start's 4",
    ]


def test_a_scenario_told_twice_and_a_caption_are_found() -> None:
    scenarios = read_scenarios()
    one = scenarios[0]
    reworded = one.simulated_user_profile.model_copy(update={"role": "Noreen, 61, who drives a tram"})
    again = one.model_copy(update={"id": "support-again", "simulated_user_profile": reworded})
    (problem,) = check_scenarios([*scenarios, again])
    assert problem.startswith("support-again: ") and one.id in problem
    short = one.simulated_user_profile.model_copy(update={"background": "Bad news.", "rules": ("Be sad.",)})
    (problem,) = check_scenarios([one.model_copy(update={"simulated_user_profile": short})])
    assert "simulated_user_profile" in problem and "words" in problem


# --- files that cannot be read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "scenarios:"),
        ("scenarios: []", "scenarios:"),
        ("- id: a", "scenarios:"),
        ("scenarios: {}", "scenarios:"),
        ("scenarios: [", "YAML"),
        ("scenarios:\n  - id: a\n    id: b", "already"),
        ("scenarios: [5]", "number 1"),
    ],
)
def test_a_file_that_holds_no_scenarios_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(ReactionError, match=words) as caught:
        read_scenarios(file)
    assert str(file) in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ReactionError, match="cannot read scenarios"):
            read_scenarios(path)


@pytest.mark.parametrize(
    ("entry", "path", "value", "words"),
    [
        (0, "scene", "Sales", "'scene'"),
        (0, "id", "Has Blanks", "number 1"),
        (0, "opening_line", None, "the user opens"),
        (1, "opening_line", "Hello?", "in Charm the agent opens"),
        (0, "simulated_user_profile.goal", " ", "simulated_user_profile.goal"),
        (0, "simulated_user_profile.rules", [], "simulated_user_profile.rules"),
        (0, "model_profile.known_facts", "a text", "known_facts"),
        (0, "model_profile.secret", "x", "model_profile.secret"),
        (0, "anchors.start.a", 30, "anchors on a must be succeed < start < fail"),
        (0, "anchors.fail.t", 50, "anchors on t must be fail < start < succeed"),
        (0, "anchors.succeed.t", float("nan"), "anchor 'succeed'"),
        (0, "anchors.succeed.a", "thirty", "anchor 'succeed'"),
        (0, "anchors.fail", None, "anchor 'fail'"),
        (0, "sensitivity", 0, "'sensitivity'"),
        (0, "sensitivity", float("nan"), "'sensitivity'"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, entry: int, path: str, value: Any, words: str) -> None:
    damaged = document()
    *folders, name = path.split(".")
    place = damaged["scenarios"][entry]
    if path == "anchors.start.a":
        value = place["anchors"]["succeed"]["a"]
    for folder in folders:
        place = place[folder]
    place[name] = value
    with pytest.raises(ReactionError) as caught:
        read_scenarios(written(tmp_path, damaged))
    assert words in str(caught.value)


def test_two_scenarios_with_one_id_are_refused(tmp_path: Path) -> None:
    twice = document()
    twice["scenarios"][1]["id"] = twice["scenarios"][0]["id"]
    with pytest.raises(ReactionError, match="two scenarios have the id"):
        read_scenarios(written(tmp_path, twice))


def test_a_scenario_is_found_by_its_id_and_an_unknown_one_is_told_with_those_there_are() -> None:
    scenarios = read_scenarios()
    found = find_scenario(scenarios, "charm-carpool")
    assert isinstance(found, Scenario) and found.scene == "Charm"
    with pytest.raises(ReactionError, match=r"charm-carpol.*known: .*charm-carpool"):
        find_scenario(scenarios, "charm-carpol")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_lists_shows_and_checks() -> None:
    run = CliRunner().invoke
    listed = run(app, ["scenarios", "list", "--scene", "Repair"])
    assert listed.exit_code == 0 and "repair-deleted-week" in listed.output and "charm-" not in listed.output
    shown = run(app, ["scenarios", "show", "repair-deleted-week"])
    assert shown.exit_code == 0 and "41 of them" in shown.output and "38 of 41" in shown.output
    checked = run(app, ["scenarios", "check"])
    assert checked.exit_code == 0 and "0 problems" in checked.output


def test_the_check_fails_on_a_file_with_problems_and_names_them(tmp_path: Path) -> None:
    damaged = document()
    damaged["scenarios"][0]["anchors"]["start"]["a"] = 73
    checked = CliRunner().invoke(app, ["scenarios", "check", str(written(tmp_path, damaged))])
    assert checked.exit_code == 1 and "start a is 73" in checked.output and "1 problems" in checked.output
