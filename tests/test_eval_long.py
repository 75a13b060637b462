"""Over whole dialogues: does a trait last, and how does a customer conduct itself? Figures are worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from samples import lettered_set, to_yaml
from tiny import save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.dialogues import FORMAT, Dialogue, DialogueTurn
from traitbasis.errors import EvaluationError, HarnessError, ReportError
from traitbasis.evaluation.conduct import DEFINITIONS, PARTS, Conduct, Group, conduct, conduct_of
from traitbasis.evaluation.consistency import (
    ALL,
    INSTRUMENTS,
    LEAST_NEUTRAL,
    THRESHOLD,
    TOLERANCE,
    Consistency,
    Row,
    consistency,
)
from traitbasis.evaluation.judgments import Verdict, side_of, write_judgments
from traitbasis.evaluation.plots import consistency_figure, save_figure
from traitbasis.evaluation.transcripts import baseline_of, read_transcripts, spoken
from traitbasis.evaluation.wording import (
    frustration_markers,
    mattr,
    opener,
    opens_with_an_order,
    polite_markers,
)
from traitbasis.metrics.estimate import mean, mean_over_tasks, over_tasks
from traitbasis.plots import alt_text

STOP = "###STOP###"
AGENT = ["Hello.", "Which order is it?", "And the zip code?", "Done, it is cancelled.", "Anything else?", "Goodbye."]
SAID = ["Please cancel W77.", "It is w77 as I said.", "The zip is 10 115.", "Thanks a lot to you.", STOP]


def talk(*said: str, method: str = "steered", task: str = "a", trial: int = 0, **more: Any) -> Dialogue:
    """The agent's lines and the customer's in turn; the order is cancelled in the fourth line."""
    agent = [AGENT[i % len(AGENT)] for i in range(len(said))]
    turns = [turn for a, c in zip(agent, said, strict=True) for turn in _turns(a, c)]
    settings: dict[str, Any] = {"resolved": 6, "stop_tokens": (STOP,), "traits": {"impatience": "high"}}
    told = {"order": "W77", "zip": "10 115", "name": "Ada Lund"}
    instruction = "You are Ada Lund. Cancel order W77, zip 10 115."
    return Dialogue(
        **{**settings, **more}, method=method, task=task, trial=trial, instruction=instruction, facts=told,
        turns=tuple(turns),
    )  # fmt: skip


def _turns(agent: str, customer: str) -> list[DialogueTurn]:
    return [DialogueTurn("agent", agent), DialogueTurn("customer", customer)]


def figures(*said: str, **more: Any) -> Mapping[str, float]:
    return conduct_of(talk(*said, **more)).figures


def write(path: Path, dialogues: Sequence[Dialogue]) -> Path:
    lines = [{"format": FORMAT, "made": path.stem}, *map(asdict, dialogues)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)], env={"COLUMNS": "220"})


# ---- Wording

ORDERS = """Cancel my order right now. | Please cancel reservation 4WQ150. | Just refund me the full amount.
Tell me why this was charged twice! | Okay, then exchange the blue lamp for the white one. | Prove it.
Confirm that the new address is on file. | Return both items and put the money on my card. | Hurry up with the refund.
Stop asking me the same thing. | Hi, check order W2417 and tell me where it is. | Don't send me another link, fix it.
Explain that again, I lost you at the second step. | Get me a supervisor. | Show me the policy that says so.
Yes, go ahead and book it. | Look, just send the replacement today. | Give me a straight answer.
No. Change it to the 21st. | Wait for my husband to confirm the date. | Thanks, now update my phone number as well.
Verify the total before you charge anything. | Move the appointment to Tuesday. | Let me know when it ships.
So skip the survey and answer the question. | Hold on, read that back to me. | Forget the voucher, I want cash.
Make sure the gluten-free meal is in there. | Use the card ending in 7093. | Book me on the 7am flight instead."""
NO_ORDERS = """I want to cancel my order. | Could you please cancel my reservation? | My order number is W2417.
Thank you, that is all I needed. | Return label hasn't arrived yet. | Order W2417 was placed on 3 May.
Hello, I have a question about my bill. | Why has this been charged twice? | Change fees were never mentioned to me.
Yes, that is correct. | Sorry, what does that mean? | The blue one, please. | Do you have it in white?
Wait, what was the first option again? | I'd like you to send it today. | Refund or store credit, which is faster?
It's CL-3384. | Can I change the date? | See you on the 21st then. | Well, I was told it would be free.
You said it would take two days. | Is there no other way? | Seventy-ninety-three, the last four digits.
Are you even reading what I write? | No, I did not get any email. | Booking RM-51902, under Falk.
Would you mind checking again? | Still waiting for my refund. | Hmm, so the pitch is longer, right?
Never got the parcel, even though it says delivered."""


def test_orders_are_told_from_other_openings_in_58_of_60_lines() -> None:
    # Written after the rule, by the same hand, and not looked at when it was made.
    lines = [[line.strip() for line in text.replace("\n", "|").split("|")] for text in (ORDERS, NO_ORDERS)]
    assert [len(some) for some in lines] == [30, 30]
    wrong = [t for t in lines[0] if not opens_with_an_order(t)] + [t for t in lines[1] if opens_with_an_order(t)]
    assert wrong == [
        "Hi, check order W2417 and tell me where it is.",
        "Never got the parcel, even though it says delivered.",
    ]


@pytest.mark.parametrize(
    ("text", "polite", "frustrated"),
    [
        ("Could you PLEASE help? Thank you!", 3, 0),
        ("I’ve already told you, this is ridiculous!!", 0, 3),
        ("I am still waiting. Sorry, but hurry up.", 1, 2),
        ("No rush, take your time.", 2, 0),
        ("My order is W77.", 0, 0),
        ("The pleased thanksgiving crowd seriouslyish said so.", 0, 0),
    ],
)
def test_markers_are_counted_as_words(text: str, polite: int, frustrated: int) -> None:
    assert (polite_markers(text), frustration_markers(text)) == (polite, frustrated)


def test_mattr_is_the_mean_share_of_different_words_in_every_window() -> None:
    tokens = ["a", "b", "a", "c", "c", "d", "a", "b"]
    by_hand = [len(set(tokens[i : i + 3])) / 3 for i in range(len(tokens) - 2)]
    assert mattr(tokens, 3) == pytest.approx(sum(by_hand) / len(by_hand))
    assert mattr(["a", "b"] * 40) == pytest.approx(2 / 50)
    assert math.isnan(mattr(["a"] * 49))


def test_an_opener_is_the_first_words_without_case_and_marks() -> None:
    assert [opener("Well... OK, then! Go."), opener("Hi", 3), opener("", 3)] == ["well ok then", "hi", ""]


# ---- Conduct of one dialogue


def test_facts_are_told_from_the_turn_that_first_states_them() -> None:
    found = conduct_of(talk(*SAID))
    assert found.told == {"order": 1, "zip": 3, "name": None}
    assert found.figures["facts told"] == pytest.approx(2 / 3)
    assert found.figures["told first"] == 1 / 2
    assert found.figures["turn of a fact"] == 2
    # Four turns that say something; of the two facts told in the end 1, 1, 2, 2 were told by then.
    assert found.figures["disclosure"] == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)


def test_a_customer_who_tells_nothing_has_told_no_fact_and_nothing_can_be_said_of_when() -> None:
    found = figures("Hi.", "Hm.", "Well.")
    assert found["facts told"] == 0
    assert all(math.isnan(found[name]) for name in ("told first", "disclosure", "turn of a fact"))


def test_an_identifier_is_invented_once_when_nobody_said_it_before() -> None:
    found = figures("My order is W77 or #XK4471.", "Yes, #XK4471.", "And BKN-123456!")
    assert (found["invented"], found["invents"]) == (2, 1)
    assert figures(*SAID)["invented"] == 0
    known = talk("Fine.", "Yes, TR90211.")
    heard = replace(known, turns=(*known.turns[:2], DialogueTurn("agent", "Ticket TR90211?"), known.turns[3]))
    assert conduct_of(known).figures["invented"] == 1
    assert conduct_of(heard).figures["invented"] == 0


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (SAID, {"proper": 1, "early": 0, "never": 0, "mixed": 0, "no token": 0}),
        (["Hi.", STOP], {"proper": 0, "early": 1, "never": 0, "mixed": 0, "no token": 0}),
        (["Hi.", "No.", "Yes.", f"Thanks! {STOP}"], {"proper": 0, "early": 0, "never": 0, "mixed": 1, "no token": 0}),
        (["Hi.", f"Bye {STOP}"], {"proper": 0, "early": 1, "never": 0, "mixed": 1, "no token": 0}),
        (["a", "b", "c", "Hm.", "Well."], {"proper": 0, "early": 0, "never": 1, "mixed": 0, "no token": 1}),
        (["a", "b", "c", "Hm."], {"proper": None, "early": 0, "never": None, "mixed": 0, "no token": 1}),
    ],
)
def test_a_customer_stops_properly_early_mixed_or_never(said: list[str], expected: dict[str, float | None]) -> None:
    found = figures(*said)
    assert {name: None if math.isnan(found[name]) else found[name] for name in expected} == expected


def test_where_the_cap_leaves_no_second_turn_stopping_is_not_counted_of_those_alone_who_stop() -> None:
    """Three of four are cut at the fourth turn, the first after the agent's last deed; one stops there."""
    talks = [talk("Hi.", "No.", "Yes.", last, task=f"t{i}") for i, last in enumerate((STOP, "Hm.", "Well.", "So?"))]
    talks = [replace(d, ended="stop" if STOP in d.said[-1] else "turns") for d in talks]
    (cut,) = conduct(talks)
    assert math.isnan(cut.figures["never"].value) and math.isnan(cut.figures["proper"].value)
    assert cut.figures["early"].value == 0 and cut.figures["no token"].value == 3 / 4
    (whole,) = conduct([*talks, talk("Hi.", "No.", "Yes.", "Hm.", "Well.", task="t5")])
    assert (whole.figures["never"].value, whole.figures["proper"].value) == (1 / 2, 1 / 2)


