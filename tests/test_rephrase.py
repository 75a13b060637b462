"""A benchmark's user turns in other words: every entity comes back or the turn stays; any file can be checked."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import FastAPI
from samples import random_basis
from scripted import Script, ScriptedEngine
from serving import serving
from tiny import save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.entity_audit import audit
from traitbasis.errors import EvaluationError, OverLimitError, RequestError, TraitSpecError
from traitbasis.grammar import text_grammar
from traitbasis.metrics.entities import entities, in_order, invented, kept
from traitbasis.metrics.rewording import fault, returned
from traitbasis.model import LanguageModel
from traitbasis.rephrase import FORMAT, LocalWriter, Settings, _literal, _pattern, rephrase_file, rephrase_turn
from traitbasis.simulator import UserSimulator
from traitbasis.static_turns import read_records

DATA = Path(__file__).parent / "data"
BFCL = DATA / "bfcl_multi_turn.json"
MOVE = "Move 'final_report.pdf' within document directory to 'temp' directory in document."
MOVED = "Come on, move 'final_report.pdf' out of the document directory to 'temp' already!"


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


def bfcl_turns() -> list[str]:
    records = [json.loads(line) for line in BFCL.read_text("utf-8").splitlines()]
    return [message["content"] for record in records for turn in record["question"] for message in turn]


def wrote(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return path


def texts(found: Sequence[Any]) -> list[str]:
    return [entity.text for entity in found]


# --- entities ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "precision", "recall"), [("written", 0.91, 0.85), ("bfcl", 0.98, 0.97)])
def test_the_rules_find_what_people_labelled(name: str, precision: float, recall: float) -> None:
    hits = wanted = found = 0
    for row in yaml.safe_load((DATA / "entities.yaml").read_text("utf-8"))[name]:
        said, labelled = {entity.text for entity in entities(row["text"])}, set(row["entities"])
        hits, wanted, found = hits + len(said & labelled), wanted + len(labelled), found + len(said)
    assert hits / found >= precision and hits / wanted >= recall, (hits, found, wanted)
    assert wanted > 70


def test_a_turn_keeps_itself_and_invents_nothing() -> None:
    for turn in bfcl_turns():
        assert kept(turn, turn)[1] == [] and invented(turn, turn) == [] and in_order(turn, turn)


@pytest.mark.parametrize(
    ("original", "rewritten"),
    [
        ("Buy 20 shares", "twenty shares, now"),
        ("Buy twenty-one shares", "21 shares"),
        ("Set it to 1,000", "1000 it is"),
        ("Pay $5", "pay 5 dollars"),
        ("Convert 10,000 RMB", "ten thousand yuan"),
        ("Spend 1.5k USD", "$1500"),
        ("Fill 30 liters", "30 litres"),
        ("Lower it by 15%", "15 percent less"),
        ("Fly on November 25th 2026", "fly on 2026-11-25"),
        ("Fly on the 3rd of May", "fly on May 3"),
        ("Call at 5:30 pm", "17:30 is when you call"),
        ("Open 'notes.txt'", "open notes.txt"),
        ("Search for “red shoes”", "search 'red shoes'"),
        ("Fly to San Francisco", "fly to san francisco"),
        ("Mail Bob@Example.org", "mail bob@example.org"),
        ("Meet at Zeta Corp's office", "meet at ZETA CORP"),
    ],
)
def test_what_is_said_differently_is_kept_by_its_value(original: str, rewritten: str) -> None:
    found, lost = kept(original, rewritten)
    assert found and not lost
    assert not invented(original, rewritten)


@pytest.mark.parametrize(
    ("original", "rewritten"),
    [
        ("Open 'Notes.txt'", "open notes.txt"),  # file systems know case
        ("Buy AAPL", "buy aapl"),
        ("My token is abc123XYZ", "the token is abc123xyz"),
        ("Pay $5", "pay 5"),
        ("Pay $5", "pay 5 euros"),
        ("Fill 30 liters", "fill 30 gallons"),
        ("Order 83912 is late", "order 83,912 is late"),  # an identifier is no amount
        ("Open 'log.txt'", "open mylog.txt"),
        ("Open report.txt", "open report.txt.bak"),
        ("Buy 10 shares", "buy 100 shares"),
        ("Fly on November 25th 2026", "fly on November 25th"),
        ("Call at 5:30 pm", "call at 5:30"),
        ("Tag @maria_k", "tag maria"),
        ("Post 'Safety first! Check tires.'", "post 'Safety first! Check your tires.'"),
        ("Go to the workspace directory", "go to that directory"),
        ("PIN 0042", "PIN 42"),
    ],
)
def test_what_means_something_else_is_lost(original: str, rewritten: str) -> None:
    assert kept(original, rewritten)[1]


def test_an_invented_number_name_or_file_is_told_but_shouting_is_not() -> None:
    assert texts(invented("Buy some shares", "Buy 5 shares of TSLA for Bob from data.csv")) == [
        "5",
        "TSLA",
        "Bob",
        "data.csv",
    ]
    assert invented("please move my file to the archive", "MOVE MY FILE TO THE ARCHIVE RIGHT NOW!!") == []
    assert invented("Book a flight to Oslo", "Oslo. Now. PLEASE book it.") == []


def test_names_that_changed_places_are_noticed() -> None:
    assert in_order("Fly from Oslo to Rome on May 3rd", "On May 3rd, fly from Oslo to Rome")
    assert not in_order("Fly from Oslo to Rome", "Fly to Rome from Oslo")


# --- does it still ask for the same? ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewritten", "name"),
    [
        (MOVED, None),
        ("I need 'final_report.pdf' moved from the document directory into 'temp', please.", None),
        ("", "empty"),
        (MOVE.upper(), "unchanged"),
        ("Move 'final_report.pdf' to another place in the document directory.", "lost"),
        ("Move 'final_report.pdf' from document to 'temp' and keep 3 copies.", "invented"),
        ("Move 'temp' to 'final_report.pdf' in the document directory.", "order"),
        ("I will move 'final_report.pdf' from the document directory to 'temp', please wait.", "does_it_itself"),
        ("Don't move 'final_report.pdf' from document directory to 'temp', please.", "negated"),
        ("Please delete 'final_report.pdf' in the document directory, then 'temp'.", "other_action"),
        ("'final_report.pdf' is in document and 'temp' is boring.", "asks_nothing"),
        ("Sure, I can help you with that! 'final_report.pdf' in document goes to 'temp'.", "role_flip"),
        ("In your own words, move 'final_report.pdf' in the document directory to 'temp'.", "echo"),
        ("Move 'final_report.pdf' " + "and " * 5 + "document to 'temp'", "broken"),
    ],
)
def test_each_rule_objects_to_what_it_is_for(rewritten: str, name: str | None) -> None:
    assert fault(MOVE, rewritten) == name


def test_the_rules_let_a_turn_pass_with_a_word_more_and_stop_another_turn() -> None:
    """Independent of any model: another turn of the benchmark is what no rewritten turn may be."""
    turns = bfcl_turns()
    assert [t for t in turns if fault(t, f"Come on, {t[0].lower()}{t[1:]}")] == []
    others = [random.Random(3).choice([o for o in turns if o != turn]) for turn in turns]
    assert [t for t, other in zip(turns, others, strict=True) if fault(t, other) is None] == []


def test_meaning_is_how_many_words_come_back_themselves_or_as_their_like() -> None:
    assert returned("Purchase the cheapest ticket", "buy the cheap one") == pytest.approx(2 / 3)
    assert returned("Show it", "It is hot today") == 0
    assert returned("'a.txt'", "whatever") == 1.0


# --- one turn ---------------------------------------------------------------------------------------------------------


@dataclass
class Scripted:
    """Writes what it was told to, the last text from then on; remembers what it was asked."""

    says: Sequence[str]
    spec: str = "impatience-1.5"
    workers: int = 1
    can_constrain: bool = True
    asked: list[tuple[Any, int, str | None]] = field(default_factory=list)

    @property
    def made_by(self) -> Mapping[str, Any]:
        return {"model": "scripted"}

    def write(self, messages: Sequence[Mapping[str, str]], seed: int, length: int, pattern: str | None) -> str:
        self.asked.append((messages, seed, pattern))
        return self.says[min(len(self.asked), len(self.says)) - 1]


class Hasty:
    """Says every turn again in a hurry; from the `dies_at`-th turn on it is killed."""

    spec, workers, can_constrain = "impatience-1.5", 3, False
    made_by: Mapping[str, Any] = {"model": "hasty"}

    def __init__(self, dies_at: int = 10**6) -> None:
        self.turns: list[str] = []
        self._dies_at, self._lock = dies_at, threading.Lock()

    def write(self, messages: Sequence[Mapping[str, str]], seed: int, length: int, pattern: str | None) -> str:
        with self._lock:
            if len(self.turns) >= self._dies_at:
                raise KeyboardInterrupt
            turn = re.search(r"now:\n\n(.*)\n\nSay it", messages[0]["content"], re.DOTALL)
            assert turn
            self.turns.append(turn[1])
        return f"Hurry up, {turn[1]}"


def test_a_turn_is_drawn_again_until_everything_is_kept() -> None:
    writer = Scripted(["Move it, now!", "Move 'final_report.pdf' to 'temp' and buy 3 more", MOVED])
    found = rephrase_turn(writer, MOVE, tries=5)
    assert (found.text, found.status, found.draws) == (MOVED, "rephrased", 3)
    assert found.faults == {"lost": 2} and found.entities == ("final_report.pdf", "document", "temp")
    assert len({seed for _, seed, _ in writer.asked}) == 3
    assert [seed for _, seed, _ in writer.asked][:2] == [
        seed for _, seed, _ in _asked(Scripted(["no"]), tries=2)
    ]  # the same turn and seed draw alike


def _asked(writer: Scripted, tries: int) -> list[Any]:
    rephrase_turn(writer, MOVE, tries=tries)
    return writer.asked


def test_a_turn_that_no_draw_keeps_stays_as_it_was_and_says_what_was_lost() -> None:
    writer = Scripted(["Move something", "Move 'final_report.pdf' out of document, please", "What?"])
    found = rephrase_turn(writer, MOVE, tries=4)
    assert (found.text, found.status, found.draws) == (MOVE, "kept_original", 4)
    assert found.best == {"fault": "lost", "lost": ["temp"], "invented": []}
    assert "text" not in found.note and found.note["status"] == "kept_original"


def test_the_customer_is_shown_what_it_said_before() -> None:
    writer = Scripted([MOVED])
    rephrase_turn(writer, MOVE, [("Hi!", "Sort 'a.txt', quick.")], agent="It is sorted.", tries=1)
    messages = writer.asked[0][0]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "Sort 'a.txt', quick." and messages[3]["content"] == "It is sorted."
    assert MOVE in messages[0]["content"] and "final_report.pdf, document, temp" in messages[0]["content"]


def test_quotation_marks_around_the_whole_are_not_part_of_what_is_said() -> None:
    assert rephrase_turn(Scripted([f'"{MOVED}"']), MOVE, tries=1).text == MOVED


def test_a_pattern_is_tried_only_after_the_free_draws_and_marked() -> None:
    writer = Scripted(["no", "no", MOVED])
    found = rephrase_turn(writer, MOVE, tries=2, constrain=True)
    assert found.status == "constrained" and found.draws == 3
    assert [pattern is None for _, _, pattern in writer.asked] == [True, True, False]


def test_a_turn_that_does_not_fit_the_model_stays() -> None:
    class Short(Scripted):
        def write(self, *_: Any) -> str:
            raise RequestError("the conversation has 9999 tokens; the context of tiny is 2048")

    found = rephrase_turn(Short([""]), MOVE)
    assert found.status == "kept_original" and found.best and "9999 tokens" in found.best["fault"]
    writer = Scripted([MOVED])
    assert rephrase_turn(writer, f"{MOVE} " * 200).status == "kept_original" and not writer.asked
    assert rephrase_turn(writer, " \n").status == "empty" and not writer.asked


# --- with the engine --------------------------------------------------------------------------------------------------


def test_every_draw_is_steered_and_goes_to_the_engine_once(lm: LanguageModel) -> None:
    engine = ScriptedEngine("Your order has been cancelled.", Script(["Move 'final"], "length"), MOVED)
    with UserSimulator(lm, random_basis(lm, "impatience", "skeptical"), engine=engine) as simulator:
        writer = LocalWriter(simulator, "impatience-high", sampling={"temperature": 0.5})
        found = rephrase_turn(writer, MOVE, tries=5)
    assert found.status == "rephrased" and found.draws == 3 == len(engine.requests)
    assert all(request.additions and request.guide is None for request in engine.requests)
    assert engine.requests[0].sampling.temperature == 0.5
    assert writer.spec == "impatience-1.5" and writer.made_by["traits"] == {"impatience": 1.5}
    assert writer.made_by["model_fingerprint"] == lm.fingerprint


def test_traits_that_are_not_served_are_refused_at_once(lm: LanguageModel) -> None:
    with UserSimulator(lm, random_basis(lm, "impatience"), engine=ScriptedEngine("x")) as simulator:
        with pytest.raises(TraitSpecError, match="unknown trait 'impatiance'"):
            LocalWriter(simulator, "impatiance-high")
        simulator._over_limit = lambda intensities: "too much"  # type: ignore[method-assign]
        with pytest.raises(OverLimitError, match="too much"):
            LocalWriter(simulator, "impatience-high")
        assert LocalWriter(simulator, "impatience-high", force=True).spec == "impatience-1.5"


TURNS = [
    MOVE,
    "Post 'It's here: C:\\new (50%)!' and tag @maria_k with #launch, please.",
    "Buy 150 shares of AAPL at $64.50 for Zoë Müller before November 25th 2026.",
    "Show me what is in /home/zoe/notes.txt; my id is card_1496.",
    "Cancel it.",
]


@pytest.fixture(scope="module")
def noise(lm: LanguageModel) -> Iterator[UserSimulator]:
    """A random model, which says nothing but noise by itself."""
    with UserSimulator(lm, random_basis(lm, "impatience")) as simulator:
        yield simulator


@pytest.mark.parametrize("turn", TURNS)
def test_a_random_model_names_every_entity_when_it_is_held_to_them(noise: UserSimulator, turn: str) -> None:
    writer, messages = LocalWriter(noise, "impatience-high"), [{"role": "user", "content": "Hi!"}]
    text = writer.write(messages, 7, len(turn), _pattern(turn))
    assert text and kept(turn, text)[1] == [] and in_order(turn, text), text
    assert [e for e in invented(turn, text) if e.kind not in ("name", "code")] == []  # free words are letters
    assert text == writer.write(messages, 7, len(turn), _pattern(turn))


def test_constrained_text_is_steered(noise: UserSimulator) -> None:
    messages = [{"role": "user", "content": "Hi!"}]
    said = {
        spec: LocalWriter(noise, spec).write(messages, 7, len(MOVE), _pattern(MOVE)) for spec in ("impatience", "off")
    }
    assert said["impatience"] != said["off"]
    assert all(re.fullmatch(r".*'final_report\.pdf'.*'temp' directory.*", text) for text in said.values())


@pytest.mark.parametrize("said", ["/home/x", "C:\\new", "50% (net)", "a/b\\c", "Größe ☕", "1e5", '{"a": [1]}'])
def test_text_by_a_pattern_is_that_text_and_nothing_else(lm: LanguageModel, said: str) -> None:
    guide, ids = text_grammar(lm.tokenizer, _literal(said)).guide([2], silent=False), list[int]()
    while not guide.done:
        allowed = guide.allowed()
        assert allowed is not None and allowed.sum() == 1  # a token is a byte, and no other one is in the pattern
        ids.append(int(allowed.nonzero()))
        guide.take(ids[-1])
    assert lm.tokenizer.decode([i for i in ids if i != 2]) == said and not guide.silent


def test_a_pattern_that_is_none_is_refused(lm: LanguageModel) -> None:
    with pytest.raises(RequestError, match="the pattern cannot be used"):
        text_grammar(lm.tokenizer, "(a")


# --- a file -----------------------------------------------------------------------------------------------------------


def test_a_rephrased_benchmark_is_the_benchmark_with_other_user_turns(tmp_path: Path) -> None:
    records = read_records(BFCL)
    found = rephrase_file(Hasty(), records, tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert lines == found and len(lines) == 8
    for before, after in zip((r.data for r in records), lines, strict=True):
        note = after.pop("traitbasis")
        for old, new in zip(before["question"], after["question"], strict=True):
            assert [m["content"] for m in new] == [f"Hurry up, {m['content']}" for m in old]
        assert {**after, "question": before["question"]} == before
        assert note["format"] == FORMAT and note["spec"] == "impatience-1.5" and note["made_by"] == {"model": "hasty"}
        assert [turn["status"] for turn in note["turns"]] == ["rephrased"] * len(
            [m for t in before["question"] for m in t]
        )
    assert [line["id"] for line in lines] == [record.id for record in records]
    assert lines[-1]["question"][3] == []  # a turn in which nobody speaks stays one
    loss = audit(records, read_records(tmp_path / "out.jsonl"))
    assert loss.lost.value == 0 and loss.entities > 40 and loss.changed == loss.turns == loss.statuses["rephrased"]


@pytest.mark.parametrize("dies_at", [3, 11, 20])
def test_a_killed_run_goes_on_and_gives_the_same_file(tmp_path: Path, dies_at: int) -> None:
    records = read_records(BFCL)
    rephrase_file(Hasty(), records, tmp_path / "whole.jsonl")
    path = tmp_path / "killed.jsonl"
    with pytest.raises(KeyboardInterrupt):
        rephrase_file(Hasty(dies_at), records, path)
    for half in (path, tmp_path / "killed.jsonl.turns"):
        with half.open("a", encoding="utf-8") as file:
            file.write('{"id": "half a li')
    again, told = Hasty(), list[int]()
    rephrase_file(again, records, path, done=told.append)
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(again.turns) == len(bfcl_turns()) - dies_at  # no turn is lost, none is written twice
    assert sum(told) == len(bfcl_turns()) and [file.name for file in tmp_path.iterdir() if "turns" in file.name] == []


def test_a_file_that_was_made_otherwise_is_left_alone(tmp_path: Path) -> None:
    records, path = read_records(BFCL)[:2], tmp_path / "out.jsonl"
    rephrase_file(Hasty(), records, path)
    content = path.read_bytes()
    with pytest.raises(EvaluationError, match=r"other settings \(tries\)"):
        rephrase_file(Hasty(), records, path, Settings(tries=3))
    with pytest.raises(EvaluationError, match=r"other settings \(another benchmark\)"):
        rephrase_file(Hasty(), read_records(wrote(tmp_path / "b.jsonl", {"messages": []}, {"messages": []})), path)
    with pytest.raises(EvaluationError, match="1 records more"):
        rephrase_file(Hasty(), records[:1], path)
    assert path.read_bytes() == content
    path.write_text('{"id": 1}\n', "utf-8")
    with pytest.raises(EvaluationError, match="line 1: no rephrased record"):
        rephrase_file(Hasty(), records, path)
    with pytest.raises(EvaluationError, match="cannot be held to a pattern"):
        rephrase_file(Hasty(), records, tmp_path / "c.jsonl", Settings(constrain=True))


@pytest.mark.parametrize("content", ["notes of mine", '{"id": 1}', "[1, 2", "notes\nof mine"])
def test_somebody_elses_file_is_refused_as_it_was(tmp_path: Path, content: str) -> None:
    """No byte is taken away, whatever its last line looks like."""
    path = tmp_path / "out.jsonl"
    path.write_text(content, "utf-8")
    with pytest.raises(EvaluationError, match="no rephrased record"):
        rephrase_file(Hasty(), read_records(BFCL)[:1], path)
    assert path.read_text("utf-8") == content


def test_two_runs_do_not_rephrase_into_one_file(tmp_path: Path) -> None:
    """Every record would be there twice."""
    records, path, refused = read_records(BFCL)[:2], tmp_path / "out.jsonl", list[bool]()

    def again(turns: int) -> None:
        if not refused:
            refused.append(True)
            with pytest.raises(EvaluationError, match="another run is writing"):
                rephrase_file(Hasty(), records, path)

    assert len(rephrase_file(Hasty(), records, path, done=again)) == 2 and refused
    assert len(path.read_text("utf-8").splitlines()) == 2


def test_a_spec_that_is_no_file_name_is_told(tmp_path: Path) -> None:
    result = run(
        BFCL, "--traits", "../a", "--traits", "b", "--out", tmp_path / "o.jsonl", "--url", "http://127.0.0.1:9"
    )
    assert result.exit_code == 2 and "file's name" in result.output


def test_messages_and_plain_texts_are_read_and_written_in_their_form(tmp_path: Path) -> None:
    talk = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Open 'a.txt', please."},
        {"role": "assistant", "content": "It is open."},
        {"role": "user", "content": "Show the last 3 lines."},
    ]
    source = wrote(tmp_path / "m.jsonl", {"messages": talk, "tag": 7}, talk)
    writer = Hasty()
    first, second = rephrase_file(writer, read_records(source), tmp_path / "m.out")
    assert first["tag"] == 7 and first["messages"] == second["messages"]
    assert first["messages"][1]["content"] == "Hurry up, Open 'a.txt', please." and first["messages"][2] == talk[2]
    (tmp_path / "t.txt").write_text("Open 'ü.txt' ☕ please.\n\nLock all 4 doors.\n", "utf-8")
    lines = rephrase_file(Hasty(), read_records(tmp_path / "t.txt"), tmp_path / "t.out")
    assert [line["text"] for line in lines] == ["Hurry up, Open 'ü.txt' ☕ please.", "Hurry up, Lock all 4 doors."]
    assert audit(read_records(tmp_path / "t.txt"), read_records(tmp_path / "t.out")).lost.value == 0


def test_odd_records_pass_through(tmp_path: Path) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    odd = [
        {"id": "none", "question": []},
        {"id": "system", "question": [[{"role": "system", "content": "Be brief."}]]},
        {"id": "empty", "question": [[{"role": "user", "content": "  "}], [picture], []]},
        {"id": "huge", "question": [[{"role": "user", "content": "Lock 3 doors. " * 2000}]]},
    ]
    writer = Hasty()
    found = rephrase_file(writer, read_records(wrote(tmp_path / "odd.jsonl", *odd)), tmp_path / "out.jsonl")
    for before, after in zip(odd, found, strict=True):
        note = after.pop("traitbasis")
        assert after == before
        assert [turn["status"] for turn in note["turns"]] == {"empty": ["empty"], "huge": ["kept_original"]}.get(
            str(before["id"]), []
        )
    assert writer.turns == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"question": [[{"role": "user", "content": "a"}]]}\n{"question"\n', "line 2: no JSON"),
        ('{"question": [7]}\n', "record 1: no record of format bfcl"),
        ('{"question": [["a"]]}\n', "'a' is no message"),
        ('{"prompt": "a"}\n', "its first record has prompt"),
        ("[]", "is empty"),
    ],
)
def test_what_is_no_benchmark_is_told_by_file_and_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, "utf-8")
    with pytest.raises(EvaluationError, match=re.escape(str(path))) as caught:
        read_records(path)
    assert message in str(caught.value)
    with pytest.raises(EvaluationError, match="no benchmark at"):
        read_records(tmp_path / "missing.json")


def test_settings_out_of_range_are_refused() -> None:
    for settings in ({"tries": 0}, {"meaning": float("nan")}, {"meaning": 2}):
        with pytest.raises(EvaluationError, match="is "):
            Settings(**settings)  # type: ignore[arg-type]


# --- the audit, and the command ---------------------------------------------------------------------------------------


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["rephrase", *map(str, arguments)])


def test_check_counts_what_any_file_has_lost(tmp_path: Path) -> None:
    """Counted by hand: 6 entities, 2 lost (``b.txt``, 20), both in the first of three tasks; 1 invented (7)."""

    def task(name: str, *turns: str) -> dict[str, Any]:
        return {"id": name, "question": [[{"role": "user", "content": turn}] for turn in turns]}

    original = wrote(
        tmp_path / "a.json",
        task("x", "Copy 'a.txt' to 'b.txt'.", "Show 20 lines."),
        task("y", "Buy 3 of AAPL."),
        task("z", "Go to Oslo."),
        task("gone", "Wait."),
    )
    (tmp_path / "b.json").write_text(  # one list, in another order, without our field
        json.dumps([task("z", "go to oslo"), task("y", "three AAPL, 7 times"), task("x", "copy a.txt!", "Show lines")])
    )
    found = audit(read_records(original), read_records(tmp_path / "b.json"))
    assert (found.tasks, found.turns, found.entities, found.missing_tasks) == (3, 4, 6, 1)
    assert found.lost.value == pytest.approx(2 / 6) and found.tasks_with_loss.value == pytest.approx(1 / 3)
    assert found.lost.low <= found.lost.value <= found.lost.high
    assert found.tasks_with_invention.value == pytest.approx(1 / 3)
    assert found.by_kind["quoted"] == (2, 1) and found.by_kind["number"] == (2, 1) and found.by_kind["name"] == (1, 0)
    assert found.words_ratio.value == pytest.approx((2 + 2 + 4 + 3) / (4 + 3 + 4 + 3))
    result = run("--check", original, tmp_path / "b.json", "--out", tmp_path / "report.json")
    assert result.exit_code == 0 and "33.3%" in result.output and "b.txt" in result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["lost"]["value"] == 0.3333 and report["original"] == "a.json"


@pytest.mark.parametrize("note", [None, 1, [], {}, {"turns": 1.5}, {"turns": [None, {"status": 1}, {}]}])
def test_check_takes_a_note_of_another_shape_for_none(tmp_path: Path, note: Any) -> None:
    record = {"messages": [{"role": "user", "content": "Open 'a.txt'."}], "traitbasis": note}
    records = read_records(wrote(tmp_path / "a.jsonl", record))
    assert set(audit(records, records).statuses) <= {"1"}


def test_check_takes_turns_that_are_missing_for_lost(tmp_path: Path) -> None:
    one = wrote(tmp_path / "a.jsonl", {"id": 1, "question": [[{"role": "user", "content": "Buy 3."}]] * 2})
    two = wrote(tmp_path / "b.jsonl", {"id": 1, "question": [[{"role": "user", "content": "Get 3."}]]})
    found = audit(read_records(one), read_records(two))
    assert found.missing_turns == 1 and found.lost.value == 0.5
    with pytest.raises(EvaluationError, match="no record in common"):
        audit(read_records(one), read_records(wrote(tmp_path / "c.jsonl", {"id": 2, "question": []})))


def test_the_command_writes_a_file_for_each_spec_with_a_summary(tmp_path: Path, lm: LanguageModel) -> None:
    folder = save_folder(lm, tmp_path / "tiny-llama")
    random_basis(lm, "impatience").save(tmp_path / "basis.safetensors")
    result = run(
        BFCL, "--traits", "impatience-high", "--traits", "off", "--out", tmp_path / "out.jsonl", "--tries", "1",
        "--limit", "1", "--model", folder, "--basis", tmp_path / "basis.safetensors", "--dtype", "float32",
    )  # fmt: skip
    assert result.exit_code == 0, (result.output, result.exception)
    for spec in ("impatience-high", "off"):
        line = json.loads((tmp_path / f"out.{spec}.jsonl").read_text("utf-8"))
        summary = json.loads((tmp_path / f"out.{spec}.jsonl.summary.json").read_text("utf-8"))
        assert line["id"] == "multi_turn_base_0" and line["traitbasis"]["spec"] == summary["spec"]
        assert summary["lost"]["value"] == 0 and summary["statuses"] == {"kept_original": 4}  # noise keeps nothing
        assert summary["tries"] == 1 and summary["made_by"]["model_fingerprint"] == lm.fingerprint


@pytest.mark.parametrize(
    "arguments",
    [[BFCL], [BFCL, "--traits", "off"], ["--check", BFCL], ["--check", BFCL, BFCL, "--traits", "off"], [BFCL, BFCL]],
)
def test_arguments_that_do_not_go_together_are_told(arguments: list[str | Path]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and "--check" in result.output


def test_an_endpoint_by_url_is_asked_for_the_traits_in_its_models_name(tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    app = FastAPI()

    @app.post("/v1/chat/completions")
    def answer(body: dict[str, Any]) -> dict[str, Any]:
        asked.append(body)
        turn = re.search(r"now:\n\n(.*)\n\nSay it", body["messages"][0]["content"], re.DOTALL)
        assert turn
        text = "..." if len(asked) == 1 else f"Quick: {turn[1]}"
        finish = "length" if len(asked) == 2 else "stop"
        message = {"role": "assistant", "content": text}
        return {
            "id": "a", "object": "chat.completion", "created": 0, "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        }  # fmt: skip

    with serving(app) as url:
        result = run(
            BFCL, "--traits", "impatience-high", "--out", tmp_path / "out.jsonl", "--limit", "1", "--url", f"{url}/v1",
            "--workers", "1",
        )  # fmt: skip
        assert result.exit_code == 0, (result.output, result.exception)
        constrained = run(BFCL, "--traits", "off", "--out", tmp_path / "c.jsonl", "--url", f"{url}/v1", "--constrain")
        assert isinstance(constrained.exception, EvaluationError) and not (tmp_path / "c.jsonl").exists()
    assert {body["model"] for body in asked} == {"steered-user@impatience-high"}
    assert len({body["seed"] for body in asked}) == len(asked) == 6
    line = json.loads((tmp_path / "out.jsonl").read_text("utf-8"))
    first = line["traitbasis"]["turns"][0]
    assert first["draws"] == 3 and first["faults"] == {"empty": 1, "cut": 1}
    assert line["traitbasis"]["made_by"]["url"] == f"{url}/v1"
    assert line["question"][0][0]["content"].startswith("Quick: Move 'final_report.pdf'")
