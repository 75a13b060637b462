"""Judges of whole dialogues, against a scripted one on a real socket."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from talks import (
    DEFINITIONS,
    HOSTILE,
    MEANINGS,
    Oracle,
    customers,
    material,
    oracle_at,
    pick_the_louder,
    says,
    talk,
)

from traitbasis.errors import EvaluationError, JudgeError
from traitbasis.evaluation.consistency import ALL, consistency
from traitbasis.evaluation.judges import (
    LlmRater,
    course_prompt,
    raters_from,
    read_choice,
    read_course,
    read_traits,
    realism_prompt,
    traits_prompt,
)
from traitbasis.evaluation.judgments import (
    Judgment,
    Verdict,
    courses_of,
    judged,
    side_of,
)
from traitbasis.evaluation.realism import (
    pairs_of,
    realism,
)
from traitbasis.evaluation.sheets import make_sheet


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Oracle]]:
    with oracle_at() as found:
        yield found


@pytest.fixture
def oracle(server: tuple[str, Oracle]) -> tuple[str, Oracle]:
    server[1].reset()
    return server


def test_a_judge_is_asked_in_both_orders_and_the_louder_wins(oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    judge.answer = pick_the_louder
    pairs = [(talk("calm", f"t{i}", f"lamp {i}."), talk("loud", f"t{i}", f"LAMP {i}!")) for i in range(5)]
    seen: list[int] = []
    found = LlmRater(url, "wise").realism(pairs, progress=seen.append)
    assert len(judge.prompts) == sum(seen) == 10
    (rated,) = realism(found)
    assert (rated.rater, rated.twice, rated.ties, rated.biased) == ("wise", 5, 0, False)
    assert rated.ratings["loud"].win_rate.value == 1


def test_a_judge_that_always_says_a_sees_no_difference_and_is_called_biased(oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    judge.answer = says(choice="A")
    found = LlmRater(url, "wise").realism(pairs_of([talk(m, t, f"{m} {t}") for m in "ab" for t in "tu"]))
    (rated,) = realism(found)
    assert rated.ties == rated.pairs == rated.inconsistent == 2 and rated.biased
    assert rated.ratings["a"].elo.value == rated.ratings["b"].elo.value


def test_unreadable_answers_are_counted_and_their_pair_is_left_out(oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    judge.answer = lambda prompt, model: "Hm." if "lamp 1" in customers(material(prompt)["A"]) else '{"choice": "B"}'
    pairs = [(talk("a", f"t{i}", f"lamp {i}."), talk("b", f"t{i}", f"chair {i}.")) for i in range(3)]
    rater = LlmRater(url, "wise")
    found = rater.realism(pairs)
    assert {preference.task for preference in found} == {"t0", "t2"} and len(found) == 4
    assert rater.record | {"url": ""} == {"rater": "wise", "url": "", "model": "wise", "asked": 6, "unreadable": 1}
    judge.answer = lambda prompt, model: "Hm."
    with pytest.raises(JudgeError, match="none of 6 answers"):
        LlmRater(url, "wise").realism(pairs)


def test_dialogues_in_which_the_same_is_said_are_a_tie_without_asking(oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    same = (talk("a", "t", "Yes.", "No."), talk("b", "t", "Yes.", "No."))
    found = LlmRater(url, "wise").realism([same])
    assert [preference.choice for preference in found] == ["tie", "tie"] and not judge.prompts


def test_traits_and_verdicts_are_the_judges_by_dialogue(oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    dialogues = [
        talk("m", "t", "Now!", traits={"impatience": "high"}),
        talk("m", "u", "Hello."),
        talk("m", "v", "Hm?", traits={"impatience": "low", "skeptical": "low"}),
    ]
    answers = {"Now!": {"Impatience": "HIGH", "skeptical": "none"}, "Hello.": {}, "Hm?": {"anger": "low"}}
    judge.answer = lambda prompt, model: json.dumps({"traits": answers[customers(material(prompt))]})
    rater = LlmRater(url, "wise", name="W")
    assert rater.traits(dialogues, MEANINGS) == [
        Judgment(*side_of(dialogues[0]), "W", {"impatience": "high"}),
        Judgment(*side_of(dialogues[1]), "W", {}),
    ]
    assert rater.model.unreadable == 1, "anger was not offered"
    judge.answer = says(verdict="Escalate")
    verdicts = rater.consistency(dialogues, DEFINITIONS)
    both = ["impatience", "skeptical"]
    asked = [(dialogues[0], ["impatience"]), (dialogues[1], both), (dialogues[2], both)]  # the second is neutral
    assert verdicts == [
        Verdict(*side_of(dialogue), "W", trait, "escalate") for dialogue, traits in asked for trait in traits
    ]


def test_a_neutral_customer_is_judged_for_every_trait_that_others_intend() -> None:
    """So is the unsteered method, whatever condition it stood in for; the metric takes both for its null."""
    dialogues = [
        talk("m", "t", "Now!", traits={"impatience": "high"}),
        talk("m", "t", "Hm?", traits={"skeptical": "low"}),
        talk("m", "t", "Hello."),
        talk("unsteered", "t", "Hi.", traits={"anger": "low"}),
    ]
    asked = [(dialogue.said[0], trait) for dialogue, trait in courses_of(judged("consistency", dialogues))]
    both = ("impatience", "skeptical")
    assert asked == [("Now!", both[0]), ("Hm?", both[1]), *((said, t) for said in ("Hello.", "Hi.") for t in both)]
    verdicts = [Verdict(*side_of(d), "W", trait, "absent") for d, trait in courses_of(dialogues)]
    rows = consistency(dialogues, verdicts=verdicts, least_turns=1).rows
    assert {(row.method, row.neutral, row.cases) for row in rows if row.trait == ALL} == {
        ("m", False, 2),
        ("m", True, 2),
        ("unsteered", True, 2),
    }
    sheet = make_sheet("consistency", dialogues, DEFINITIONS, items=99)
    assert {(item.talks[0][1][1], item.trait) for item in sheet.items} == set(asked)
    for given in (dialogues[2:3], dialogues[3:]):
        with pytest.raises(EvaluationError, match="with traits"):
            judged("consistency", given)


def test_no_name_of_a_judge_tells_a_password() -> None:
    """Two judges of one model's name go by their whole specs, and names stand in every judgment."""
    specs = [f"http://me:pass@word@{host}/v1#m" for host in "ab"]
    raters = raters_from(specs, "sk-secret", None)
    assert [rater.name for rater in raters] == ["http://a/v1#m", "http://b/v1#m"]
    assert "word" not in json.dumps([rater.record for rater in raters])
    with pytest.raises(JudgeError) as caught:
        raters_from([f"{specs[0].partition('#')[0]}#"], None, None)
    assert "http://a/v1" in str(caught.value) and "word" not in str(caught.value)