def test_a_fact_that_stands_within_another_word_or_number_is_not_told() -> None:
    facts = {"day": "6 May", "pitch": "pitch 46"}
    wrong, right = (replace(talk(text), facts=facts) for text in ("On 16 May, pitch 460.", "On 6 May: (pitch 46)."))
    assert conduct_of(wrong).told == {"day": None, "pitch": None}
    assert conduct_of(right).told == {"day": 1, "pitch": 1}


def test_without_knowing_when_it_was_resolved_only_mixing_can_be_said() -> None:
    found = figures("Hi.", f"Bye {STOP}", resolved=None)
    assert found["mixed"] == 1 and found["no token"] == 0
    assert all(math.isnan(found[name]) for name in ("proper", "early", "never"))
    assert all(math.isnan(figures("Hi.", stop_tokens=())[name]) for name in DEFINITIONS["stopping"])


def test_turns_that_flip_break_or_repeat_are_shares_of_what_was_said() -> None:
    found = figures(
        "I can help you with that.", "no no no no no no", "And the zip code?", "it is W77 sir", "It is W77, sir!"
    )
    assert found["role flips"] == 1 / 5
    assert found["broken"] == 1 / 5
    assert found["repeats"] == 2 / 5  # the agent's question, and its own line; "Hi" twice is no repeat
    assert figures("Hi you", "Hi you")["repeats"] == 0


