"""`traitbasis report`: what results files say of an agent, on runs made by hand."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
from pages import Document
from playwright.sync_api import sync_playwright
from runs import AGENT, USER, episode, episodes, header, write, write_solved

from traitbasis import cli
from traitbasis.drop_tables import drops_grid, markdown, record, success_grid, summary
from traitbasis.drops import (
    Robustness,
    average_at_k,
    breaches,
    holm,
    leaderboard,
    measure,
    over_units,
    pass_at_k,
    pass_hat_k,
    sign_flip,
    unmeasured,
)
from traitbasis.errors import HarnessError
from traitbasis.metrics import estimate
from traitbasis.outcomes import Message, Run, by_agent, read_run
from traitbasis.robustness import beside, shown, shown_messages, write_page

HIGH = "impatience-high"
ORACLE = {"kind": "oracle"}
Solved = dict[str, dict[str, list[int]]]
# a loses 2/3, b nothing, c gains 1/3; d and e have one side.
WORKED: Solved = {
    "unsteered": {"a": [1, 1, 1], "b": [1, 1], "c": [0, 0, 0], "d": [1]},
    HIGH: {"a": [1, 0, 0], "b": [1], "c": [0, 1, 0], "e": [0]},
}


def made(solved: Solved, **more: Any) -> Run:
    trials = max(len(trials) for by_task in solved.values() for trials in by_task.values())
    return Run(header(list(solved), trials, **more), tuple(episodes(solved)), Path("made.jsonl"))


def measured(*runs: Run, floor: Run | None = None, ks: tuple[int, ...] = ()) -> Robustness:
    agents, oracle = by_agent(runs, [floor] if floor else [])
    (agent,) = agents
    return measure(agent, oracle, ks)


def alike(unsteered: list[int], steered: list[int], tasks: int = 12) -> Solved:
    """The same trials in every task."""
    names = [f"{i:02}" for i in range(tasks)]
    return {"unsteered": dict.fromkeys(names, unsteered), HIGH: dict.fromkeys(names, steered)}


def told(found: Robustness, *words: str) -> bool:
    return any(all(word in warning for word in words) for warning in found.warnings)


# ---- Statistics


@pytest.mark.parametrize("n", range(1, 7))
def test_the_figures_by_k_are_what_all_subsets_of_k_trials_say(n: int) -> None:
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([1] * c + [0] * (n - c), k))
        assert pass_hat_k(n, c, k) == pytest.approx(mean(all(subset) for subset in subsets))
        assert pass_at_k(n, c, k) == pytest.approx(mean(any(subset) for subset in subsets))
        assert average_at_k(n, c, k) == pytest.approx(mean(mean(subset) for subset in subsets))
    assert all(math.isnan(figure(n, n, n + 1)) for figure in (pass_hat_k, pass_at_k, average_at_k))


def test_intervals_are_those_of_the_bootstrap_over_tasks() -> None:
    values = [0.0, 1.0, 1 / 3, 2 / 3, 1.0]
    theirs = estimate.over_tasks(estimate.mean, {f"task {i}": [value] for i, value in enumerate(values)})
    ours = over_units(values)
    assert (ours.value, ours.low, ours.high) == pytest.approx((theirs.value, theirs.low, theirs.high))


def test_intervals_of_drops_hold_what_they_say() -> None:
    """Twenty tasks of three trials, whose chances differ; nominal 95 %."""
    draw = np.random.default_rng(5)

    def chances(tasks: int) -> tuple[Any, Any]:
        plain = draw.beta(2, 1.5, tasks)
        return plain, np.clip(plain - draw.beta(1, 4, tasks), 0, 1)

    truth = float(np.subtract(*chances(1_000_000)).mean())
    held = []
    for _ in range(400):
        plain, steered = chances(20)
        found = over_units(draw.binomial(3, plain) / 3 - draw.binomial(3, steered) / 3)
        held.append(found.low <= truth <= found.high)
    assert 0.90 <= mean(held) <= 0.99


@pytest.mark.parametrize("differences", [[1.0], [0.5, 0.5, -0.25], [1 / 3, 0, 2 / 3, -1 / 3, 1 / 3, 1.0]])
def test_the_sign_flips_are_all_sign_flips(differences: list[float]) -> None:
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in
            itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    assert sign_flip(differences) == pytest.approx(mean(total >= abs(sum(differences)) - 1e-9 for total in sums))


def test_with_one_trial_a_task_the_p_is_the_sign_tests() -> None:
    """Exact and drawn: of 12 and of 30 tasks that differ, 9 and 21 got worse."""
    for worse, differing, slack in ((9, 12, 1e-9), (21, 30, 0.006)):
        tail = sum(math.comb(differing, i) for i in range(worse, differing + 1)) / 2**differing
        differences = [1.0] * worse + [-1.0] * (differing - worse) + [0.0] * 5
        assert sign_flip(differences) == pytest.approx(2 * tail, abs=slack)
    assert sign_flip([0.0, 0.0]) == 1 and math.isnan(sign_flip([]))


def test_a_trait_that_does_nothing_is_seldom_significant() -> None:
    draw = np.random.default_rng(2)
    chances = draw.beta(2, 1.5, (300, 12))
    found = [sign_flip(draw.binomial(3, p) / 3 - draw.binomial(3, p) / 3) for p in chances]
    assert mean(p <= 0.05 for p in found) <= 0.08


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    some = holm([math.nan, 0.02])
    assert math.isnan(some[0]) and some[1] == pytest.approx(0.02)


# ---- Drops


def test_a_drop_is_the_mean_of_the_tasks_own_differences() -> None:
    (drop,) = measured(made(WORKED)).drops
    assert drop.drop.value == pytest.approx((2 / 3 + 0 - 1 / 3) / 3)
    assert drop.unsteered.value == pytest.approx((1 + 1 + 0) / 3) and drop.steered.value == pytest.approx(5 / 9)
    assert drop.relative.value == pytest.approx((1 / 3) / 2)
    assert (drop.tasks, drop.left_out, drop.worse, drop.better) == (3, 2, 1, 1)
    assert drop.drop.low < drop.drop.value < drop.drop.high


def test_each_task_has_its_own_number_of_trials() -> None:
    found = measured(made(WORKED), ks=(1, 2, 3))
    unsteered = found.conditions[0]
    assert {k: (each.estimate.value, each.tasks) for k, each in unsteered.pass_hat.items()} == {
        1: (pytest.approx(3 / 4), 4), 2: (pytest.approx(2 / 3), 3), 3: (0.5, 2)
    }  # fmt: skip
    assert unsteered.average[2].estimate.value == pytest.approx(2 / 3)
    assert told(found, "pass^k leaves out", "k = 3, unsteered: 2 of 4")
    assert "0.50 [0.00, 1.00] / 2" in success_grid(found).rows[0]
    assert not measured(made(WORKED), ks=(9,)).conditions[0].pass_hat[9].tasks


def test_the_floor_is_taken_off_task_by_task() -> None:
    """The agent loses 2/3, 0 and -1/3; the oracle 1, 0, and nobody knows of c."""
    oracle = made({"unsteered": {"a": [1], "b": [1]}, HIGH: {"a": [0], "b": [1]}}, agent=ORACLE)
    found = measured(made(WORKED), floor=oracle)
    floor = found.drops[0].floor
    assert floor is not None and (floor.tasks, floor.left_out) == (2, 1)
    assert (floor.unsteered.value, floor.steered.value, floor.drop.value) == (1.0, 0.5, 0.5)
    assert floor.beyond.value == pytest.approx(((2 / 3 - 1) + (0 - 0)) / 2)
    assert told(found, "not tried on", f"{HIGH} (1)") and not told(found, "there is no noise floor")


def test_a_missing_floor_is_said_and_no_figure_stands_for_it() -> None:
    found = measured(made(WORKED))
    assert told(found, "there is no noise floor") and "unknown: no oracle was run" in summary(found)
    assert "No noise floor" in drops_grid(found).caption and "oracle" not in " ".join(drops_grid(found).columns)
    other = made({"unsteered": {"a": [1]}, "confusion-low": {"a": [1]}}, agent=ORACLE)
    assert told(measured(made(WORKED), floor=other), "was not tried under", HIGH)


def test_one_task_has_a_drop_and_no_interval() -> None:
    found = measured(made(alike([1, 1], [1, 0], tasks=1)))
    (drop,) = found.drops
    assert drop.drop.value == 0.5 and math.isnan(drop.drop.low) and told(found, "1 task:")
    assert str(drop.drop) == "0.50" and breaches([found], 0.4) and not breaches([found], 0.4, confident=True)


def test_all_success_is_no_drop() -> None:
    found = measured(made(alike([1, 1], [1, 1])))
    (drop,) = found.drops
    assert (drop.drop.value, drop.relative.value, drop.p, drop.worse) == (0, 0, 1, 0)
    assert "loses nothing" in summary(found) and not told(found, "too narrow")


def test_nothing_to_lose_is_no_relative_drop() -> None:
    (drop,) = measured(made(alike([0], [0]))).drops
    assert drop.drop.value == 0 and math.isnan(drop.relative.value)


def test_infrastructure_says_nothing_of_the_agent() -> None:
    run = made(alike([1, 1], [1, 1], tasks=10))
    broken = tuple(
        replaced(e, infrastructure=True, success=False, reward=0) if e.traits and e.task < "03" else e
        for e in run.episodes
    )
    found = measured(replace(run, episodes=broken))
    steered = found.conditions[1]
    assert (steered.infrastructure, steered.episodes, steered.tasks, steered.success.value) == (6, 14, 7, 1.0)
    assert found.drops[0].left_out == 3 and found.drops[0].drop.value == 0
    assert told(found, "6 episodes failed", f"{HIGH} 6", "conditions differ")


def test_missing_cells_are_counted_against_what_was_planned() -> None:
    solved = alike([1, 1], [1, 0], tasks=3)
    run = made(solved)
    found = measured(replace(run, episodes=run.episodes[:-1]))
    assert [outcome.missing for outcome in found.conditions] == [0, 1] and told(found, "missing", f"{HIGH} 1")
    planned = made(solved, tasks={"retail": ["00", "01", "02", "03"]})
    assert [outcome.missing for outcome in measured(planned).conditions] == [2, 2]


def test_effort_is_by_episode_and_by_success() -> None:
    found = measured(made(alike([1, 1], [1, 0])))
    plain, steered = (outcome.effort for outcome in found.conditions)
    assert (plain.agent_tokens, plain.agent_tokens_per_success, steered.agent_tokens_per_success) == (1000, 1000, 2000)
    assert steered.agent_cost == pytest.approx(0.01) and steered.agent_cost_per_success == pytest.approx(0.02)
    run = made(alike([1], [0]))
    unknown = measured(replace(run, episodes=tuple(replaced(e, cost={"agent": None}) for e in run.episodes)))
    efforts = [outcome.effort for outcome in unknown.conditions]
    assert all(math.isnan(effort.agent_cost) for effort in efforts) and math.isnan(efforts[1].agent_tokens_per_success)


def test_domains_are_shown_apart_and_together() -> None:
    retail, air = made(alike([1], [0], tasks=2)), made(alike([1], [1], tasks=2), domains=("airline",))
    air = replace(air, episodes=tuple(replaced(e, domain="airline") for e in air.episodes))
    found = measured(retail, air)
    assert {drop.domain: drop.drop.value for drop in found.drops} == {None: 0.5, "airline": 0.0, "retail": 1.0}
    assert [row[1] for row in drops_grid(found).rows] == ["all", "airline", "retail"]


def test_a_leaderboard_compares_agents_on_what_all_of_them_have() -> None:
    """The second has a task and a condition of its own, on which it would look better."""
    one = made(alike([1, 1], [1, 0], tasks=2), agent={**AGENT, "model": "one"})
    two = alike([1, 1], [0, 0], tasks=4) | {"confusion-low": {"00": [1, 1]}}
    two[HIGH]["03"] = [1, 1]
    agents, _ = by_agent([made(two, agent={**AGENT, "model": "two"}), one])
    standings = leaderboard([measure(agent) for agent in agents])
    assert [(s.agent, s.drop.value, s.tasks) for s in standings] == [("one", 0.5, 2), ("two", 1.0, 2)]
    assert standings[0].conditions == (HIGH,)


# ---- What may be compared


def replaced(found: Any, **fields: Any) -> Any:
    return type(found).model_validate(found.model_dump() | fields)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"user": {**USER, "model_fingerprint": "other"}}, "user.model_fingerprint"),
        ({"user": {**USER, "basis": "other"}}, "user.basis"),
        ({"user": {"url": "http://user/v1"}}, "user.model"),
        ({"harness": "tau2"}, "harness"),
        ({"harness_version": "9"}, "harness_version"),
        ({"max_steps": 9}, "max_steps"),
        ({"split": "dev"}, "split"),
        ({"conditions": {"unsteered": {}, HIGH: {"impatience": "low"}}}, HIGH),
    ],
)
def test_runs_that_differ_in_more_than_agent_and_traits_are_refused(more: dict[str, Any], field: str) -> None:
    other = replace(made(WORKED, **({"agent": ORACLE} | more)), path=Path("other.jsonl"))
    with pytest.raises(HarnessError, match=f"cannot be compared.*{re.escape(field)}"):
        by_agent([made(WORKED)], [other])
    with pytest.raises(HarnessError, match=re.escape(field)):
        by_agent([made(WORKED), replace(other, header=replaced(other.header, agent=AGENT))])


def test_a_user_that_changed_within_a_run_is_refused() -> None:
    run = made(WORKED)
    first, *others = run.episodes
    changed = [replaced(first, made_by={"basis": "one"}), *(replaced(e, made_by={"basis": "two"}) for e in others)]
    with pytest.raises(HarnessError, match=r"the user changed: its replies' basis is 'one' in .*'two'"):
        by_agent([replace(run, episodes=tuple(changed))])


def test_a_baseline_that_was_steered_is_refused_and_a_trait_that_was_not_is_said() -> None:
    run = made(WORKED)
    steered = tuple(replaced(e, made_by={"traits": {"impatience": 1.0}}) for e in run.episodes)
    with pytest.raises(HarnessError, match="the baseline was steered"):
        by_agent([replace(run, episodes=steered)])
    nobody = replace(run, episodes=tuple(replaced(e, made_by={"traits": {}}) for e in run.episodes))
    assert told(measured(nobody), "not steered", "8 episodes")


def test_the_floor_is_the_oracles_and_nobody_elses() -> None:
    agent, oracle = made(WORKED), made(WORKED, agent=ORACLE)
    with pytest.raises(HarnessError, match=r"no noise floor: its agent.kind is 'llm'"):
        by_agent([agent], [agent])
    with pytest.raises(HarnessError, match="give it with --floor"):
        by_agent([agent, oracle])
    with pytest.raises(HarnessError, match="several oracles"):
        by_agent([agent], [oracle, made(WORKED, agent={**ORACLE, "patience": 3})])
    assert by_agent([oracle])[0][0].name == "oracle"


def test_an_impatient_oracle_is_an_agent_beside_others_where_the_floor_is_a_patient_one() -> None:
    """As in experiments/drop_table.py with a model for an agent."""
    brittle, patient = (made(WORKED, agent={**ORACLE, "patience": patience}) for patience in (1, 3))
    agents, oracle = by_agent([brittle, made(WORKED)], [patient])
    assert len(agents) == 2 and oracle is not None
    with pytest.raises(HarnessError, match="give it with --floor"):
        by_agent([patient, made(WORKED)], [patient])


def test_runs_of_one_agent_are_put_together_and_others_stand_beside() -> None:
    plain, steered = made({"unsteered": WORKED["unsteered"]}), made({HIGH: WORKED[HIGH]})
    steered = replace(steered, header=replaced(steered.header, agent={**AGENT, "url": "http://elsewhere"}))
    found = measured(plain, steered)
    assert found.drops[0].tasks == 3 and told(found, "several addresses")
    warm = made(WORKED, agent={**AGENT, "temperature": 1.0})
    assert [agent.name for agent in by_agent([made(WORKED), warm])[0]] == [
        "gpt-test (temperature 0.0)",
        "gpt-test (temperature 1.0)",
    ]


def test_without_a_baseline_there_is_no_drop() -> None:
    steered = made({HIGH: WORKED[HIGH]}, agent={**AGENT, "model": "b"})
    with pytest.raises(HarnessError, match=r"b has no episode with the unsteered user.*condition 'unsteered'"):
        by_agent([steered])
    with pytest.raises(HarnessError, match="those of gpt-test are another agent's"):
        by_agent([made({"unsteered": WORKED["unsteered"]}), steered])


# ---- Files


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = write_solved(tmp_path / "run.jsonl", WORKED)
    run = read_run(path)
    assert list(run.episodes) == episodes(WORKED) and not run.notes and run.header.trials == 3


def test_a_line_that_a_kill_cut_off_is_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(list(WORKED), 3), episodes(WORKED), tail='{"kind": "episode", "dom')
    run = read_run(path)
    assert len(run.episodes) == len(episodes(WORKED)) and "cut off" in run.notes[0]
    assert told(measured(run), "cut off")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ("not json\n", r"line 1 \(the header\) is damaged"),
        ('{"format": "traitbasis.dialogues/1"}\n', "traitbasis.run/1"),
        ("{header}\n{broken\n{episode}\n", "line 2 is damaged"),
        ('{header}\n{"kind": "episode", "domain": "retail"}\n', "line 2 .*task: Field required"),
        ("{header}\n{nan}\n", "line 2 .*reward: Input should be a finite number"),
        ("{header}\n{header}\n", "line 2"),
        ("{endless}\n", "trials: Input should be less than or equal to 10000"),
        ("{header}\n{stranger}\n", "line 2: the condition 'confusion-low' .*none of that name"),
        ("{steered}\n{episode}\n", "the condition 'unsteered' is the baseline and has traits"),
    ],
)
def test_what_is_no_run_is_refused_with_its_line(tmp_path: Path, content: str, message: str) -> None:
    head = header(list(WORKED), 3)
    parts = {
        "{header}": head.model_dump_json(),
        "{episode}": episode("unsteered", "a").model_dump_json(),
        "{nan}": episode("unsteered", "a").model_dump_json().replace('"reward":1.0', '"reward":NaN'),
        "{endless}": head.model_dump_json().replace('"trials":3', f'"trials":{10**30}'),
        "{stranger}": episode("confusion-low", "a").model_dump_json(),
        "{steered}": replaced(head, conditions={"unsteered": {"impatience": "low"}}).model_dump_json(),
    }
    path = tmp_path / "run.jsonl"
    for name, text in parts.items():
        content = content.replace(name, text)
    path.write_text(content, "utf-8")
    with pytest.raises(HarnessError, match=message):
        read_run(path)
    with pytest.raises(HarnessError, match="no results at"):
        read_run(tmp_path / "nowhere.jsonl")


def test_a_cell_with_two_outcomes_is_refused_and_a_second_try_is_not(tmp_path: Path) -> None:
    """Whichever of two outcomes counted would be a choice; infrastructure is none."""
    head = header(["unsteered"], 1)
    lost = episode("unsteered", "a", success=0, infrastructure=True)
    for found in ([lost, episode("unsteered", "a")], [episode("unsteered", "a"), lost], [lost, lost]):
        run = read_run(write(tmp_path / "run.jsonl", head, found))
        assert [e.infrastructure for e in run.episodes] == [found == [lost, lost]]
    twice = write(tmp_path / "run.jsonl", head, [episode("unsteered", "a"), episode("unsteered", "a", success=0)])
    with pytest.raises(HarnessError, match=r"task a under unsteered, trial 0 has two outcomes \(.*line 2 and .*line 3"):
        read_run(twice)
    once = Run(head, (episode("unsteered", "a"),), Path("one.jsonl"))
    with pytest.raises(HarnessError, match=r"two outcomes \(one.jsonl and two.jsonl\)"):
        by_agent([once, replace(once, path=Path("two.jsonl"))])


def test_a_run_without_an_episode_that_counts_says_nothing(tmp_path: Path) -> None:
    head = header(list(WORKED), 3)
    with pytest.raises(HarnessError, match="there is none"):
        by_agent([read_run(write(tmp_path / "run.jsonl", head, []))])
    lost = episode("unsteered", "a", infrastructure=True)
    with pytest.raises(HarnessError, match="1 failed by infrastructure"):
        by_agent([Run(head, (lost,))])


def test_half_a_surrogate_pair_can_be_read(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(["unsteered"], 1), [episode("unsteered", "a")])
    path.write_text(path.read_text("utf-8").replace("How can", "\\ud83d can"), "utf-8")
    assert read_run(path).episodes[0].messages[0].text == "? can I help?"


# ---- The command


@pytest.fixture
def report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command as a shell does; its exit status and what it said."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["traitbasis", "report", *map(str, arguments)])
        try:
            cli.main()
            status: Any = 0
        except SystemExit as ended:
            status = ended.code or 0
        said = capsys.readouterr()
        return status, " ".join((said.out + said.err).split())

    return run


def test_the_gate_tells_too_fragile_from_could_not_measure(report: Callable[..., tuple[int, str]]) -> None:
    """Contract of the exit status: 0, 1 (not measured), 2 (usage), 3 (too fragile)."""
    run = write_solved(Path("run.jsonl"), alike([1, 1], [1, 0]))
    assert report(run)[0] == report(run, "--max-drop", "0.5")[0] == 0
    status, said = report(run, "--max-drop", "0.4")
    assert status == 3 and f"gpt-test loses 0.50 of success under {HIGH}, more than the 0.4 allowed" in said
    status, said = report("nowhere.jsonl", "--max-drop", "0.4")
    assert status == 1 and "error: no results at nowhere.jsonl" in said
    apart: Solved = {"unsteered": {"a": [1], "c": [1]}, HIGH: {"b": [1]}}
    status, said = report(write_solved(Path("apart.jsonl"), apart), "--max-drop", "0.4")
    assert status == 1 and f"under {HIGH} cannot be held against --max-drop" in said
    alone = write_solved(Path("alone.jsonl"), {"unsteered": {"a": [1]}})
    assert report(alone)[0] == 0
    status, said = report(alone, "--max-drop", "0.4")
    assert status == 1 and "there is no drop to judge" in said


def test_the_gate_is_not_green_on_nothing(report: Callable[..., tuple[int, str]]) -> None:
    """An agent that solves nothing loses nothing, and a run that broke off or failed has tasks that nobody saw."""
    hopeless = write_solved(Path("hopeless.jsonl"), alike([0, 0], [0, 0]))
    status, said = report(hopeless, "--max-drop", "1")
    assert status == 1 and "nothing was solved with the unsteered user" in said
    assert report(hopeless)[0] == 0
    tasks = {"retail": tuple(f"{i:02}" for i in range(20))}
    for done, wanted in ((17, 1), (18, 0)):
        solved = alike([1], [1], tasks=done)
        stopped = write_solved(Path("stopped.jsonl"), solved, tasks=tasks)
        status, said = report(stopped, "--max-drop", "0.1")
        assert status == wanted and ("only 17 of 20 planned tasks have both sides" in said) is bool(wanted)
        failed = [episode(HIGH, task, infrastructure=True, success=0) for task in tasks["retail"][done:]]
        played = [episode("unsteered", task) for task in tasks["retail"][done:]]
        broken = write(
            Path("broken.jsonl"), header(list(solved), 1, tasks=tasks), [*episodes(solved), *failed, *played]
        )
        assert report(broken, "--max-drop", "0.1")[0] == wanted
    fragile = write_solved(Path("fragile.jsonl"), alike([1], [0], tasks=2), tasks=tasks)
    assert report(fragile, "--max-drop", "0.1")[0] == 3, "a drop that is seen is one, whatever is still to do"


def test_a_confident_gate_wants_the_whole_interval(report: Callable[..., tuple[int, str]]) -> None:
    solved = alike([1], [1], tasks=20)
    for task in ("00", "01", "02", "03"):
        solved[HIGH][task] = [0]
    run = write_solved(Path("run.jsonl"), solved)
    (drop,) = measured(read_run(run)).drops
    assert drop.drop.low < 0.1 < drop.drop.value == pytest.approx(0.2)
    assert report(run, "--max-drop", "0.1")[0] == 3
    assert report(run, "--max-drop", "0.1", "--confident")[0] == 0
    status, said = report(run, "--max-drop", "0.01", "--confident")
    assert status == 3 and "with its whole 95 % interval" in said
    one = write_solved(Path("one.jsonl"), alike([1], [0], tasks=1))
    status, said = report(one, "--max-drop", "0.1", "--confident")
    assert status == 1 and "fewer than two tasks" in said and unmeasured([measured(read_run(one))], confident=True)


def test_a_drop_of_just_what_is_allowed_is_allowed(report: Callable[..., tuple[int, str]]) -> None:
    """0.8 - 0.7 is more than 0.1 in floating point."""
    solved = alike([1] * 8 + [0] * 2, [1] * 7 + [0] * 3)
    assert measured(made(solved)).drops[0].drop.value > 0.1
    assert report(write_solved(Path("run.jsonl"), solved), "--max-drop", "0.1")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-drop", "nan"],
        ["--max-drop", "10"],
        ["--confident"],
        ["--k", "0"],
        ["--k", "one"],
        ["--transcripts", "-1"],
    ],
)
def test_bad_usage_is_its_own_status(report: Callable[..., tuple[int, str]], arguments: list[str]) -> None:
    assert report(write_solved(Path("run.jsonl"), WORKED), *arguments)[0] == 2


def test_the_command_prints_tables_and_writes_every_figure(report: Callable[..., tuple[int, str]]) -> None:
    """JSON has no nan, whatever a header or an undefined figure holds (contract 11: headers and versions)."""
    agent = AGENT | {"price": math.nan}
    run = write_solved(Path("run.jsonl"), alike([0], [0], tasks=1), agent=agent)
    Path("run.jsonl").write_text(run.read_text().replace('"price":null', '"price":NaN'))
    two = write_solved(Path("two.jsonl"), WORKED, agent={**AGENT, "model": "[bold]two[/bold]"})
    oracle = write_solved(Path("oracle.jsonl"), WORKED, agent=ORACLE)
    status, said = report(run, two, "--floor", oracle, "--json", "out/all.json", "--k", "1,2")
    assert status == 0 and "Agents by average drop" in said and "[bold]two[/bold]" in said and "note:" in said

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    found = json.loads(Path("out/all.json").read_text("utf-8"), parse_constant=refuse)
    assert [each["agent"] for each in found["agents"]] == ["gpt-test", "[bold]two[/bold]"]
    assert found["agents"][0]["drops"][0]["relative"]["value"] is None
    assert found["agents"][1]["drops"][0]["drop"]["value"] == pytest.approx(1 / 9, abs=1e-4)
    assert found["runs"][2]["header"]["agent"] == ORACLE and found["versions"]["traitbasis"]
    assert record([measured(made(WORKED))])["oracle"] is None


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_no_report_is_written_over_a_run(report: Callable[..., tuple[int, str]], option: str) -> None:
    """Neither over one that is read, nor over another, whose path stands there by mistake."""
    one = write_solved(Path("one.jsonl"), WORKED)
    two = write_solved(Path("two.jsonl"), WORKED)
    kept = two.read_bytes()
    for read in (one, two):
        status, said = report(read, option, two)
        assert status == 2 and "two.jsonl would be written over" in said and two.read_bytes() == kept


def test_markdown_cannot_be_broken_by_a_name(report: Callable[..., tuple[int, str]]) -> None:
    status, said = report(write_solved(Path("run.jsonl"), WORKED), "--markdown")
    assert status == 0 and f"| {HIGH} | 0.67" in said and "┃" not in said
    grid = replace(drops_grid(measured(made(WORKED))), rows=(("a|b\n<script>",),))
    assert markdown(grid).splitlines()[4] == r"| a\|b &lt;script> |"


# ---- The page

HOSTILE = (
    "</div></details></article><script>document.title = 'taken'</script>",
    "<img src=x onerror=\"document.title = 'taken'\">",
    "{{ 7 * 7 }} {% raw %}",
    "right to left \u202eevil\u202c and \x00 and \x1b[31m",
    "x" * 200_000,
    "\u0301" * 5000,
)


def hostile_run() -> Run:
    messages = (
        *({"speaker": "customer", "text": text} for text in HOSTILE),
        {
            "speaker": "agent",
            "text": "",
            "calls": [{"name": HOSTILE[0], "arguments": {"<b>": HOSTILE[1], "x": "y" * 9999}}],
        },
        {"speaker": "tool", "text": HOSTILE[0]},
        *({"speaker": "agent", "text": f"message {i}"} for i in range(500)),
    )
    name = "<script>alert(1)</script>$\\frac$-high"
    solved: Solved = {"unsteered": {"<i>a": [1], "b": [1]}, name: {"<i>a": [0], "b": [1]}}
    run = made(solved, agent={**AGENT, "model": "<u>model</u>"})
    return replace(run, episodes=tuple(replaced(e, messages=messages, error=HOSTILE[0]) for e in run.episodes))


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "hostile.html", [measured(hostile_run())])


def test_a_hostile_dialogue_stays_text(hostile_page: Path) -> None:
    html = hostile_page.read_text("utf-8")
    document = Document(html)
    assert len(document.inline["script"]) == 1 and "taken" not in document.inline["script"][0]
    assert not [tag for tag, *_ in document.attributes if tag in ("img", "i", "u", "b", "iframe", "link")]
    assert not [name for _, name, _ in document.attributes if name.startswith("on") or name == "src"]
    assert "&lt;script&gt;document.title" in html and "{{ 7 * 7 }}" in html
    assert "⟨U+202E⟩evil⟨U+202C⟩" in html and "\u202e" not in html and "\x00" not in html and "\x1b" not in html


def test_a_page_has_a_bounded_size_and_says_what_is_cut(hostile_page: Path) -> None:
    html = hostile_page.read_text("utf-8")
    assert len(html) < 500_000 and "(198,500 more characters)" in html and "448 messages are left out here" in html
    assert "message 0<" in html and "message 499<" in html and "message 200<" not in html
    (call,) = shown_messages([Message(speaker="agent", calls=[{"name": "f", "arguments": "z" * 2000}])])[0].calls
    assert call[1].endswith("(1,000 more characters)") and shown("ab\u200dc\n") == "ab\u200dc\n"


def test_the_page_says_what_was_found_and_what_made_it(tmp_path: Path) -> None:
    """Contract 11, and every figure has words for those who do not see it."""
    two = {**alike([1], [0]), "confusion-low": alike([1], [1])[HIGH]}
    runs = [made(two), made(two, agent={**AGENT, "model": "two"})]
    agents, oracle = by_agent(runs, [made(two, agent=ORACLE)])
    page = write_page(tmp_path / "page.html", [measure(agent, oracle, (1, 2)) for agent in agents], transcripts=3)
    html = page.read_text("utf-8")
    assert html.count("<svg") == 6 == html.count('role="img"') == html.count("<desc")
    assert "impatience-high: drop 1.00, oracle" in html and 'id="leaderboard"' in html
    assert html.count("<article") == 6 and "calls cancel" in html
    assert USER["basis"] in html and "tau-trait" in html and "oracle" in html and "matplotlib" in html
    attributes = Document(html).attributes
    assert not [value for _, name, value in attributes if name in ("href", "src") and value[:1] != "#"]
    (policy,) = [value for _, name, value in attributes if value.startswith("default-src")]
    assert "default-src 'none'" in policy and "script-src 'sha256-" in policy and "'unsafe-inline'; script" in policy


def test_dialogues_shown_are_the_biggest_drops_and_one_that_shows_it() -> None:
    solved: Solved = {
        "unsteered": {"a": [0, 1, 1], "b": [1, 1, 1], "c": [1, 1, 1]},
        HIGH: {"a": [0, 1, 0], "b": [0, 0, 0], "c": [0, 0, 0]},
        "confusion-low": {"a": [1, 1, 1], "b": [0, 0, 0], "c": [1, 1, 1]},
    }
    pairs = beside([measured(made(solved))], 9)
    assert [(pair.condition, pair.task[1]) for pair in pairs[:4]] == [
        (HIGH, "b"), ("confusion-low", "b"), (HIGH, "c"), (HIGH, "a")
    ]  # fmt: skip
    assert (pairs[3].unsteered.trial, pairs[3].steered.trial) == (2, 2)
    assert pairs[3].unsteered.success and not pairs[3].steered.success
    assert [pair.drop for pair in pairs] == sorted((pair.drop for pair in pairs), reverse=True) and len(pairs) == 6
    assert not beside([measured(made(solved))], 0)


def test_the_page_works_in_a_browser_and_asks_for_nothing(hostile_page: Path) -> None:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium is installed; Debian's package chromium is what CI uses")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        page = browser.new_page(viewport={"width": 400, "height": 800})
        problems, urls = list[str](), list[str]()
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: urls.append(request.url))
        page.goto(hostile_page.as_uri())
        assert page.title().startswith("Robustness: <u>model") and problems == [] and urls == [hostile_page.as_uri()]
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        rows = page.locator("#agent-0-tasks tbody tr th")
        assert rows.all_inner_texts() == ["<i>a", "b"]
        page.get_by_role("button", name="largest drop").click()
        page.get_by_role("button", name="largest drop").click()
        assert rows.all_inner_texts() == ["b", "<i>a"] and page.title() != "taken"
        browser.close()
