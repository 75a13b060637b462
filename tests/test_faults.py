"""What went wrong in failed episodes, on conversations made and worked by hand.

The task: return the lamp of order #W1 and cancel order #W2, and tell the refund, 42.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import runs
from pages import Document
from runs import episode, header
from talks import HOSTILE, Oracle, oracle_at
from typer.testing import CliRunner

from traitbasis.chat import Turn
from traitbasis.cli import app
from traitbasis.errors import HarnessError, JudgeError
from traitbasis.fault_judge import FaultJudge, read_policies, read_review
from traitbasis.fault_rules import calls_of, data_right, diagnose_by_rules, references, talk_of
from traitbasis.fault_tables import categories_grid, endings_grid, types_grid
from traitbasis.fault_types import CATEGORIES, JUDGED, RULED, TYPES, Diagnosis, Fault, category_of
from traitbasis.faults import diagnose, faults_of_review, measure_faults, type_of_tag
from traitbasis.metrics.estimate import over_tasks
from traitbasis.outcomes import UNSTEERED, Agent, Episode, Run
from traitbasis.reactive.appraisal import Appraisal, appraise_all

RETURN = {"name": "return_items", "arguments": {"order": "#W1", "items": ["lamp"]}}
CANCEL = {"name": "cancel_order", "arguments": {"order": "#W2", "reason": "no longer needed"}}
LOOK = {"name": "get_order", "arguments": {"order": "#W1"}}
REFERENCE = [LOOK, RETURN, CANCEL]
WRONG_DATA = {"r_actions": 0.0, "gt_data_hash": "x"}
RIGHT_DATA = {"r_actions": 1.0, "gt_data_hash": "x"}


def calls(name: str, result: str | None = "{}", **arguments: Any) -> list[dict[str, Any]]:
    """The agent calls a tool, and what the tool says."""
    said = [{"speaker": "agent", "calls": [{"name": name, "arguments": arguments}]}]
    return said + ([] if result is None else [{"speaker": "tool", "text": result}])


def does(action: dict[str, Any], result: str = "{}") -> list[dict[str, Any]]:
    return calls(action["name"], result, **action["arguments"])


def agent(text: str) -> list[dict[str, Any]]:
    return [{"speaker": "agent", "text": text}]


def customer(text: str) -> list[dict[str, Any]]:
    return [{"speaker": "customer", "text": text}]


WISH = customer("Return the lamp of #W1 and cancel #W2. How much do I get back?")
END = [*agent("You get 42 back. Is there anything else?"), *customer("###STOP###")]


def failed(*parts: list[dict[str, Any]], condition: str = UNSTEERED, task: str = "0", **more: Any) -> Episode:
    """An episode that was not solved; what it is made of, one after the other."""
    messages = [message for part in parts for message in part]
    more = {"reference": REFERENCE, "reward_info": WRONG_DATA, "messages": messages, **more}
    return episode(condition, task, success=0, **more)


def calm(turns: Sequence[Turn]) -> list[Appraisal]:
    """Nothing that an agent says does anything to this customer."""
    return [Appraisal() for _, two in itertools.pairwise(turns) if two.speaker == "agent"]


def rules(found: Episode, *appraisals: Appraisal) -> Diagnosis:
    known = references([found]).get((found.domain, found.task))
    return diagnose_by_rules(found, known, (lambda turns: list(appraisals)) if appraisals else calm)


def faults(found: Episode) -> list[tuple[str, str, str, int]]:
    """Type, source, severity and turn of each."""
    return [(fault.type, fault.source, fault.severity, fault.turn) for fault in rules(found).faults]


# ---- The taxonomy


def test_the_taxonomy_is_table_11s() -> None:
    sizes = {category: len(types) for category, types in CATEGORIES.items()}
    assert list(sizes.values()) == [4, 2, 2, 3, 4]
    assert [type_ for types in CATEGORIES.values() for type_ in types] == list(TYPES)
    assert {*RULED} | {*JUDGED} == {*TYPES} and not {*RULED} & {*JUDGED}
    with pytest.raises(HarnessError, match=r"'Rudeness'; known: Missed Action"):
        category_of("Rudeness")


# ---- Actions


def test_an_episode_that_does_what_the_task_requires_has_no_fault_of_action() -> None:
    assert faults(failed(WISH, does(LOOK), does(RETURN), does(CANCEL), END)) == []


def test_what_is_required_and_not_done_is_missed_and_stopping_then_is_the_agents_when_it_took_leave() -> None:
    found = failed(WISH, does(LOOK), does(RETURN), END)  # messages: 0 wish, 1-2 look, 3-4 return, 5 leave, 6 stop
    assert faults(found) == [("Early Stop", "agent", "critical", 5), ("Missed Action", "agent", "critical", 6)]
    assert [fault.reason for fault in rules(found).faults][1] == "cancel_order is not done"


def test_a_customer_who_stops_while_the_agent_is_at_work_is_at_fault_and_the_agent_is_not() -> None:
    found = failed(WISH, does(RETURN), agent("Why do you want to cancel #W2?"), customer("###STOP###"))
    assert faults(found) == [
        ("Early Stop", "user", "critical", 4),
        ("Missed Action", "agent", "minor", 4),  # the order is not looked up
        ("Missed Action", "agent", "minor", 4),  # and #W2 is not cancelled, which the customer did not wait for
    ]
    assert not rules(found).critical


def test_what_was_left_undone_and_did_not_matter_is_minor() -> None:
    wanted = [{"name": "transfer_to_human_agents", "arguments": {}}]
    found = failed(WISH, END, reference=wanted, reward_info=RIGHT_DATA)
    assert faults(found) == [("Early Stop", "agent", "minor", 1), ("Missed Action", "agent", "minor", 2)]


def test_running_out_of_steps_is_no_early_stop() -> None:
    assert {name for name, *_ in faults(failed(WISH, does(LOOK), ended="max_steps"))} == {"Missed Action"}


def test_what_the_task_wants_told_and_is_not_is_missed() -> None:
    told = {"r_outputs": 0.0, "outputs": {"42": False, "#W1": True}}
    found = failed(WISH, does(LOOK), does(RETURN), does(CANCEL), agent("Done."), reward_info=told, ended="agent")
    assert [fault.reason for fault in rules(found).faults] == ["the customer is never told '42'"]


def test_the_right_tool_with_other_values_is_wrong_arguments_and_says_which() -> None:
    wrong = calls("return_items", order="#W1", items=["bulb"])
    found = failed(WISH, does(LOOK), wrong, does(CANCEL), END)
    assert faults(found) == [("Wrong Arguments", "agent", "critical", 3)]  # and nothing is missed or left undone
    assert rules(found).faults[0].reason == 'return_items: items is ["bulb"], not ["lamp"]'


def test_of_two_calls_that_may_have_meant_a_reference_the_nearer_one_did() -> None:
    near, far = calls("return_items", order="#W1", items=["bulb"]), calls("return_items", order="#W9", items=["bulb"])
    found = failed(WISH, does(LOOK), near, far, does(CANCEL), END)
    assert faults(found) == [("Wrong Arguments", "agent", "critical", 3), ("Extra Action", "agent", "critical", 5)]


def test_an_action_that_failed_and_was_done_again_is_done_once() -> None:
    found = failed(WISH, does(LOOK), does(RETURN, "Error: busy"), does(RETURN), does(CANCEL), END)
    assert faults(found) == [("Wrong Arguments", "agent", "minor", 3)]


def test_a_wrong_value_that_was_put_right_is_minor() -> None:
    refused = calls("cancel_order", "Error: invalid reason", order="#W2", reason="changed my mind")
    found = failed(WISH, does(LOOK), does(RETURN), refused, does(CANCEL), END)
    assert faults(found) == [("Wrong Arguments", "agent", "minor", 5)]


def test_what_is_changed_without_need_is_extra_and_what_is_only_read_is_not() -> None:
    more = [*calls("get_user", user="u1"), *calls("modify_address", user="u1", city="Ulm")]
    assert faults(failed(WISH, does(LOOK), more, does(RETURN), does(CANCEL), END)) == [
        ("Extra Action", "agent", "critical", 5)
    ]


def test_what_changed_nothing_in_the_end_is_minor() -> None:
    more = calls("modify_address", user="u1", city="Ulm")
    found = failed(WISH, does(LOOK), more, does(RETURN), does(CANCEL), END, reward_info=RIGHT_DATA)
    assert faults(found) == [("Extra Action", "agent", "minor", 3)]


def test_the_same_again_is_repeated_but_not_what_is_read_after_a_change() -> None:
    found = failed(WISH, does(LOOK), does(LOOK), does(RETURN), does(LOOK), does(RETURN), does(CANCEL), END)
    assert faults(found) == [("Repeated Action", "agent", "minor", 3), ("Repeated Action", "agent", "critical", 9)]


def test_a_task_that_requires_the_same_twice_is_done_by_doing_it_twice() -> None:
    found = failed(WISH, does(RETURN), does(RETURN), END, reference=[RETURN, RETURN])
    assert faults(found) == []


@pytest.mark.parametrize("info, severity", [(WRONG_DATA, "critical"), (RIGHT_DATA, "minor"), (None, "minor")])
def test_another_order_is_critical_only_where_it_alone_explains_wrong_data(info: Any, severity: str) -> None:
    found = failed(WISH, does(LOOK), does(CANCEL), does(RETURN), END, reward_info=info)
    assert [(name, how) for name, _, how, _ in faults(found)] == [("Wrong Order", severity)]


def test_another_order_is_minor_where_something_else_explains_the_wrong_data() -> None:
    more = calls("modify_address", user="u1", city="Ulm")
    found = failed(WISH, does(LOOK), does(CANCEL), does(RETURN), more, END)
    assert {(name, how) for name, _, how, _ in faults(found)} == {
        ("Wrong Order", "minor"),
        ("Extra Action", "critical"),
    }


def test_of_many_actions_the_fewest_are_out_of_order() -> None:
    steps = [{"name": f"step_{i}", "arguments": {}} for i in range(6)]
    order = [3, 0, 1, 2, 5, 4]  # 0 1 2 and one of 4, 5 are in order: two are not
    found = failed(WISH, *(does(steps[i]) for i in order), END, reference=steps)
    assert len(rules(found).faults) == 2
    assert rules(found).faults[0].reason.startswith("step_3(")


def test_handing_over_without_cause_is_a_wrong_transfer_and_not_doing_it_with_cause_is_missed() -> None:
    over = calls("transfer_to_human_agents", "Transfer successful", summary="They want a lot.")
    assert ("Wrong Transfer", "agent", "critical", 1) in faults(failed(WISH, over, ended="agent"))
    wanted = [{"name": "transfer_to_human_agents", "arguments": {"summary": "Other words."}}]
    assert faults(failed(WISH, over, ended="agent", reference=wanted)) == []
    assert [name for name, *_ in faults(failed(WISH, END, reference=wanted))] == ["Early Stop", "Missed Action"]


@pytest.mark.parametrize(
    "result",
    [
        "Unknown action return_thing",
        "Error: ReturnItems.invoke() got an unexpected keyword argument 'order_id'",
        "Error: ReturnItems.invoke() missing 1 required positional argument: 'items'",
        "Error: Tool 'return_thing' not found.",
    ],
)
def test_a_call_that_no_tool_can_take_is_a_schema_error(result: str) -> None:
    broken = calls("return_thing", result, order_id="#W1")
    assert ("Schema Error", "agent", "critical", 1) in faults(failed(WISH, broken, does(LOOK), END))


def test_a_schema_error_is_minor_when_the_tool_is_called_rightly_later() -> None:
    broken = calls("return_items", "Error: missing 1 required positional argument: 'items'", order="#W1")
    found = failed(WISH, does(LOOK), broken, does(RETURN), does(CANCEL), END)
    assert faults(found) == [("Schema Error", "agent", "minor", 3)]


def test_a_call_that_broke_the_harness_is_a_schema_error_though_it_is_not_kept() -> None:
    found = failed(WISH, ended="error", error="JSONDecodeError: Expecting value: line 1 column 1", reference=None)
    assert faults(found) == [("Schema Error", "agent", "critical", 0)]
    assert faults(failed(WISH, ended="error", error="KeyError: 'x'", reference=None)) == []


def test_arguments_that_are_no_object_are_a_schema_error() -> None:
    broken = [{"speaker": "agent", "calls": [{"name": "return_items", "arguments": "{order: #W1"}]}]
    assert ("Schema Error", "agent", "critical", 1) in faults(failed(WISH, broken, END))


def test_only_the_arguments_that_the_benchmark_compares_count() -> None:
    wanted = [{**CANCEL, "compare_args": ["order"]}]
    other = calls("cancel_order", order="#W2", reason="mistake")
    assert faults(failed(WISH, other, END, reference=wanted)) == []
    assert faults(failed(WISH, other, END, reference=[CANCEL])) != []


def test_a_react_agents_calls_and_words_are_read_from_its_text() -> None:
    act = agent(f"Thought:\nI return it.\nAction:\n{json.dumps(RETURN)}")
    tell = agent('Thought:\nTell.\nAction:\n{"name": "respond", "arguments": {"content": "It is done."}}')
    found = failed(WISH, act, [{"speaker": "tool", "text": "API output: {}"}], tell, reference=[RETURN])
    (call,) = calls_of(found.messages)
    assert (call.name, call.arguments, call.result) == ("return_items", RETURN["arguments"], "API output: {}")
    turns, places = talk_of(found.messages)
    assert [turn.text for turn in turns[1:]] == ["It is done."] and places == [3]


def test_every_agent_turn_that_answers_has_one_appraisal_and_its_place() -> None:
    talk = [
        *agent("Hello!"),
        *WISH,
        *agent("Sure."),
        *does(LOOK),
        *agent("Which lamp?"),
        *customer(""),
        *customer("That."),
        *END,
    ]
    turns, places = talk_of(failed(talk).messages)
    assert [(turn.speaker, turn.text) for turn in turns[2:4]] == [
        ("agent", "Sure.\nWhich lamp?"),
        ("customer", "That."),
    ]
    assert places == [2, 8] and len(appraise_all(turns)) == len(places)


def test_results_go_to_the_calls_of_one_message_in_order() -> None:
    both = [{"speaker": "agent", "calls": [LOOK, CANCEL]}, *({"speaker": "tool", "text": text} for text in "ab")]
    assert [call.result for call in calls_of(failed(both).messages)] == ["a", "b"]


def test_what_the_harness_says_of_its_data_is_read_as_each_harness_writes_it() -> None:
    for info, right in [
        (RIGHT_DATA, True),
        ({"reward": 0.0, "info": WRONG_DATA, "actions": []}, False),
        ({"breakdown": {"DB": 1.0, "COMMUNICATE": 0.0}, "note": None}, True),
        ({"r_outputs": 0.0, "outputs": {}}, None),
        ("?", None),
    ]:
        assert data_right(failed(WISH, reward_info=info)) is right


def test_reference_actions_are_read_as_each_harness_writes_them() -> None:
    ours = failed(WISH)
    tau = failed(
        WISH, reference=None, reward_info={"actions": [{"name": "a", "kwargs": {"x": 1}}, {"name": "respond"}]}
    )
    checks = [
        {"action": {"name": n, "arguments": {}, "requestor": who}} for n, who in (("a", "assistant"), ("b", "user"))
    ]
    tau2 = failed(WISH, reference=None, reward_info={"action_checks": checks})
    names = [[each.name for each in references([e])["retail", "0"]] for e in (ours, tau, tau2)]
    assert names == [["get_order", "return_items", "cancel_order"], ["a"], ["a"]]


def test_an_episode_that_broke_off_takes_its_tasks_reference_from_another() -> None:
    whole, broken = failed(WISH, END), episode("impatience-high", "0", success=0, messages=WISH, ended="max_steps")
    found = diagnose(agent_of([whole, broken]), appraise=calm)
    assert all(diagnosis.referenced for diagnosis in found)
    assert {"Missed Action"} <= found[0].critical  # impatience-high stands first


# ---- Words


def test_friction_and_contradictions_are_the_appraisals_and_critical_when_they_cost_the_episode() -> None:
    said = Appraisal(
        {"repeated question": 0.9, "no progress": 0.6, "contradiction": 1.0, "coldness": 1.0},
        {"repeated question": "'Order number?' again"},
    )
    weak = Appraisal({"no progress": 0.4})
    talk = [*WISH, *agent("Order number?"), *customer("#W1!"), *agent("Well."), *customer("###STOP###")]
    minor = rules(failed(talk, reference=[]), weak, said)
    assert [(f.type, f.severity, f.turn, f.reason) for f in minor.faults] == [
        ("Friction", "minor", 3, "repeated question: 'Order number?' again"),
        ("Inconsistent", "minor", 3, "contradiction"),
    ]
    for more in ({"ended": "max_steps"}, {"messages": [*talk[:-1], *customer("###UNSATISFIED###")]}):
        assert rules(failed(talk, **{"reference": [], **more}), weak, said).critical == {"Friction", "Inconsistent"}


@pytest.mark.parametrize(
    "events, reason",
    [
        ([{"coldness": 1.0}, {"ignored cue": 0.5}], "dismissive tone"),
        ([{"coldness": 0.5}, {"ignored cue": 0.4}, {"ignored cue": 0.4}], "ignored emotional cues"),
        ([{"repeated question": 0.5, "rigid refrain": 0.5}, {"coldness": 0.9}], "procedural friction"),
        ([{"warmth": 1.0}], "unclear"),
    ],
)
def test_a_customer_who_gave_up_did_so_for_the_dominant_reason(events: list[dict[str, float]], reason: str) -> None:
    talk = [m for _ in events for m in (*customer("Please."), *agent("Hm."))]
    found = rules(failed(talk, customer("###UNSATISFIED###")), *map(Appraisal, events))
    assert found.ending.abandoned and found.ending.label == reason
    assert "Early Stop" not in {fault.type for fault in found.faults} and "Missed Action" in found.critical


def test_a_task_is_not_abandoned_because_the_agent_says_the_token() -> None:
    assert rules(failed(WISH, agent("###UNSATISFIED###"))).ending.label == "not abandoned"


# ---- What was looked for


def test_without_reference_actions_and_judge_little_is_looked_for_and_nothing_is_zero() -> None:
    bare = failed(WISH, END, reference=None, reward_info=None)
    found = measure_faults(agent_of([bare]), diagnose(agent_of([bare]), appraise=calm))
    by_category = {share.of: share for share in found.categories}
    assert str(by_category["Missing or Extra Action"]) == "not looked for"
    assert str(by_category["Wrong Tool Call"]) == "≥ 0.00"  # schema errors only
    assert next(s for s in found.types if s.of == "Missed Action").share.record["value"] is None
    assert "keep no reference actions" in found.notes[0]
    assert found.record["not_looked_for"] == [
        type_ for type_ in TYPES if type_ not in ("Schema Error", "Friction", "Inconsistent")
    ]


def test_judged_types_are_not_looked_for_without_a_judge() -> None:
    one = failed(WISH, does(LOOK), END)
    found = measure_faults(agent_of([one]), diagnose(agent_of([one]), appraise=calm))
    rows = {row[0]: row[1:] for row in types_grid(found).rows}
    assert all(rows[type_] == ("-", "not looked for") for type_ in JUDGED)
    assert rows["Missed Action"] == ("1.00", "2 (0 minor, 0 the user's)")
    (row,) = categories_grid(found).rows
    assert row == (UNSTEERED, "1", "1.00", "≥ 1.00", "0.00", "≥ 0.00", "≥ 0.00")


def test_an_episode_without_messages_is_looked_at_by_nobody() -> None:
    found = rules(failed(reference=REFERENCE, messages=()))
    assert not found.looked and not found.faults


# ---- Figures


def agent_of(episodes: Sequence[Episode]) -> Agent:
    names = list(dict.fromkeys([UNSTEERED, *(each.condition for each in episodes)]))
    return Agent("gpt-test", (Run(header(names, 9), tuple(episodes)),), tuple(episodes))


GOOD = [*WISH, *does(LOOK), *does(RETURN), *does(CANCEL), *END]
MISSED = [*WISH, *does(LOOK), *does(RETURN), *END]


def test_the_share_is_of_failed_episodes_with_its_interval_over_tasks() -> None:
    """Unsteered: one of two. Impatient: task a 2 of 2, b 1 of 2, c 0 of 2; and a solved one, which is none of them."""
    impatient = {"a": [MISSED, MISSED], "b": [MISSED, GOOD], "c": [GOOD, GOOD]}
    episodes = [failed(MISSED, task="a"), failed(GOOD, task="b")]
    episodes += [
        failed(messages, condition="impatience-high", task=task, trial=trial)
        for task, trials in impatient.items()
        for trial, messages in enumerate(trials)
    ]
    episodes += [
        episode("impatience-high", "d", messages=MISSED, reference=REFERENCE),
        failed(MISSED, condition="impatience-high", task="e", infrastructure=True),
    ]
    agent = agent_of(episodes)
    found = measure_faults(agent, diagnose(agent, appraise=calm))
    plain, steered = (share for share in found.categories if share.of == "Missing or Extra Action")
    assert (plain.failed, plain.share.value) == (2, 0.5)
    assert (steered.failed, steered.tasks, steered.share.value) == (6, 3, 0.5)
    flags = {"a": [1.0, 1.0], "b": [1.0, 0.0], "c": [0.0, 0.0]}
    assert steered.share == over_tasks(lambda items: sum(items) / len(items), flags)
    sides = {task: [("steered", flag) for flag in some] for task, some in flags.items()}
    sides["a"].append(("plain", 1.0))
    sides["b"].append(("plain", 0.0))
    assert steered.beside == over_tasks(lambda items: of(items, "steered") - of(items, "plain"), sides)
    assert plain.beside.value != plain.beside.value
    assert categories_grid(found).rows[2][:3] == ("impatience-high less unsteered", "", str(steered.beside))


def of(items: Sequence[tuple[str, float]], side: str) -> float:
    known = [flag for each, flag in items if each == side]
    return sum(known) / len(known) if known else float("nan")


def test_minor_faults_and_the_users_are_in_no_share_and_are_counted() -> None:
    one = failed(WISH, does(LOOK), does(LOOK), does(RETURN), agent("Why cancel?"), customer("###STOP###"))
    found = measure_faults(agent_of([one]), diagnose(agent_of([one]), appraise=calm))
    assert {share.share.value for share in found.categories if share.looked} == {0.0}
    counted = {(c["type"], c["source"], c["severity"]): c["faults"] for c in found.record["counts"]}
    assert counted == {
        ("Repeated Action", "agent", "minor"): 1,
        ("Missed Action", "agent", "minor"): 1,
        ("Early Stop", "user", "critical"): 1,
    }
    json.dumps(found.record, allow_nan=False)


# ---- What harnesses say themselves


def test_tau2s_review_tags_and_tau_benchs_error_types_have_types() -> None:
    for tag, type_ in [
        ("hallucination", "Hallucination"),
        ("incorrect_interpretation", "Misread Intent"),
        ("guideline_violation", "Policy Breach"),
        ("revealed_info_early", "Revealed Early"),
        ("inconsistent_behavior", "Inconsistent"),
        ("premature_termination", "Early Stop"),
        ("missed_required_action", "Missed Action"),
        ("wrong_sequence", "Wrong Order"),
        ("used_wrong_tool_argument", "Wrong Arguments"),
        ("Wrong Transfer", "Wrong Transfer"),
        ("other", None),
        ("something new", None),
    ]:
        assert type_of_tag(tag) == type_


def test_a_review_is_read_and_everything_that_it_has_tags_for_was_looked_for() -> None:
    errors = [
        {"source": "agent", "severity": "critical", "error_tags": ["hallucination", "other"], "turn_idx": 3},
        {"source": "user", "severity": "critical_hindered", "error_tags": ["revealed_info_early"], "reasoning": "r"},
        {"source": "agent", "severity": "minor", "error_tags": ["wrong_sequence"]},
        "damaged",
    ]
    assert [(f.type, f.source, f.severity, f.turn) for f in faults_of_review({"errors": errors})] == [
        ("Hallucination", "agent", "critical", 3),
        ("Revealed Early", "user", "critical", 0),
        ("Wrong Order", "agent", "minor", 0),
    ]
    assert faults_of_review(None) == faults_of_review({"errors": 3}) == []
    one = failed(WISH, END, reference=None, review={"errors": errors})
    (diagnosis,) = diagnose(agent_of([one]), appraise=calm)
    assert {"Hallucination", "Policy Breach", "Missed Action"} <= diagnosis.looked
    assert "Emotional Neglect" not in diagnosis.looked


def test_an_error_type_is_listed_and_makes_nothing_looked_for() -> None:
    one = failed(WISH, END, reference=None, error_type="goal_partially_completed")
    (diagnosis,) = diagnose(agent_of([one]), appraise=calm)
    assert [(f.type, f.by) for f in diagnosis.faults] == [("Missed Action", "harness")]
    assert "Missed Action" not in diagnosis.looked
    assert not any(s.share.value > 0 for s in measure_faults(agent_of([one]), [diagnosis]).categories)
    one = failed(WISH, END, reference=None, error_type="used_wrong_tool_argument")  # of a category looked for in part
    found = measure_faults(agent_of([one]), diagnose(agent_of([one]), appraise=calm))
    assert next(str(s) for s in found.categories if s.of == "Wrong Tool Call") == "≥ 0.00"


# ---- The judge


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Oracle]]:
    with oracle_at() as found:
        yield found


@pytest.fixture
def judge(server: tuple[str, Oracle]) -> tuple[str, Oracle]:
    server[1].reset()
    return server


def answer(*named: dict[str, Any], abandoned: bool = False, why: str | None = None) -> str:
    return json.dumps({"faults": list(named), "abandoned": abandoned, "why": why})


def named(type_: str, source: str = "agent", severity: str = "critical", message: Any = 1) -> dict[str, Any]:
    return {"type": type_, "source": source, "severity": severity, "message": message, "reason": "so"}


def test_a_judge_finds_what_rules_cannot_see_and_only_that_is_asked(judge: tuple[str, Oracle]) -> None:
    url, oracle = judge
    oracle.answer = lambda prompt, model: answer(
        named("Hallucination", message=99), named("misread_intent", "user", "minor"), abandoned=True, why=REASON
    )
    one = failed(WISH, agent(HOSTILE), END, instruction="Return the lamp.")
    (diagnosis,) = diagnose(agent_of([one]), FaultJudge(url, "j"), appraise=calm)
    judged = [fault for fault in diagnosis.faults if fault.by == "judge"]
    assert {(f.type, f.source, f.severity, f.turn) for f in judged} == {
        ("Hallucination", "agent", "critical", 3),  # no message has the number 99: the last
        ("Misread Intent", "user", "minor", 1),
    }
    assert (diagnosis.ending.label, diagnosis.ending.by) == (REASON, "judge")
    assert diagnosis.looked == {*RULED, "Misread Intent", "Hallucination", "Emotional Neglect"}
    (prompt,) = oracle.prompts
    assert "- Policy Breach" not in prompt and "- Missed Action" not in prompt
    (inside,) = re.findall(r"<episode>\n(.*?)\n</episode>\n", prompt, re.DOTALL)
    told = json.loads(inside)
    assert told["instruction"] == "Return the lamp." and told["messages"][1]["text"] == HOSTILE
    assert [action["name"] for action in told["reference"]] == ["get_order", "return_items", "cancel_order"]


REASON = "emotional neglect"


def test_with_the_policy_its_breaches_are_asked_for(judge: tuple[str, Oracle], tmp_path: Path) -> None:
    url, oracle = judge
    oracle.answer = lambda prompt, model: answer(named("Policy Breach"))
    (tmp_path / "p.md").write_text("Verify first.")
    asked = FaultJudge(url, "j", read_policies([f"retail={tmp_path / 'p.md'}"]))
    (diagnosis,) = diagnose(agent_of([failed(WISH, END)]), asked, appraise=calm)
    assert "Policy Breach" in diagnosis.critical and diagnosis.looked == {*TYPES}
    assert "Verify first." in oracle.prompts[0]
    for wrong, said in (("p.md", "DOMAIN=FILE"), ("retail=none.md", "cannot be read")):
        with pytest.raises(HarnessError, match=said):
            read_policies([wrong])


def test_an_unreadable_answer_leaves_its_types_not_looked_for_and_is_told(judge: tuple[str, Oracle]) -> None:
    url, oracle = judge
    oracle.answer = lambda prompt, model: answer() if "lamp two" in prompt else "I would rather not."
    both = [failed(WISH, END), failed(customer("lamp two"), END, task="1")]
    found = measure_faults(agent_of(both), diagnose(agent_of(both), FaultJudge(url, "j"), appraise=calm))
    (share,) = [share for share in found.types if share.of == "Hallucination"]
    assert (share.failed, share.looked, share.whole, str(share)) == (2, 1, False, "≥ 0.00")
    assert "could not be read for 1 failed episodes" in found.notes[0]
    oracle.answer = lambda prompt, model: "No."
    with pytest.raises(JudgeError, match="none of 2 answers"):
        diagnose(agent_of(both), FaultJudge(url, "j"), appraise=calm)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no faults",
        '{"faults": "none"}',
        '{"faults": ["bad"]}',
        answer(named("Wrong Order")),  # not asked for
        answer(named("Hallucination", source="tool")),
        answer(named("Hallucination", severity="grave")),
    ],
)
def test_answers_beside_the_question_are_unreadable(text: str) -> None:
    assert read_review(text, asked=JUDGED) is None


def test_a_reason_of_its_own_words_is_no_reason() -> None:
    found = read_review(answer(named("Hallucination", message=True), abandoned=True, why="bad mood"), asked=JUDGED)
    assert found and found["why"] is None and found["faults"][0]["turn"] == 0


# ---- The command


def test_the_report_has_tables_json_and_a_page_of_faults(judge: tuple[str, Oracle], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    url, oracle = judge
    oracle.answer = lambda prompt, model: answer({**named("Hallucination"), "reason": HOSTILE})
    episodes = [failed(MISSED, [*agent(HOSTILE)], condition=c, task=t) for c in (UNSTEERED, "a-high") for t in "xyz"]
    # Of one condition all three say the same, and what is the same is asked once.
    run = runs.write(tmp_path / "run.jsonl", header([UNSTEERED, "a-high"], 1), episodes)
    told, page = tmp_path / "r.json", tmp_path / "r.html"
    command = ["report", str(run), "--faults", "--judge-url", url, "--judge-model", "j", "--json", str(told)]
    result = CliRunner().invoke(app, [*command, "--html", str(page), "--markdown"])
    assert result.exit_code == 0, result.output
    assert "### Faults of gpt-test" in result.output and "not looked for" in result.output
    figures = json.loads(told.read_text())["faults"]
    assert figures["judge"]["asked"] == 2 and len(figures["agents"][0]["episodes"]) == 6
    assert figures["taxonomy"] == {category: list(types) for category, types in CATEGORIES.items()}
    html = page.read_text("utf-8")
    assert "Hallucination (critical, agent, by judge), message 2: &lt;/script&gt;" in html
    assert not [name for _, name, _ in Document(html).attributes if name == "onerror"]


@pytest.mark.parametrize(
    "options, said",
    [
        (["--faults", "--judge-url", "http://x/v1"], "needs both"),
        (["--judge-url", "http://x/v1", "--judge-model", "m"], "--faults"),
        (["--faults", "--policy", "retail=p.md"], "are for a judge"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], said: str, tmp_path: Path) -> None:
    run = runs.write_solved(tmp_path / "run.jsonl", {UNSTEERED: {"0": [1]}, "a-high": {"0": [0]}})
    result = CliRunner().invoke(app, ["report", str(run), *options])
    assert result.exit_code == 2 and said in " ".join(re.sub(r"[│\n]", " ", result.output).split())


def test_without_the_option_nothing_is_looked_for(tmp_path: Path) -> None:
    run = runs.write_solved(tmp_path / "run.jsonl", {UNSTEERED: {"0": [1]}, "a-high": {"0": [0]}})
    told = tmp_path / "r.json"
    result = CliRunner().invoke(app, ["report", str(run), "--json", str(told)])
    assert result.exit_code == 0 and "Faults" not in result.output and "faults" not in json.loads(told.read_text())


def test_endings_are_counted_by_condition() -> None:
    episodes = [failed(WISH, customer("###UNSATISFIED###"), condition="a-high", task=t) for t in "xy"]
    episodes.append(failed(WISH, END))
    found = measure_faults(agent_of(episodes), diagnose(agent_of(episodes), appraise=calm))
    assert endings_grid(found).rows == ((UNSTEERED, *"100000"), ("a-high", *"000002"))


def test_a_fault_is_one_of_the_fifteen() -> None:
    with pytest.raises(HarnessError, match="no fault is called 'Rude'"):
        Fault("Rude", "agent", "minor", 0, "")