def test_a_stop_token_is_no_turn_and_no_word() -> None:
    found = figures("One two three.", f"One two {STOP}", STOP)
    assert (found["turns"], found["words"]) == (2, 2.5)
    assert [text for _, text in spoken(talk("Hi.", STOP))] == ["Hi."]


def test_manner_and_length_are_means_over_turns() -> None:
    found = figures("Cancel it, please!", "Why? I am still waiting.", "Send me that")
    assert found["orders"] == pytest.approx(2 / 3)
    assert found["polite"] == pytest.approx(1 / 3)
    assert found["frustrated"] == pytest.approx(1 / 3)
    assert found["questions"] == pytest.approx(1 / 3)
    assert found["varies within"] == pytest.approx(stdev([3, 5, 3]) / (11 / 3))
    assert math.isnan(found["MATTR"])


def test_guards_and_tries_come_from_what_the_endpoint_said() -> None:
    dialogue = talk("Hi.", "Hm.")
    made = [{"tries": 1, "failed_guard": None}, {"tries": 4, "failed_guard": "repeat"}]
    turns = [replace(turn, made_by=made[i // 2]) if i % 2 else turn for i, turn in enumerate(dialogue.turns)]
    found = conduct_of(replace(dialogue, turns=tuple(turns))).figures
    assert (found["guard failed"], found["tries"]) == (0.5, 2.5)
    assert math.isnan(conduct_of(dialogue).figures["tries"])


def test_a_customer_who_only_stops_or_says_nothing_is_measured_without_an_error() -> None:
    for said in ([STOP], [""], []):
        found = conduct_of(talk(*said))
        assert isinstance(found, Conduct) and found.figures["turns"] == 0
        assert set(found.figures) <= set(PARTS)


# ---- Conduct of methods


@pytest.fixture(scope="module")
def groups() -> dict[tuple[str, str | None], Group]:
    dialogues = [
        *(talk("I want W77.", "Hm.", task=task, trial=i) for task in "ab" for i in (0, 1)),
        *(talk("I want it.", "Oh dear, yes.", task=task, traits={}) for task in "ab"),
        talk("Please, W77 it is.", method="unsteered", traits={}, task="a"),
        talk("I want W77, 10 115.", "So.", method="unsteered", traits={}, task="a", trial=1),
        talk("Help me.", method="unsteered", traits={}, task="b"),
    ]
    return {(group.method, group.condition): group for group in conduct(dialogues)}


def test_neutral_dialogues_of_a_method_stand_apart(groups: dict[tuple[str, str | None], Group]) -> None:
    assert {key: group.dialogues for key, group in groups.items()} == {
        ("steered", None): 4,
        ("steered", "neutral"): 2,
        ("unsteered", None): 3,
    }


def test_differences_are_paired_by_task_and_trial(groups: dict[tuple[str, str | None], Group]) -> None:
    steered = groups["steered", None]
    assert steered.pairs == 3  # task b, trial 1 has no unsteered partner
    # Facts told: 1/3 each; unsteered 1/3, 2/3 and 0 for these pairs.
    assert steered.differences["facts told"].value == pytest.approx((0 - 1 / 3 + 1 / 3) / 3)
    assert steered.differences["turns"].value == pytest.approx((1 + 0 + 1) / 3)
    assert groups["unsteered", None].differences == {}


def test_openers_count_different_ones_and_the_commonest(groups: dict[tuple[str, str | None], Group]) -> None:
    found = groups["steered", None].figures
    assert found["first turns differ"].value == 1 / 4
    assert found["distinct-1"].value == found["distinct-3"].value == 2 / 8
    assert found["commonest"].value == 4 / 8
    assert math.isnan(found["distinct-1"].low)  # a task drawn twice would repeat itself
    unsteered = groups["unsteered", None].figures
    assert (unsteered["first turns differ"].value, unsteered["commonest"].value) == (1, 1 / 4)


def test_openers_are_not_held_against_a_baseline_that_is_there_twice() -> None:
    two = [talk("So it is.", traits={trait: "low"}) for trait in ("impatience", "skeptical")]
    neutral = talk("Well it is.", method="unsteered", traits={})
    together, apart = conduct([*two, neutral]), conduct([*two, neutral], by_condition=True)
    assert math.isnan(together[0].differences["distinct-1"].value)
    assert [g.condition for g in apart] == ["impatience-low", "skeptical-low", "neutral"]
    assert apart[0].differences["distinct-1"].value == 0


def test_the_interval_of_a_mean_is_that_of_the_estimator_over_tasks() -> None:
    values = {"a": [0.0, 1.0, 3.0], "b": [2.0, math.nan], "c": [5.0, 5.0]}
    flat = [(task, value) for task, some in values.items() for value in some]
    assert asdict(mean_over_tasks(flat)) == pytest.approx(asdict(over_tasks(mean, values)))
    assert math.isnan(mean_over_tasks([("a", math.nan)]).value)


def test_one_task_has_figures_without_intervals() -> None:
    (group,) = conduct([talk(*SAID), talk(*SAID[:2], trial=1)])
    assert group.figures["facts told"].value == pytest.approx((2 / 3 + 1 / 3) / 2)
    assert math.isnan(group.figures["facts told"].low)
    assert group.pairs == 0


def test_every_figure_is_defined_and_every_definition_measured() -> None:
    (group,) = conduct([talk(*SAID)])
    assert list(group.figures) == [name for names in DEFINITIONS.values() for name in names]


def test_the_baseline_is_the_unsteered_method_else_the_own_neutral_dialogues() -> None:
    own = talk("Hi.", traits={})
    dirty = replace(own, positions="all")
    other = talk("Hi.", method="unsteered", traits={})
    assert baseline_of("steered", [own, dirty, other, talk("Hi.")]) == [other]
    assert baseline_of("steered", [own, dirty, talk("Hi.")]) == [own]
    assert baseline_of("prompted", [own]) == []


# ---- Harness runs

HEADER = {
    "format": "traitbasis.run/1", "harness": "tau-trait", "harness_version": "0.1.1", "domains": ["retail"],
    "agent": {"kind": "llm", "model": "small"}, "user": {"model": "steered-user"}, "trials": 2,
    "conditions": {"unsteered": {}, "hurry": {"impatience": "high"}},
}  # fmt: skip


def episode(condition: str, *said: str, **more: Any) -> dict[str, Any]:
    messages = [{"speaker": "system", "text": "Policy."}]
    for text in said:
        messages += [
            {"speaker": "agent", "text": "Yes?"},
            {"speaker": "tool", "text": "{}"},
            {"speaker": "customer", "text": text},
        ]
    cell = {"kind": "episode", "domain": "retail", "task": "3", "trial": 0, "reward": 1.0, "success": True}
    traits = HEADER["conditions"][condition]  # type: ignore[index]
    return {**cell, "condition": condition, "traits": traits, "ended": "user_stop", "messages": messages, **more}


def write_run(path: Path, *episodes: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *episodes)), "utf-8")
    return path


def test_runs_are_read_as_dialogues_of_the_user_and_of_the_unsteered_one(tmp_path: Path) -> None:
    down = episode("hurry", trial=1, infrastructure=True)
    path = write_run(tmp_path / "run.jsonl", episode("unsteered", "Hi.", STOP), episode("hurry", "Now, #AB9921!"), down)
    headers, found = read_transcripts([path])
    assert [(d.method, d.task, d.ended, len(d.turns)) for d in found] == [
        ("unsteered", "retail/3", "stop", 4),
        ("steered-user", "retail/3", "stop", 2),
    ]
    assert headers[0]["harness"] == "tau-trait"
    unsteered, steered = (conduct_of(dialogue).figures for dialogue in found)
    assert math.isnan(steered["facts told"]) and math.isnan(steered["invented"])
    assert (unsteered["no token"], steered["no token"]) == (0, 1)
    hurry = next(group for group in conduct(found) if group.method == "steered-user")
    assert hurry.pairs == 1 and hurry.differences["no token"].value == 1


def test_identifiers_are_measured_in_runs_that_kept_the_instruction(tmp_path: Path) -> None:
    told = episode("hurry", "Now, #AB9921 or #CD8831!", instruction="You are impatient about #AB9921.")
    _, (dialogue,) = read_transcripts([write_run(tmp_path / "run.jsonl", told)])
    assert conduct_of(dialogue).figures["invented"] == 1


def test_trials_of_several_runs_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / f"{i}.jsonl", episode("hurry", "Hi.", trial=1)) for i in (1, 2)]
    _, found = read_transcripts(paths)
    assert [dialogue.trial for dialogue in found] == [1, 3]