def test_answers_are_kept_and_a_run_goes_on(oracle: tuple[str, Oracle], tmp_path: Path) -> None:
    url, judge = oracle
    judge.answer = says(traits={"impatience": "low"})
    dialogues = [talk("m", f"t{i}", f"Lamp {i}.") for i in range(4)]
    cache = tmp_path / "answers.jsonl"
    LlmRater(url, "wise", cache=cache).traits(dialogues[:3], MEANINGS)
    again = LlmRater(url, "wise", cache=cache)
    assert len(again.traits(dialogues, MEANINGS)) == 4 and again.model.asked == 1 and len(judge.prompts) == 4
    assert LlmRater(url, "wise", cache=cache).traits(dialogues, MEANINGS) and len(judge.prompts) == 4
    both = raters_from([f"{url}#one", f"{url}#two", f"{url}/#one"], None, cache)
    assert [rater.name for rater in both] == [f"{url}#one", "two", f"{url}/#one"]
    with pytest.raises(JudgeError, match="URL#MODEL"):
        raters_from([url], None, None)


@pytest.mark.parametrize("ask", ["traits", "course", "realism"])
def test_no_text_leaves_the_material_and_no_instruction_is_in_it(ask: str) -> None:
    dialogue = talk("secretive", "t", HOSTILE, "{definitions}", traits={"impatience": "high"})
    prompt = {
        "traits": lambda: traits_prompt(dialogue, MEANINGS),
        "course": lambda: course_prompt(dialogue, "impatience", *DEFINITIONS["impatience"]),
        "realism": lambda: realism_prompt(dialogue, dialogue),
    }[ask]()
    told = material(prompt)
    said = [turn["text"] for turn in (told["A"] if ask == "realism" else told) if turn["speaker"] == "customer"]
    assert said == [HOSTILE, "{definitions}"] and prompt.count("<dialogue>\n") == 1
    assert not re.search(r"secret|steered|W77120", prompt), "neither the instruction nor the method"
    assert HOSTILE not in prompt.replace(json.dumps(HOSTILE), "") and "Answer with JSON and nothing else" in prompt
    assert ask == "realism" or DEFINITIONS["impatience"][0] in prompt


def test_no_trait_is_always_offered_first() -> None:
    first = Counter(
        re.findall(r"^- (\w+):", traits_prompt(talk("m", "t", f"Lamp {i}."), MEANINGS), re.MULTILINE)[0]
        for i in range(40)
    )
    assert min(first["impatience"], first["skeptical"]) > 8


@pytest.mark.parametrize(
    ("answer", "traits"),
    [
        (
            '{"reason": "", "traits": {"impatience": "low", "Skeptical": "high"}}',
            {"impatience": "low", "skeptical": "high"},
        ),
        ('<think>{"traits": {"impatience": "high"}}</think>```json\n{"traits": {}}\n```', {}),
        ('{"traits": {}} or rather {"traits": {"impatience": "medium"}}', {"impatience": "medium"}),
        ('{"traits": "none"}', {}),
        ('{"traits": []}', {}),
        ('{"traits": {"impatience": "absent"}}', {}),
        ('{"traits": {"impatience": "very"}}', None),
        ('{"traits": {"impatience": 2}}', None),
        ('{"traits": ["impatience"]}', None),
        ('{"traits": {"rude": "low"}}', None),
        ('{"traits": {"impatience": "low"', None),
        ("impatience: high", None),
        ("", None),
    ],
)
def test_traits_are_read_and_never_guessed(answer: str, traits: dict[str, str] | None) -> None:
    assert read_traits(answer, known=MEANINGS) == traits


def test_verdicts_and_choices_are_read_and_never_guessed() -> None:
    assert [read_course(f'{{"verdict": "{v}"}}') for v in ("fade", " STABLE ", "escalate", "absent")] == [
        "fade", "stable", "escalate", "absent",
    ]  # fmt: skip
    assert [read_choice(f'{{"choice": "{c}"}}') for c in ("A", "b", "tie")] == ["first", "second", "tie"]
    for answer in (
        '{"verdict": "fades or not"}',
        '{"verdict": 1}',
        "fade",
        "A",
        '{"choice": "AB"}',
        '{"choice": null}',
    ):
        assert read_course(answer) is None and read_choice(answer) is None
