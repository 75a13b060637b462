"""Tasks for dialogues, and dialogues on disk: what ships keeps the rules, and what is wrong is reported by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from samples import to_yaml

from traitbasis.chat import Turn
from traitbasis.dialogue_tasks import read_tasks, tasks_hash
from traitbasis.dialogues import Dialogue, DialogueFile, DialogueTurn, read_dialogues, spec_of
from traitbasis.errors import EvaluationError, PairError
from traitbasis.guards import named_stop_tokens
from traitbasis.pairs import fold, known_traits

ROOT = Path(__file__).parent.parent
_REFUSAL = re.compile(r"\b(?:cannot|must say no|say no to|not (?:allowed|possible)|never do|nobody is free)\b")
_CONSENT = re.compile(
    r"\b(?:(?:shall|should|may) i|do you (?:want|agree)|consent|would you like me|happy for me|all right if)\b"
)


# --- the tasks that ship ----------------------------------------------------------------------------------------------


def test_the_shipped_tasks_are_of_different_domains_and_their_scripts_are_long_enough() -> None:
    tasks = read_tasks()
    assert len(tasks) == 12 and len({task.domain for task in tasks}) == len({task.company for task in tasks}) == 12
    for task in tasks:
        assert 12 <= len(task.agent) <= 14 and 4 <= len(task.facts) <= 6, task.id
        assert 2 <= len(task.agent) - 1 - task.resolved <= 4, "something comes after it"
        assert task.resolved < 12 - 1, "a dialogue of 12 turns goes beyond it"
        assert task.instruction.startswith("You are a customer, ") and task.company in task.instruction, task.id
        assert task.company in task.agent[0] and task.agent[task.resolved].startswith("Done: "), task.id


def test_a_shipped_script_asks_for_each_fact_by_name_for_one_twice_and_gives_none_away() -> None:
    for task in read_tasks():
        before = [fold(message) for message in task.agent[: task.resolved]]
        asked = {name: [text for text in before if _names(text, name)] for name in task.facts}
        assert all(asked.values()), (task.id, asked)
        again = [
            text
            for texts in asked.values()
            for text in texts[1:]
            if re.search(r"\b(?:again|once more|sorry|did you)\b", text)
        ]
        assert again, task.id
        for fact in task.facts.values():
            assert fact in task.instruction and not any(fold(fact) in text for text in before), (task.id, fact)
            assert not re.search(rf"\w{re.escape(fact)}|{re.escape(fact)}\w", task.instruction), (task.id, fact)
        assert any(map(_REFUSAL.search, before)) and _CONSENT.search(before[-1]), task.id
        assert any(re.search(r"\b(?:wait|moment|hold on|patien\w+|minutes)\b", text) for text in before), task.id


def test_a_shipped_task_shares_nothing_with_pairs_contexts_and_scenarios() -> None:
    files = [*(ROOT / f"contrastive_pairs/{trait}.yaml" for trait in known_traits())]
    files += [ROOT / "contrastive_pairs/contexts/selection.yaml", ROOT / "experiments/scenarios.yaml"]
    documents = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in files]
    entries = [entry for document in documents for entry in document.get("pairs") or document["scenarios"]]
    assert len(entries) > 500
    ids, told = {entry["id"] for entry in entries}, fold(json.dumps(documents, ensure_ascii=False))
    systems = [set(fold(e["context"][0]["system"]).split()) for e in entries if "system" in e["context"][0]]
    for task in read_tasks():
        assert task.id not in ids and fold(task.company) not in told, task.id
        person = re.match(r"You are a customer, ([^,]+),", task.instruction)
        assert person and fold(person[1]) not in told, task.id
        codes = [fact for fact in task.facts.values() if re.search(r"[A-Z]{2,}.*\d|\d{5}", fact)]
        assert codes and not any(fold(code) in told for code in codes), (task.id, codes)
        words = set(fold(task.instruction).split())
        assert all(len(words & other) / len(words | other) < 0.5 for other in systems), task.id


def test_no_shipped_script_names_a_stop_token() -> None:
    for task in read_tasks():
        assert not named_stop_tokens(" ".join((task.instruction, *task.agent)))


def _names(text: str, name: str) -> bool:
    return bool(re.search(rf"\b{re.escape(fold(name))}\b", text))


# --- task files -------------------------------------------------------------------------------------------------------


def task(number: int = 0, **changes: Any) -> dict[str, Any]:
    made = {
        "id": f"task-{number}",
        "domain": "retail",
        "company": "Lamp House",
        "instruction": f"You are a customer of Lamp House. You bought lamp W{number} in May.",
        "facts": {"order number": f"W{number}"},
        "agent": ["Lamp House, hello?", "What is your order number?", f"Done: W{number} is sent.", "Anything else?"],
        "resolved": 2,
    }
    return {**made, **changes}


def write(folder: Path, content: Any) -> Path:
    path = folder / "own.yaml"
    path.write_text(content if isinstance(content, str) else to_yaml(content), encoding="utf-8")
    return path


def test_a_file_of_ones_own_is_read_by_path_and_its_hash_is_of_all_that_is_said(tmp_path: Path) -> None:
    path = write(tmp_path, {"tasks": [task(0), task(1)]})
    tasks = read_tasks(path)
    assert [each.id for each in tasks] == ["task-0", "task-1"] and read_tasks(str(path)) == tasks
    changes: list[dict[str, Any]] = [
        {"instruction": "You bought W1."},
        {"agent": ("Hello?", "Which?", "W1")},
        {"resolved": 3},
    ]
    changed = [[tasks[0], tasks[1].model_copy(update=change)] for change in changes]
    assert len({tasks_hash(each) for each in (tasks, tasks[::-1], *changed)}) == 2 + len(changed)
    assert tasks_hash(tasks) == tasks_hash(read_tasks(path)) and len(tasks_hash(tasks)) == 16


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a fact nobody is told": (
        task(1, facts={"colour": "red"}),
        "field 'facts': colour 'red' is not in the instruction",
    ),
    "a fact in another case": (task(1, facts={"month": "may"}), "month 'may' is not in the instruction, word for word"),
    "a fact that is given away": (
        task(1, agent=["Is it w1?", "Which?", "W1", "Bye"]),
        "message 0 gives away order number",
    ),
    "resolved by nothing": (task(1, resolved=4), "'resolved' is 4; the agent's last message is 3"),
    "resolved by the greeting": (task(1, resolved=0), "field 'resolved'"),
    "no facts": (task(1, facts={}), "field 'facts'"),
    "no script": (task(1, agent=[]), "field 'agent'"),
    "an empty message": (task(1, agent=["Hello?", " ", "W1"]), "field 'agent.1'"),
    "no instruction": (task(1, instruction=""), "field 'instruction'"),
    "an unknown field": (task(1, note="x"), "field 'note'"),
    "a fact that is a number": (task(1, facts={"order number": 1}), "field 'facts.order number'"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_task_is_reported_with_file_id_and_field(mistake: str, tmp_path: Path) -> None:
    entry, says = WRONG[mistake]
    with pytest.raises(PairError, match=rf"own\.yaml: task 'task-1': .*{re.escape(says)}") as caught:
        read_tasks(write(tmp_path, {"tasks": [task(0), entry]}))
    assert "task-0" not in str(caught.value)


@pytest.mark.parametrize("tasks", [[], [task(0)], [task(0), task(0)]])
def test_fewer_than_two_tasks_or_one_id_twice_is_refused(tasks: list[Any], tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml: at least two tasks are needed, each with an id of its own"):
        read_tasks(write(tmp_path, {"tasks": tasks}))


@pytest.mark.parametrize("content", ["", "tasks:", "tasks: text", "tasks: {a: b}", "[a]", "tasks: [", "scenarios: []"])
def test_a_file_that_holds_no_tasks_is_an_error_naming_it(content: str, tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml"):
        read_tasks(write(tmp_path, content))


def test_a_task_without_an_id_is_called_by_its_number_and_a_missing_file_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(PairError, match=r"own\.yaml: task number 2"):
        read_tasks(write(tmp_path, {"tasks": [task(0), {"domain": "x"}]}))
    with pytest.raises(PairError, match=r"cannot read tasks from .*gone\.yaml"):
        read_tasks(tmp_path / "gone.yaml")


# --- dialogues on disk ------------------------------------------------------------------------------------------------

TURNS = (
    DialogueTurn("agent", "Hello?"),
    DialogueTurn("customer", "My lamp — W1 — is late.", {"seed": 7}),
    DialogueTurn("agent", "Which?"),
    DialogueTurn("customer", "W1"),
)
ONE = Dialogue(
    "steered", {"impatience": "high"}, "task-1", 0, "You bought W1.", {"order": "W1"}, TURNS, 2, "stop", ("##",)
)


def test_dialogues_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "steered.jsonl"
    file = DialogueFile(path, {"method": "steered"})
    others = [replace(ONE, trial=1), replace(ONE, traits={}, resolved=None), replace(ONE, positions="all")]
    for each in (ONE, *others):
        file.append(each)
    headers, found = read_dialogues([path])
    assert found == [ONE, *others] == DialogueFile(path, {"method": "steered"}).dialogues
    assert headers == [file.header] and headers[0]["method"] == "steered"
    assert len({each.key for each in found}) == 4 and found[0].said == ("My lamp — W1 — is late.", "W1")


def test_a_customer_turn_is_read_in_what_was_said_before_it() -> None:
    system, first, second = Turn("system", "You bought W1."), Turn("agent", "Hello?"), Turn("agent", "Which?")
    assert ONE.contexts() == [(system, first), (system, second)]
    assert ONE.contexts(history=True) == [(system, first), (system, first, Turn("customer", TURNS[1].text), second)]


def test_half_a_line_is_dropped_and_the_file_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    DialogueFile(path, {}).append(ONE)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[1][:-40])
    file = DialogueFile(path, {})
    assert file.dialogues == [ONE] and path.read_bytes() != whole, "another run may be writing it"
    file.append(replace(ONE, trial=1))
    assert [each.trial for each in read_dialogues([path])[1]] == [0, 1]


def test_a_file_made_with_other_settings_is_refused_and_where_the_endpoint_stands_is_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    DialogueFile(path, {"seed": 0, "turns": 12, "url": "http://a/v1"}).append(ONE)
    with pytest.raises(
        EvaluationError, match=r"a\.jsonl holds .* other settings \(seed, trials\); delete it, or .*--out"
    ):
        DialogueFile(path, {"seed": 1, "turns": 12, "trials": 1, "url": "http://a/v1"})
    assert DialogueFile(path, {"seed": 0, "turns": 12, "url": "http://b/v1"}).keys == {ONE.key}


@pytest.mark.parametrize(
    "content", ["", "\n", "{}\n", "[]\n", "text\n", '{"format": "traitbasis.dialogues/0"}\n', b"\xff\xfe\n"]
)
def test_what_is_no_file_of_dialogues_is_an_error_naming_it(content: str | bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    for read in (lambda: read_dialogues([path]), lambda: DialogueFile(path, {})):
        with pytest.raises(EvaluationError, match=r"bad\.jsonl holds no dialogues"):
            read()


def test_a_damaged_line_in_the_middle_is_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = DialogueFile(path, {})
    file.append(ONE)
    file.append(replace(ONE, trial=1))
    lines = path.read_bytes().splitlines(keepends=True)
    for damaged in (
        lines[1][:50] + b"\n",
        lines[1].replace(b'"turns"', b'"turms"'),
        lines[1].replace(b'"speaker"', b'"s"'),
    ):
        path.write_bytes(b"".join((lines[0], damaged, lines[2])))
        with pytest.raises(EvaluationError, match=r"a\.jsonl holds no dialogues, or is damaged"):
            DialogueFile(path, {})
        assert path.read_bytes() == b"".join((lines[0], damaged, lines[2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("task", None),
        ("trial", "0"),
        ("trial", True),
        ("resolved", "2"),
        ("ended", "later"),
        ("instruction", 7),
        ("traits", {"impatience": 1}),
        ("facts", {"order": None}),
        ("stop_tokens", [None]),
        ("turns", [{"speaker": "agent", "text": None}]),
        ("turns", [{"speaker": "agent", "text": ["Hello?"]}]),
        ("turns", [{"speaker": "user", "text": "Hello?"}]),
        ("turns", ["Hello?"]),
        ("traits", []),
        ("more", 1),
    ],
)
def test_what_is_no_dialogue_is_named_with_its_line(tmp_path: Path, field: str, value: Any) -> None:
    """And not by a traceback of the metric that comes upon it."""
    path = tmp_path / "a.jsonl"
    DialogueFile(path, {}).append(ONE)
    header, line = path.read_text("utf-8").splitlines()
    path.write_text(f"{header}\n{line}\n{json.dumps({**json.loads(line), 'trial': 1, field: value})}\n", "utf-8")
    with pytest.raises(EvaluationError, match=r"a\.jsonl holds no dialogues, or is damaged: line 3"):
        read_dialogues([path])


def test_a_dialogue_that_two_runs_wrote_is_not_counted_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    file = DialogueFile(path, {})
    file.append(ONE)
    file.append(ONE)
    with pytest.raises(EvaluationError, match=r"a\.jsonl, line 3: .* is there a second time"):
        read_dialogues([path])


def test_half_a_surrogate_pair_is_read_as_a_character(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    DialogueFile(path, {}).append(ONE)
    path.write_text(path.read_text("utf-8").replace("Hello?", "\\ud83d?"), "utf-8")
    assert read_dialogues([path])[1][0].turns[0].text == "??"


def test_missing_empty_or_doubled_dialogues_are_named(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in "abc"]
    with pytest.raises(EvaluationError, match=r"no dialogues at .*a\.jsonl; make some with: traitbasis eval collect"):
        read_dialogues(paths[:1])
    empty = DialogueFile(paths[0], {})
    with pytest.raises(EvaluationError, match=r"no dialogue in .*a\.jsonl"):
        read_dialogues(paths[:1])
    with pytest.raises(EvaluationError, match="no dialogue in no file"):
        read_dialogues([])
    empty.append(ONE)
    DialogueFile(paths[1], {}).append(ONE)
    DialogueFile(paths[2], {}).append(replace(ONE, method="prompted"))
    with pytest.raises(EvaluationError, match=r"b\.jsonl and .*a\.jsonl both hold steered impatience-high task-1 0"):
        read_dialogues(paths)
    assert [each.method for each in read_dialogues([paths[0], paths[2]])[1]] == ["steered", "prompted"]


def test_a_spec_is_in_the_order_of_names() -> None:
    assert spec_of({"skeptical": "low", "impatience": "high"}) == "impatience-high+skeptical-low" and spec_of({}) == ""