def test_files_that_are_neither_dialogues_nor_runs_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "run.jsonl").write_text(json.dumps(HEADER) + "\n{}\n")
    for name, kind in (
        ("missing.jsonl", EvaluationError),
        ("empty.jsonl", EvaluationError),
        ("run.jsonl", HarnessError),
    ):
        with pytest.raises(kind, match=name):
            read_transcripts([tmp_path / name])
    (tmp_path / "run.jsonl").write_text(json.dumps(HEADER) + "\n")
    with pytest.raises(EvaluationError, match=r"no dialogue in .*run\.jsonl"):
        read_transcripts([tmp_path / "run.jsonl"])


# ---- Long-range consistency

CONSTANT = [1.0] * 12
FADING = [1 - i / 11 for i in range(12)]
RISING = [0.6 + i / 11 for i in range(12)]
Shown = tuple[Dialogue, list[float]]


def long(values: Sequence[float], **more: Any) -> Shown:
    """A dialogue of as many turns, and what each shows of impatience."""
    number = more.get("trial", 0)
    return talk(*(f"Turn {i} of {number}." for i in range(len(values))), **more), [*values]


def measure(shown: Sequence[Shown], *verdicts: Verdict, **more: Any) -> Consistency:
    expression = [[{"impatience": value} for value in values] for _, values in shown]
    return consistency([dialogue for dialogue, _ in shown], expression, verdicts, **more)


