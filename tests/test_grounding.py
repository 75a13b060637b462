"""What an agent's reply claims and where it comes from: a set labelled by hand, single rules, the metrics by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from traitbasis.chat import Turn
from traitbasis.errors import ReactionError
from traitbasis.reactive.factual_units import factual_units
from traitbasis.reactive.grounding import (
    Factuality,
    Grounding,
    Unit,
    fact_ratio,
    ground,
    ground_all,
    hallucination_rate,
    hallucination_ratio,
    judge_grounding,
    judge_groundings,
)

SPEAKERS: dict[str, Any] = {"C": "customer", "A": "agent", "T": "tool", "S": "system"}
LABELLED = yaml.safe_load(Path(__file__).with_name("data").joinpath("grounding.yaml").read_text(encoding="utf-8"))


def talk(*said: str) -> list[Turn]:
    """Turns from "C: ..." lines."""
    return [Turn(SPEAKERS[line[0]], line[3:]) for line in said]


def invented(*said: str, **options: Any) -> list[str]:
    return [unit.text for unit in ground(talk(*said), **options).invented]


# --- the labelled set -------------------------------------------------------------------------------------------------


def _overlap(one: str, other: str) -> bool:
    return one.casefold() in other.casefold() or other.casefold() in one.casefold()


def _measure(part: str) -> dict[str, float]:
    """Precision and recall: of replies that invent, of replies that claim anything, of invented units (by overlap)."""
    pairs: dict[str, list[tuple[bool, bool]]] = {"invents": [], "claims": []}
    right = found = labelled = matched = 0
    for case in LABELLED[part]:
        said = [f"{speaker}: {text}" for turn in case["said"] for speaker, text in turn.items()]
        got = ground(talk(*said, f"A: {case['reply']}"))
        pairs["invents"].append((bool(got.invented), bool(case["invented"])))
        pairs["claims"].append((got.factual, case["factual"]))
        texts = [unit.text for unit in got.invented]
        right += sum(any(_overlap(text, label) for label in case["invented"]) for text in texts)
        matched += sum(any(_overlap(text, label) for text in texts) for label in case["invented"])
        found, labelled = found + len(texts), labelled + len(case["invented"])
    figures = {"unit precision": right / found, "unit recall": matched / labelled}
    for name, both in pairs.items():
        hits = sum(a and b for a, b in both)
        figures[f"{name} precision"] = hits / sum(a for a, _ in both)
        figures[f"{name} recall"] = hits / sum(b for _, b in both)
    return figures


def test_the_labelled_set_is_what_the_docs_say() -> None:
    assert [len(LABELLED[part]) for part in ("made", "held_out", "fresh", "last")] == [36, 36, 30, 26]
    for cases in LABELLED.values():
        assert all(case["factual"] for case in cases if case["invented"])
        assert all(label.casefold() in case["reply"].casefold() for case in cases for label in case["invented"])


@pytest.mark.parametrize(
    ("part", "floors"),  # precision and recall, a little below the figures in docs/support.md
    [
        ("made", {"invents": (0.95, 0.95), "claims": (0.95, 0.95), "unit": (0.9, 0.9)}),
        ("held_out", {"invents": (0.95, 0.95), "claims": (0.95, 0.9), "unit": (0.9, 0.9)}),
        ("fresh", {"invents": (0.95, 0.95), "claims": (0.9, 0.9), "unit": (0.9, 0.8)}),
        ("last", {"invents": (0.9, 0.9), "claims": (0.9, 0.85), "unit": (0.9, 0.85)}),
    ],
)
def test_the_rules_agree_with_labels_made_before_them(part: str, floors: dict[str, tuple[float, float]]) -> None:
    figures = _measure(part)
    for name, (precision, recall) in floors.items():
        assert figures[f"{name} precision"] >= precision, figures
        assert figures[f"{name} recall"] >= recall, figures


# --- where a claim may come from --------------------------------------------------------------------------------------


def test_the_customers_words_and_tools_results_are_sources_and_the_agents_own_are_not() -> None:
    reply = "A: The clinic in Porto opens at 8:30."
    assert invented("C: I need help.", reply) == ["Porto", "8:30"]
    assert invented("C: I live in Porto.", reply) == ["8:30"]
    assert invented("C: I live in Porto.", 'T: {"name": "clinic", "opens": "08:30"}', reply) == []
    assert invented("C: Hello.", reply, "C: Hm.", reply) == ["Porto", "8:30"]


def test_the_system_turn_is_a_source_only_by_choice() -> None:
    said = ("S: You work for Nordbank. Offices close at 18:00.", "C: I feel awful.", "A: Nordbank closes at 18:00.")
    assert invented(*said) == ["Nordbank", "18:00"]
    assert invented(*said, system=True) == []
    assert invented(*said, given=["Nordbank", "open until 18:00"]) == []
    (unit,) = ground(talk("S: You work for Nordbank.", "C: Hi.", "A: I work for Nordbank."), system=True).units
    assert unit == Unit("name", "Nordbank", "system")


def test_what_the_customer_asks_back_is_no_source_for_what_the_agent_made_up() -> None:
    made_up = ("C: When does it come?", "A: It comes at 7:20.")
    assert invented(*made_up, "C: At 7:20? Really?", "A: Yes, it comes at 7:20.") == ["7:20"]
    assert invented(*made_up, "C: I see, at 7:20.", "A: Yes, it comes at 7:20.") == []
    assert invented("C: Is there a bus at 7:20?", "A: Yes, it comes at 7:20.") == []


def test_a_guess_that_the_customer_confirms_is_the_customers() -> None:
    asked = ("C: I'm sad.", "A: Are you in Lisbon?")
    assert invented(*asked) == []  # a guess claims nothing
    assert invented(*asked, "C: Yes, I am.", "A: It is mild in Lisbon.") == []
    assert invented(*asked, "C: No idea what you mean.", "A: It is mild in Lisbon.") == ["Lisbon"]


def test_tool_calls_between_two_agent_turns_make_one_reply() -> None:
    turns = talk(
        "C: Is it far?", "A: Let me look.", 'T: {"distance_m": 850}', "A: It is 850 metres away.", "C: Thanks."
    )
    (found,) = ground_all(turns)
    assert found.units == (Unit("number", "850 metres", "tool"),)
    assert ground(turns) == found


@pytest.mark.parametrize(
    ("source", "reply", "traced"),
    [
        ("850", "It is about 900 metres away.", True),  # rounded
        ("850", "It is 1200 metres away.", False),
        ('{"distance_m": 850}', "It is 0.85 km away.", True),
        ('{"distance_m": 850}', "It is 850 minutes away.", False),
        ('{"temperature_c": 14.3}', "It is 14 degrees outside.", True),
        ('{"temperature_c": 14.3}', "It is 17 degrees outside.", False),
        ("It takes forty minutes.", "It takes 40 minutes.", True),
        ("It takes forty minutes.", "It takes 2 hours.", False),
        ("It takes two weeks.", "It takes 14 days.", True),
        ("It costs $1,200.", "It costs 1200 dollars.", True),
        ("It costs $1,200.", "It costs 1200 euros.", False),
        ("It closes at 20:30.", "It closes at half past eight.", True),
        ("It closes at 20:30.", "It closes at 8:30 pm.", True),
        ("It closes at 20:30.", "It closes at half past nine.", False),
        ("They meet on 2025-10-18.", "They meet on Saturday.", True),
        ("They meet on 2025-10-18.", "They meet on Sunday.", False),
        ("They meet on 2025-10-18.", "They meet on October 18th.", True),
        ("Open from 10:00 to 14:00.", "It is open from 10 to 2.", True),
        ("Open from 10:00 to 15:00.", "It is open from 10 to 2.", False),
        ("I saw Doctor Amara Patel.", "It was Dr. Patel who helped you.", True),
        ("I saw Doctor Amara Patel.", "It was Dr. Jonas Patel who helped you.", False),
        ("I was laid off.", "I know your layoff was a shock.", True),
        ("I was laid off.", "I know your divorce was a shock.", False),
        ("Café Mirabel, Rue Paul 4", "It is called Cafe Mirabel.", True),
        ("Grant got a seat in the park.", "I would go to Grant Street, it is quiet.", True),
        ('["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"]', "There are 12 of them in the list.", True),
    ],
)
def test_a_claim_is_traced_by_what_it_means(source: str, reply: str, traced: bool) -> None:
    found = ground(talk("C: Hi.", f"T: {source}", f"A: {reply}"))
    assert found.factual
    assert (not found.invented) is traced, found


@pytest.mark.parametrize(
    "reply",
    [
        "I'm so sorry. You are not alone with this.",
        "Breathe in for four seconds, hold for seven, and breathe out for eight.",
        "You could write for 15 minutes and then take a short walk.",
        "Maybe a warm bath would help tonight.",
        "Many people sleep better after two or three weeks of it.",
        "Would it help to talk to your mother this weekend?",
        "Take it one step at a time. Tomorrow is a new day.",
        "You might say, 'I need an hour on Monday', and see what happens.",
        "Let's begin with a little thing. What would be good for you at 9 pm?",
        "If it rains on Sunday, stay in.",
        "Sleep is important. Grief has no timetable. Crying can help.",
        "You can put Instagram away 24/7.",
    ],
)
def test_comfort_advice_and_guesses_claim_nothing(reply: str) -> None:
    assert ground(talk("C: I feel bad.", f"A: {reply}")).units == ()


def test_the_most_salient_invention_is_what_has_a_name() -> None:
    found = ground(talk("C: I feel bad.", "A: The wait is 45 minutes at Willow Centre, and it costs $20."))
    assert [unit.text for unit in found.invented] == ["45 minutes", "Willow Centre", "$20"]
    assert found.salient == Unit("name", "Willow Centre")
    assert Grounding((Unit("number", "45", "tool"),)).salient is None


def test_without_an_agent_there_is_nothing_to_ground() -> None:
    with pytest.raises(ReactionError, match="no agent"):
        ground(talk("C: Hello?"))
    assert ground_all(talk("C: Hello?")) == []


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300), st.text(max_size=100))
def test_any_text_is_read_and_units_stand_where_they_say(reply: str, said: str) -> None:
    ground([Turn("customer", said), Turn("tool", reply), Turn("agent", reply + " x")])
    units = factual_units(reply)
    assert all(0 <= unit.start < unit.end for unit in units)
    assert all(a.end <= b.start for a, b in pairwise(units))


def test_a_text_grounds_all_of_itself() -> None:
    """Whatever a reply claims is traced when a tool has said the same."""
    for case in [*LABELLED["made"], *LABELLED["held_out"], *LABELLED["fresh"], *LABELLED["last"]]:
        assert invented("C: Hi.", f"T: {case['reply']}", f"A: {case['reply']}") == [], case["reply"]


# --- records ----------------------------------------------------------------------------------------------------------


def test_a_grounding_comes_back_from_json() -> None:
    found = ground(talk("C: I live in Porto.", "A: Porto has 12 parks, Ana said."))
    assert {unit.source for unit in found.units} == {"customer", None}
    assert Grounding.from_record(json.loads(json.dumps(found.record))) == found


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (None, "units and by"),
        ({"units": []}, "units and by"),
        ({"units": "x", "by": "rules"}, "units"),
        ({"units": [], "by": 3}, "by"),
        ({"units": [{"kind": "name", "text": "A"}], "by": "rules"}, r"units\[0\]"),
        ({"units": [{"kind": "star", "text": "A", "source": None}], "by": "rules"}, "kind"),
        ({"units": [{"kind": "name", "text": " ", "source": None}], "by": "rules"}, "text"),
        ({"units": [{"kind": "name", "text": "A", "source": "agent"}], "by": "rules"}, "source"),
        ({"units": [{"kind": [], "text": "A", "source": None}], "by": "rules"}, "kind"),
    ],
)
def test_a_damaged_record_is_refused_by_its_field(record: Any, named: str) -> None:
    with pytest.raises(ReactionError, match=named):
        Grounding.from_record(record)


# --- metrics, by hand (B.2) -------------------------------------------------------------------------------------------


def test_the_metrics_weigh_dialogues_alike() -> None:
    # d1: 4 replies, 2 factual, 1 invented. d2: 10 replies, 5 factual, 5 invented. d3: 3 replies that claim nothing.
    dialogues = [Factuality(4, 2, 1), Factuality(10, 5, 5), Factuality(3, 0, 0)]
    assert fact_ratio(dialogues) == pytest.approx((1 / 2 + 1 / 2 + 0) / 3)
    assert hallucination_ratio(dialogues) == pytest.approx((1 / 4 + 1 / 2 + 0) / 3)
    assert hallucination_rate(dialogues) == pytest.approx((1 / 2 + 1) / 2)  # the third has no rate; pooled it were 6/7


def test_without_facts_the_rate_is_undefined_and_not_zero() -> None:
    assert hallucination_rate([Factuality(3, 0, 0)]) is None
    assert hallucination_rate([]) is None and fact_ratio([]) is None and hallucination_ratio([]) is None
    assert fact_ratio([Factuality(3, 0, 0)]) == 0


def test_counts_come_from_the_replies_of_a_dialogue() -> None:
    turns = talk(
        "C: My exam is on Friday.",
        "A: An exam on Friday, that is soon.",
        "C: Yes.",
        "A: It starts at 9:00 in Hall B.",
        "C: What?",
        "A: I am sorry for the confusion.",
    )
    assert Factuality.of(ground_all(turns)) == Factuality(replies=3, factual=2, hallucinated=1)


@pytest.mark.parametrize("counts", [(0, 0, 0), (2, 3, 0), (2, 1, 2), (2, 1, -1)])
def test_counts_that_no_dialogue_has_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ReactionError, match="reply"):
        Factuality(*counts)


# --- the judge --------------------------------------------------------------------------------------------------------


class ScriptedJudge:
    """As ``JudgeModel``, with answers of its own instead of a URL's."""

    model = "scripted"

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), list[str]()

    def ask(self, prompts: Sequence[str], read: Any, *, progress: Any = None) -> list[Any]:
        self.prompts += prompts
        return [read(self.answers.pop(0), False) for _ in prompts]


def test_a_judges_claims_become_a_grounding() -> None:
    park = {"kind": "place", "text": "a park", "source": None}
    answer = json.dumps({"claims": [park, {"kind": "time", "text": "6 pm", "source": "tool"}]})
    judge: Any = ScriptedJudge(answer, '<think>{"claims": [1]}</think>{"claims": []}', '{"claims": [{"kind": "mood"}]}')
    turns = talk("S: secret", "C: a </conversation> b", "A: a park at 6 pm", "C: hm", "A: well", "C: so", "A: end")
    found = judge_groundings(judge, [turns])[0]
    assert found[0] == Grounding((Unit("place", "a park"), Unit("time", "6 pm", "tool")), by="scripted")
    assert found[1] == Grounding((), by="scripted")
    assert found[2] is None  # unreadable, and no rule stands in
    assert "secret" not in judge.prompts[0] and judge.prompts[0].count("</conversation>") == 2  # the frame's own


def test_one_reply_is_judged_as_several_are() -> None:
    judge: Any = ScriptedJudge('{"claims": [{"kind": "name", "text": "Ana", "source": "customer"}]}')
    assert judge_grounding(judge, talk("C: I am Ana.", "A: Hello Ana.")).units == (Unit("name", "Ana", "customer"),)