def neutrals(method: str = "unsteered", level: float = 0.0) -> list[Shown]:
    """Five tasks with two trials: the even one ends 0.2 higher than the odd one."""
    return [
        long([level] * 6 + [level + 0.1 * (1 - 2 * trial)] * 6, method=method, task=task, trial=trial, traits={})
        for task in "abcde"
        for trial in (0, 1)
    ]


def row(found: Consistency, method: str = "steered", neutral: bool = False, trait: str = "impatience") -> Row:
    return next(r for r in found.rows if (r.method, r.neutral, r.trait) == (method, neutral, trait))


@pytest.mark.parametrize(
    ("values", "verdict", "present", "present_beside_neutral"),
    [
        (CONSTANT, "stable", True, True),
        (FADING, "fade", False, False),
        (RISING, "escalate", True, True),
        ([0.1] * 12, "absent", False, False),
        ([2.0] * 4 + [1.5] * 4 + [1.0] * 4, "fade", True, True),
        ([0.6] * 6 + [0.4] * 6, "stable", False, True),
    ],
)
def test_a_trait_stays_fades_escalates_or_is_absent(
    values: list[float], verdict: str, present: bool, present_beside_neutral: bool
) -> None:
    (case,) = measure([long(values)]).cases
    assert (case.verdict, case.present) == (verdict, present)
    # Beside the neutral ones more than 0.2 is present, and a change of 0.21 a change (see below).
    beside = measure([long(values), *neutrals()]).cases[0]
    assert (beside.verdict, beside.present) == (verdict, present_beside_neutral)
    assert case.consistent == (present and verdict != "fade")


def test_the_yardstick_is_what_neutral_dialogues_do() -> None:
    found = measure([long(CONSTANT), *neutrals()])
    (yardstick,) = found.yardsticks
    # Held against the task's other trial, the last thirds are 0.2 and -0.2, five times each, and so are the changes.
    assert yardstick.tolerance == pytest.approx(stdev([0.2, -0.2] * 5))
    assert yardstick.threshold == pytest.approx(0.2)
    assert (yardstick.baseline, yardstick.neutral, yardstick.calibrated) == ("unsteered", 10, True)


def test_what_the_task_does_to_the_wording_goes_out() -> None:
    drift = [i / 4 for i in range(12)]
    sinking = [(d, [v - w for v, w in zip(values, drift, strict=True)]) for d, values in neutrals()]
    found = measure([long([1 - w for w in drift]), *sinking])
    assert (found.cases[0].verdict, found.cases[0].last) == ("stable", pytest.approx(1))
    assert measure([long([1 - w for w in drift])]).cases[0].verdict == "fade"


def test_where_the_tasks_neutral_dialogue_ends_those_of_other_tasks_stand_in() -> None:
    own = long([0.5] * 3, method="unsteered", traits={}, trial=1)
    other = long([0.1] * 8, method="unsteered", traits={}, task="b")
    (case,) = [case for case in measure([long(CONSTANT), own, other]).cases if case.dialogue.traits]
    # First third: three turns beside 0.5, one beside 0.1; last third: nobody neutral gets so far, so the task's level.
    assert case.first == pytest.approx(1 - (3 * 0.5 + 0.1) / 4)
    assert case.last == pytest.approx(1 - 0.5)


def test_neutral_dialogues_are_the_null_and_one_in_ten_seems_to_show_the_trait() -> None:
    levels = [long([i / 10] * 12, method="unsteered", task=f"t{i}", traits={}) for i in range(10)]
    found = measure([long(CONSTANT, task="t3"), *levels])
    # Above the nine others' mean dialogue i stands at (i - 4.5) / 9, so the threshold is (8.1 - 4.5) / 9.
    assert found.yardsticks[0].threshold == pytest.approx(0.4)
    null = row(found, "unsteered", neutral=True)
    assert {name: share.value for name, share in null.shares.items()} == pytest.approx(
        {"consistent": 0.1, "stable": 0.1, "fade": 0, "escalate": 0, "absent": 0.9, "rises": 0, "falls": 0}
    )
    assert null.end.value == pytest.approx(0)
    assert row(found).shares["consistent"].value == 1
    assert not measure([long(CONSTANT)]).yardsticks[0].calibrated


def test_rises_and_falls_are_counted_whatever_is_present() -> None:
    found = measure([long([0.0] * 8 + [0.3] * 4), long([0.0] * 8 + [-0.3] * 4, trial=1), long([0.0] * 12, trial=2)])
    shares = row(found).shares
    assert shares["absent"].value == 1
    assert shares["rises"].value == shares["falls"].value == pytest.approx(1 / 3)


def test_the_own_seed_of_another_method_is_no_other_neutral_dialogue() -> None:
    zero = [(replace(d, method="steered"), values) for d, values in neutrals()]
    found = measure([long(CONSTANT), *neutrals(), *zero])
    assert row(found, "steered", neutral=True).shares == row(found, "unsteered", neutral=True).shares


def test_without_an_unsteered_method_the_methods_own_neutral_dialogues_are_taken_else_none() -> None:
    found = measure([long(CONSTANT), long(CONSTANT, method="prompted"), *neutrals("steered")])
    assert {(y.baseline, y.threshold == THRESHOLD, y.tolerance == TOLERANCE) for y in found.yardsticks} == {
        (None, True, True),
        ("steered", False, False),
    }
    assert row(found, "prompted").end.value == 1


def test_too_few_neutral_dialogues_are_subtracted_and_calibrate_nothing() -> None:
    few = [long([0.25] * 12, method="unsteered", traits={}, task=f"t{i}") for i in range(LEAST_NEUTRAL - 1)]
    found = measure([long(CONSTANT), *few])
    (yardstick,) = found.yardsticks
    assert (yardstick.calibrated, yardstick.threshold, yardstick.neutral) == (False, THRESHOLD, LEAST_NEUTRAL - 1)
    assert row(found).end.value == 0.75


def test_short_dialogues_are_left_out_and_counted() -> None:
    found = measure([long(CONSTANT), long([1.0] * 9, trial=1), long([1.0] * 9, method="prompted")])
    assert len(found.cases) == 1
    assert found.short == {"steered": 1, "prompted": 1}
    assert len(measure([long([1.0] * 9), long([1.0] * 4, trial=1)], least_turns=9).cases) == 1


def test_a_stop_token_is_no_turn_of_the_ten() -> None:
    ten = (talk(*(f"Turn {i}." for i in range(9)), STOP), [1.0] * 9 + [math.nan])
    with pytest.raises(EvaluationError, match="steered 9"):
        measure([ten])


def test_nothing_long_enough_names_the_longest() -> None:
    with pytest.raises(EvaluationError, match=r"no dialogue with a trait has 10 customer turns.*prompted 7, steered 4"):
        measure([long([1.0] * 4), long([1.0] * 7, method="prompted"), *neutrals()])
    with pytest.raises(EvaluationError, match="no dialogue intends a trait"):
        measure(neutrals())


def test_a_trait_that_nothing_measures_is_named() -> None:
    dialogue, _ = long(CONSTANT, traits={"skeptical": "low"})
    with pytest.raises(EvaluationError, match="no instrument measures 'skeptical'"):
        consistency([dialogue], [[{"impatience": 1.0}] * 12])


def test_turns_that_cannot_be_read_are_passed_over() -> None:
    values = [math.nan, 1.0, 1.0, 1.0] + [1.0] * 6 + [math.nan, 1.0]
    assert measure([long(values)]).cases[0].verdict == "stable"
    assert measure([long([1.0] * 8 + [math.nan] * 4), long(CONSTANT, trial=1)]).cases[0].dialogue.trial == 1


def test_every_intended_trait_counts_and_all_traits_come_first() -> None:
    dialogue, _ = long(CONSTANT, traits={"impatience": "high", "skeptical": "low"})
    found = consistency([dialogue], [[{"impatience": 1.0, "skeptical": 0.0}] * 12])
    assert [(r.trait, r.cases, r.shares["consistent"].value) for r in found.rows] == [
        (ALL, 2, 0.5),
        ("impatience", 1, 1.0),
        ("skeptical", 1, 0.0),
    ]


def test_shares_have_intervals_over_tasks_and_one_task_has_none() -> None:
    shown = [long(CONSTANT if task in "ab" else FADING, task=task) for task in "abc"]
    share = row(measure(shown)).shares["consistent"]
    assert (share.value, share.low, share.high) == (pytest.approx(2 / 3), 0, 1)
    assert math.isnan(row(measure([long(CONSTANT)])).shares["consistent"].low)


def test_curves_are_raw_means_by_turn_of_the_long_dialogues() -> None:
    found = measure([long(CONSTANT), long([3.0] * 10, trial=1), long([9.0] * 5, trial=2), *neutrals(level=0.5)])
    curves = {(curve.method, curve.trait): curve for curve in found.curves}
    points = curves["steered", "impatience"].points
    assert [(p.value.value, p.dialogues) for p in points] == [(2.0, 2)] * 10 + [(1.0, 1)] * 2
    assert curves["unsteered", "impatience"].points[0].value.value == 0.5


def pairs_of_positions() -> list[Shown]:
    clean = [long(CONSTANT, task=task) for task in "ab"]
    steered = [long(FADING, task=task, positions="all") for task in "ab"]
    dialogue, values = steered[0]
    turns = [replace(t, text="no " * 9) if i in (21, 23) else t for i, t in enumerate(dialogue.turns)]
    return [*clean, (replace(dialogue, turns=tuple(turns)), values), steered[1]]


def test_a_clean_past_is_compared_with_a_steered_one_pair_by_pair() -> None:
    found = measure([*pairs_of_positions(), long(CONSTANT, task="c")])
    (comparison,) = found.comparisons
    assert (comparison.method, comparison.trait, comparison.pairs) == ("steered", "impatience", 2)
    values = {name: tuple(e.value for e in three) for name, three in comparison.figures.items()}
    assert values["consistent"] == (1, 0, -1)
    assert values["fade"] == (0, 1, 1)
    assert values["broken"] == pytest.approx((0, 2 / 24, 2 / 24))
    assert values["broken, last third"] == pytest.approx((0, 2 / 8, 2 / 8))
    assert [p.value.value for p in comparison.broken] == [0.0] * 10 + [0.5, 0.5]
    broken = next(c for c in found.curves if not c.trait and c.method == "steered (positions=all)")
    assert [p.value.value for p in broken.points] == [0.0] * 10 + [0.5, 0.5]


def test_without_both_positions_nothing_is_compared() -> None:
    assert measure([long(CONSTANT)]).comparisons == ()


# ---- Raters


def judged(shown: Shown, rater: str, verdict: Any, trait: str = "impatience") -> Verdict:
    return Verdict(*side_of(shown[0]), rater, trait, verdict)


def test_raters_verdicts_become_the_same_shares() -> None:
    shown = [long(CONSTANT, task=task) for task in "abcd"]
    said = [judged(s, "ann", v) for s, v in zip(shown, ("fade", "stable", "escalate", "absent"), strict=True)]
    found = consistency([d for d, _ in shown], None, said)
    (only,) = found.rows
    assert only.rater == "ann" and only.cases == 4
    shares = {name: share.value for name, share in only.shares.items()}
    assert (shares["consistent"], shares["fade"], shares["escalate"]) == (0.5, 0.25, 0.25)
    assert math.isnan(shares["rises"]) and math.isnan(only.end.value)


def test_raters_verdicts_on_neutral_dialogues_are_their_null() -> None:
    calm = neutrals()[0]
    found = measure(
        [long(CONSTANT), *neutrals()], judged(long(CONSTANT), "ann", "stable"), judged(calm, "ann", "stable")
    )
    ann = {(r.method, r.neutral): r for r in found.rows if r.rater == "ann"}
    assert ann["unsteered", True].shares["consistent"].value == 1
    assert {r.rater for r in found.rows} == {"ann", INSTRUMENTS}


def test_verdicts_on_other_dialogues_traits_or_short_ones_do_not_count() -> None:
    with pytest.raises(EvaluationError, match="none of the 2 verdicts"):
        measure(
            [long(CONSTANT), long([1.0] * 5, trial=1)],
            judged(long(CONSTANT), "ann", "fade", trait="skeptical"),
            judged(long([1.0] * 5, trial=1), "ann", "fade"),
        )


# ---- Figures, commands


def test_the_curves_are_drawn_and_described(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = consistency_figure(measure([long(FADING), *pairs_of_positions()[2:], *neutrals()]))
    assert "steered, impatience: from 1.00 to 0.00." in alt_text(figure)
    assert "unsteered, neutral, impatience" in alt_text(figure)
    assert len(figure.axes) == 2  # impatience, broken turns
    assert save_figure(figure, tmp_path / "curves.svg").read_text().startswith("<?xml")
    with pytest.raises(ReportError, match="svg"):
        save_figure(figure, tmp_path / "curves.docx")


def test_a_method_may_have_dollar_signs_in_its_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = consistency_figure(measure([long(FADING, method="$\\frac$"), *neutrals()]))
    assert "frac$" in save_figure(figure, tmp_path / "curves.svg").read_text()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model, pairs of its own, and dialogues in which one customer says x all the time."""
    folder = tmp_path_factory.mktemp("work")
    save_folder(tiny_model("llama"), folder / "model")
    for trait, letter in (("impatience", "x"), ("skeptical", "z")):
        pairs = lettered_set(trait, letter).model_dump(mode="json", exclude_none=True)
        for pair in pairs["pairs"]:
            pair["context"] = [{turn["speaker"]: turn["text"]} for turn in pair["context"]]
        (folder / f"{trait}.yaml").write_text(to_yaml(pairs))
    shown = [long(CONSTANT, task=task) for task in "ab"]
    louder = [replace(d, turns=tuple(replace(t, text=f"{t.text} xxxxxxxx it") for t in d.turns)) for d, _ in shown]
    write(folder / "steered.jsonl", louder)
    write(folder / "unsteered.jsonl", [d for d, _ in neutrals()])
    return folder


def consistency_command(work: Path, *more: Any) -> Result:
    pairs = [f"--pairs={work / name}.yaml" for name in ("impatience", "skeptical")]
    files = [work / "steered.jsonl", work / "unsteered.jsonl"]
    model = ["--model", work / "model", "--device", "cpu", "--traits", "impatience,skeptical"]
    return run("consistency", *files, *pairs, *model, *more)


def test_consistency_runs_from_end_to_end_and_goes_on_from_its_cache(work: Path) -> None:
    pytest.importorskip("matplotlib")
    out, cache = work / "out.json", work / "scores.jsonl"
    result = consistency_command(work, "--cache", cache, "--plot", work / "curves.svg", "--out", out)
    assert result.exit_code == 0, result.output
    assert "unsteered, neutral" in result.stdout
    found = json.loads(out.read_text())
    assert {r["method"]: r["cases"] for r in found["rows"]} == {"steered": 2, "unsteered": 10}
    assert found["yardsticks"][0]["calibrated"] is True
    assert found["made_by"]["instruments"]["model_fingerprint"] and found["made_by"]["versions"]
    assert [header["made"] for header in found["made_by"]["headers"]] == ["steered", "unsteered"]
    assert (work / "curves.svg").is_file()
    size = cache.stat().st_size
    again = work / "again.json"
    assert consistency_command(work, "--cache", cache, "--out", again).exit_code == 0
    assert cache.stat().st_size == size
    assert json.loads(again.read_text())["rows"] == found["rows"]


def test_consistency_counts_judgments_without_a_model(work: Path, tmp_path: Path) -> None:
    _, dialogues = read_transcripts([work / "steered.jsonl"])
    said = [
        Verdict(*side_of(dialogue), rater, "impatience", verdict)
        for rater, verdicts in {"ann": ("fade", "stable"), "ben": ("fade", "escalate")}.items()
        for dialogue, verdict in zip(dialogues, verdicts, strict=True)
    ]
    people = write_judgments(tmp_path / "people.jsonl", "consistency", said, {"who": "us"})
    arguments = ["consistency", work / "steered.jsonl", "--no-instruments", "--judgments", people]
    result = run(*arguments, "--out", tmp_path / "out.json")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "out.json").read_text())
    assert [(r["rater"], r["consistent"]["value"], r["fade"]["value"]) for r in found["rows"]] == [
        ("ann", 0.5, 0.5),
        ("ben", 0.5, 0.5),
    ]
    assert found["agreement"][0]["raters"] == ["ann", "ben"]
    assert found["agreement"][0]["alpha"]["value"] == pytest.approx(1 - 3 * 2 / 10)  # fade twice, one disagreement
    assert found["made_by"]["judgments"][0]["made_by"] == {"who": "us"}
    assert run("consistency", work / "steered.jsonl", "--no-instruments").exit_code == 2


def test_consistency_says_what_is_wrong_before_a_model_is_loaded(work: Path) -> None:
    result = run("consistency", work / "steered.jsonl", "--least-turns", 40, "--model", "no-such-model")
    assert isinstance(result.exception, EvaluationError)
    assert "steered 12" in str(result.exception)


def test_conduct_runs_on_dialogues_and_runs_alike(work: Path, tmp_path: Path) -> None:
    harness = write_run(tmp_path / "run.jsonl", episode("hurry", "Now!"), episode("unsteered", "Hi."))
    out = tmp_path / "out.json"
    result = run("conduct", work / "steered.jsonl", harness, "--by", "condition", "--out", out)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    assert [(group["method"], group["condition"]) for group in found["groups"]] == [
        ("steered", "impatience-high"),
        ("steered-user", "impatience-high"),
        ("unsteered", "neutral"),
    ]
    assert found["groups"][1]["differences"]["words"]["value"] == 0
    assert found["groups"][1]["figures"]["facts told"]["value"] is None
    assert set(found["definitions"]) == set(DEFINITIONS)
    for name in PARTS:
        assert name in result.stdout


def test_the_commands_name_a_missing_file(tmp_path: Path) -> None:
    for command in ("conduct", "consistency"):
        result = run(command, tmp_path / "gone.jsonl")
        assert isinstance(result.exception, EvaluationError) and "gone.jsonl" in str(result.exception)
