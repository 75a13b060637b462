"""Realism and its raters on disk: judgments, pairs, faults, the discriminator, and the commands from end to end."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from talks import (
    KINDS,
    Oracle,
    filled,
    many,
    oracle_at,
    pick_the_louder,
    says,
    talk,
    write_dialogues,
)
from tiny import save_folder, tiny_model
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.dialogues import FORMAT, Dialogue, DialogueTurn
from traitbasis.errors import EvaluationError, TraitBasisError
from traitbasis.evaluation import discriminator
from traitbasis.evaluation.discriminator import discriminate, hand_written, read_reference, read_turns
from traitbasis.evaluation.judgments import (
    AnyJudgment,
    Judgment,
    Kind,
    Preference,
    Verdict,
    agreement,
    player_of,
    read_headers,
    read_judgments,
    side_of,
    votes_of,
    write_judgments,
)
from traitbasis.evaluation.realism import (
    FAULTS,
    MARGIN,
    MODEL_FREE,
    Score,
    both_orders,
    elo_correlations,
    find_faults,
    model_free_preferences,
    pairs_of,
    prefer,
    realism,
    score,
)
from traitbasis.evaluation.sheets import Sheet
from traitbasis.metrics.agreement import krippendorff_alpha
from traitbasis.model import LanguageModel
from traitbasis.pairs import load_pairs

# ---- Judgments


A, B, C = (("m1", ("", "t1", 0, "generated")), ("m2", ("", "t1", 0, "generated")), ("m3", ("", "t2", 0, "generated")))
RECORDS: dict[Kind, list[AnyJudgment]] = {
    "fidelity": [Judgment(*A, "anna", {"impatience": "high"}), Judgment(*B, "anna", {})],
    "composability": [Judgment(*A, "rule", {"impatience": "present"})],
    "consistency": [Verdict(*A, "anna", "impatience", "fade"), Verdict(*A, "anna", "skeptical", "absent")],
    "realism": [Preference(A, B, "anna", "first"), Preference(B, A, "anna", "tie")],
}


@pytest.mark.parametrize("kind", KINDS)
def test_judgments_of_every_kind_come_back_as_they_were(kind: Kind, tmp_path: Path) -> None:
    path = write_judgments(tmp_path / "j.jsonl", kind, RECORDS[kind], {"rater": "Anna \u2028"})
    assert read_judgments([path], kind) == RECORDS[kind]
    assert read_headers([path]) == [
        {"format": "traitbasis.judgments/1", "kind": kind, "made_by": {"rater": "Anna \u2028"}}
    ]


def test_fidelity_and_composability_serve_each_other_and_other_kinds_do_not(tmp_path: Path) -> None:
    path = write_judgments(tmp_path / "j.jsonl", "fidelity", RECORDS["fidelity"], {})
    assert read_judgments([path], "composability") == RECORDS["fidelity"]
    with pytest.raises(EvaluationError, match=r"j\.jsonl holds judgments of fidelity, not of realism"):
        read_judgments([path], "realism")
    other = write_judgments(tmp_path / "k.jsonl", "fidelity", RECORDS["fidelity"][:1], {})
    with pytest.raises(EvaluationError, match=r"k\.jsonl and .*j\.jsonl both hold what anna says of"):
        read_judgments([path, other], "fidelity")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]\n",
        "{}\n",
        '{"format": "traitbasis.judgments/2", "kind": "realism"}\n',
        '{"format": "traitbasis.judgments/1", "kind": "taste"}\n',
        '{"format": "traitbasis.judgments/1", "kind": "realism"}\n{"first": ["m", ["", "t", 0, "all"]]}\n',
        '{"format": "traitbasis.judgments/1", "kind": "consistency"}\n{"half',
        '{"format": "traitbasis.judgments/1", "kind": "consistency"}\n'
        '{"method": "m", "key": ["", "t", 0, "all"], "rater": "r", "trait": "x", "verdict": "grows"}\n',
        '{"format": "traitbasis.judgments/1", "kind": "fidelity"}\n'
        '{"method": "m", "key": ["", "t", 0, "all"], "rater": "r", "traits": {"x": "huge"}}\n',
        '{"format": "traitbasis.judgments/1", "kind": "fidelity"}\n'
        '{"method": "m", "key": ["", "t"], "rater": "r", "traits": {}}\n',
    ],
)
def test_a_damaged_file_of_judgments_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").write_text(content)
    with pytest.raises(EvaluationError, match=r"j\.jsonl"):
        read_judgments([tmp_path / "j.jsonl"], "realism")
    with pytest.raises(EvaluationError, match="make some with: traitbasis eval judge"):
        read_judgments([tmp_path / "nowhere.jsonl"], "realism")


def test_who_prefers_another_in_the_other_order_sees_no_difference() -> None:
    given = [
        Preference(A, B, "steady", "first"), Preference(B, A, "steady", "second"),
        Preference(B, A, "first!", "first"), Preference(A, B, "first!", "first"),
        Preference(B, A, "once", "first"),
    ]  # fmt: skip
    assert votes_of(given) == {"steady": {(A, B): 1.0}, "first!": {(A, B): 0.5}, "once": {(A, B): 0.0}}


def test_agreement_is_krippendorffs_alpha_of_what_both_judged() -> None:
    levels = ["none", "low", "medium", "high"]
    rng = random.Random(2)
    rows = {rater: [rng.choice(levels) for _ in range(24)] for rater in ("anna", "ben")}
    rows["inverted"] = [levels[3 - levels.index(level)] for level in rows["anna"]]
    given = [
        Judgment("m", ("", f"t{i}", 0, "generated"), rater, {} if level == "none" else {"impatience": level})
        for rater, row in rows.items()
        for i, level in enumerate(row)
    ]
    table = {rater: [float(levels.index(level)) for level in row] for rater, row in rows.items()}
    found = agreement(given)
    assert list(found) == [("anna", "ben", "inverted"), ("anna", "ben"), ("anna", "inverted"), ("ben", "inverted")]
    for group, alpha in found.items():
        assert alpha.value == pytest.approx(krippendorff_alpha([table[rater] for rater in group], "ordinal"))
    assert found["anna", "inverted"].high < 0
    assert agreement(given[:24]) == {}, "one rater agrees with nobody"


def test_agreement_on_preferences_does_not_depend_on_what_methods_are_called() -> None:
    """Of three methods the better ones mostly win; both raters agree on most pairs, and better than by chance."""
    rng = random.Random(1)
    votes = [(i, a, b, r, rng.random() < 0.9) for i in range(12) for a, b in ((0, 1), (0, 2), (1, 2)) for r in "xy"]

    def alpha(*names: str) -> float:
        given = [
            Preference(*((names[m], ("", f"t{i}", 0, "generated")) for m in (a, b)), r, "first" if won else "second")
            for i, a, b, r, won in votes
        ]
        return agreement(given)["x", "y"].value

    mirrored = [[[v, 1 - v] for *_, r, v in votes if r == rater] for rater in "xy"]
    expected = krippendorff_alpha(np.array(mirrored, dtype=float).reshape(2, -1), "ordinal")
    assert [alpha(*names) for names in itertools.permutations("abc")] == pytest.approx([expected] * 6)
    assert expected > 0.5


def test_one_who_says_no_levels_is_compared_by_presence() -> None:
    keys = [("", f"t{i}", 0, "generated") for i in range(4)]
    given = [
        *(
            Judgment("m", key, "anna", traits)
            for key, traits in zip(keys, [{"x": "low"}, {"x": "high"}, {}, {}], strict=True)
        ),
        *(
            Judgment("m", key, "rule", traits)
            for key, traits in zip(keys, [{"x": "present"}] * 2 + [{}] * 2, strict=True)
        ),
    ]
    assert agreement(given)["anna", "rule"].value == 1


# ---- Pairs, faults, votes


def test_pairs_are_of_one_task_condition_and_trial() -> None:
    steered, all_over = talk("a", "t", "x"), talk("a", "t", "y", positions="all")
    other = talk("b", "t", "z")
    apart = [talk("b", "t", "z", trial=1), talk("b", "u", "z"), talk("b", "t", "z", traits={"impatience": "low"})]
    assert pairs_of([other, *apart, steered]) == [(steered, other)]
    assert len(pairs_of([steered, all_over, other])) == 3
    assert player_of(side_of(all_over)) == "a (positions=all)" and player_of(side_of(steered)) == "a"
    with pytest.raises(EvaluationError, match=r"no two methods have .* in common \(methods: a, b\)"):
        pairs_of([steered, *apart])


@pytest.mark.parametrize(
    ("said", "faults"),
    [
        (["Hello, my lamp W77120 is broken.", "Yes.", "###STOP###"], [None, None, None]),
        (["How may I help you today?"], ["role_flip"]),
        (["It is order KX-88213."], ["unknown_identifier"]),
        (["no no no no no no no no"], ["broken"]),
        (["My lamp is still broken.", "My lamp is still broken."], [None, "repeat"]),
        (["My lamp is broken.", "Thanks, bye ###STOP###"], [None, "stop_token"]),
        ([" ", "Yes."], ["empty", None]),
    ],
)
def test_each_fault_is_found_where_it_is(said: list[str], faults: list[str | None]) -> None:
    assert find_faults(talk("m", "t", *said)) == faults
    assert {fault for fault in faults if fault} <= {*FAULTS}


def test_fewer_faults_win_then_the_log_odds_beyond_the_margin() -> None:
    clean, faulty = Score(0.0, -9.0), Score(0.2, 9.0)
    assert prefer(clean, faulty) == 1 and prefer(faulty, clean) == 0
    assert prefer(Score(0, 1.0), Score(0, 1.0 + 1.1 * MARGIN)) == 0
    assert prefer(Score(0, 1.0), Score(0, 1.0 + 0.9 * MARGIN)) == 0.5
    assert prefer(Score(0, math.nan), Score(0, 1.0)) == 0.5
    assert [s.faulty for s in score([talk("m", "t", "Yes.", "How may I help you today?")], [0.0, 1.0])] == [0.5]


def test_a_raters_report_counts_ties_orders_and_places() -> None:
    pairs = [(talk("a", f"t{i}", "x"), talk("b", f"t{i}", "y")) for i in range(10)]
    steady = [vote for pair in pairs for vote in both_orders(pair, "steady", 1.0)]
    a_always = [Preference(side_of(p), side_of(q), "A!", "first") for a, b in pairs for p, q in ((a, b), (b, a))]
    biased, sure = realism([*steady, *a_always])
    assert (biased.rater, biased.pairs, biased.ties, biased.twice, biased.inconsistent) == ("A!", 10, 10, 10, 10)
    assert biased.biased and biased.first.value == 1 and biased.ratings["a"].elo.value == pytest.approx(1500)
    assert not sure.biased and sure.first.value == 0.5 and sure.ties == sure.inconsistent == 0
    assert sure.ratings["a"].win_rate.value == 1 and sure.ratings.bounded
    assert math.isnan(elo_correlations([biased, sure])["A!", "steady"]), "all are equal to the one"
    assert json.dumps(sure.record, allow_nan=False)
    with pytest.raises(EvaluationError, match="no preference"):
        realism([])


# ---- The discriminator


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def reference() -> list[tuple[str, str]]:
    return hand_written([load_pairs("impatience"), load_pairs("confusion")])


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was read is not read again."""
    return tmp_path_factory.mktemp("states") / "states.jsonl"


@pytest.fixture(scope="module")
def people() -> list[Dialogue]:
    """A method whose turns are hand-written: of pairs that are neither in a vector nor in the reference."""
    sets = map(load_pairs, ("skeptical", "incoherence"))
    pairs = [pair for pair_set in sets for pair in pair_set.select("heldout", "extra")][:30]
    return [
        Dialogue(
            "people", {}, f"task-{i}", 0, pair.context[0].text, {str(n): fact for n, fact in enumerate(pair.facts)},
            (
                *(DialogueTurn(t.speaker, t.text) for t in pair.context if t.speaker in ("agent", "customer")),
                DialogueTurn("customer", pair.negative),
            ),
        )
        for i, pair in enumerate(pairs)
    ]  # fmt: skip


def answering(method: str, people: Sequence[Dialogue], say: Callable[[int], str]) -> list[Dialogue]:
    """The same tasks, and something else said in each turn."""
    return [
        replace(
            dialogue,
            method=method,
            turns=tuple(
                replace(turn, text=say(17 * n + i)) if turn.speaker == "customer" else turn
                for i, turn in enumerate(dialogue.turns)
            ),
        )
        for n, dialogue in enumerate(people)
    ]


SHOUTS = ("LAMP", "CHAIR", "TABLE", "PHONE", "HOTEL", "FLIGHT", "BOAT")


def shouting(people: Sequence[Dialogue]) -> list[Dialogue]:
    """Turns without a fault that are unlike anything people wrote."""
    return answering("shouting", people, lambda n: f"{SHOUTS[n % 7]} #{SHOUTS[n // 7 % 7]} / {SHOUTS[n // 49 % 7]}")


def test_the_reference_is_what_no_vector_is_made_from(reference: list[tuple[str, str]]) -> None:
    texts = {text for _, text in reference}
    for trait in ("impatience", "confusion"):
        for pair in load_pairs(trait).pairs:
            assert (pair.positive in texts) == (pair.negative in texts) == (pair.use != "default")
    assert max(Counter(name for name, _ in reference).values()) == 2, "both sides of a pair stay in one fold"


def test_turns_unlike_hand_written_ones_are_told_apart_and_hand_written_ones_hardly(
    lm: LanguageModel, reference: list[tuple[str, str]], people: list[Dialogue], states: Path
) -> None:
    dialogues = [*people, *shouting(people)]
    found = discriminate(lm, dialogues, reference, cache=states)
    assert found.distance["shouting"].value > 0.98 and found.distance["shouting"].low > 0.95
    assert found.distance["people"].value < 0.75, "they are about other tasks, no more"
    # Labels that mean nothing: half of the reference against its other half, name by name.
    names = sorted({name for name, _ in reference})
    half = {name for i, name in enumerate(names) if i % 2}
    fake = [talk("fake", name, text, trial=i) for i, (name, text) in enumerate(reference) if name in half]
    shuffled = discriminate(lm, fake, [turn for turn in reference if turn[0] not in half], cache=states)
    assert shuffled.distance["fake"].low < 0.5 < shuffled.distance["fake"].high
    rows = score(dialogues, found.log_odds)
    assert not any(row.faulty for row in rows[len(people) :])
    (rated,) = realism(model_free_preferences(dialogues, rows))
    assert rated.rater == MODEL_FREE and not rated.biased and rated.inconsistent == 0
    assert rated.ratings["people"].win_rate.value > 0.9


def test_customers_that_speak_as_the_agent_lose_against_hand_written_ones(
    lm: LanguageModel, reference: list[tuple[str, str]], people: list[Dialogue], states: Path
) -> None:
    bad = answering("bad", people, lambda n: f"Thank you for contacting us. How may I help you with request {n}?")
    dialogues = [*people, *bad]
    found = discriminate(lm, dialogues, reference, cache=states)
    rows = score(dialogues, found.log_odds)
    assert all(row.faulty == 1 for row in rows[len(people) :])
    (rated,) = realism(model_free_preferences(dialogues, rows))
    assert rated.ratings["people"].elo.low > rated.ratings["bad"].elo.high
    assert rated.ratings["people"].win_rate.value > 0.9


def test_no_turn_is_scored_by_what_was_learnt_from_its_own_task(
    lm: LanguageModel, reference: list[tuple[str, str]], states: Path
) -> None:
    def told(mine: str, other: str) -> tuple[float, ...]:
        dialogues = [talk(m, t, text, f"{t} of {m}") for m in "ab" for t, text in (("t1", mine), ("t2", other))]
        return discriminate(lm, dialogues, reference, cache=states).log_odds

    before = told("The lamp is broken.", "Where is my chair?")
    same_task, other_task = told("LAMP!! / BOAT", "Where is my chair?"), told("The lamp is broken.", "CHAIR!! / BOAT")
    assert before[1] == same_task[1] and before[0] != same_task[0], "its task's turns taught it nothing"
    assert before[1] != other_task[1]


def test_with_one_task_only_faults_are_compared(
    lm: LanguageModel, reference: list[tuple[str, str]], states: Path
) -> None:
    dialogues = [talk("a", "t", "Yes."), talk("b", "t", "How may I help you today?"), talk("c", "t", "No.")]
    found = discriminate(lm, dialogues, reference, cache=states)
    assert all(map(math.isnan, found.log_odds)) and math.isnan(found.distance["a"].value)
    a, b, c = score(dialogues, found.log_odds)
    assert prefer(a, b) == 1 and prefer(a, c) == 0.5


def test_what_has_no_words_is_not_read(lm: LanguageModel, reference: list[tuple[str, str]], states: Path) -> None:
    dialogues = [talk(m, t, "My lamp is broken.", " ", "###STOP###") for m in "ab" for t in ("t1", "t2")]
    found = discriminate(lm, dialogues, reference, cache=states)
    assert [math.isnan(value) for value in found.log_odds] == [False, True, True] * 4
    silent = discriminate(lm, [talk("a", "t1", ""), talk("b", "t2", "")], reference, cache=states)
    assert all(map(math.isnan, silent.log_odds)) and math.isnan(silent.distance["a"].value)


def test_a_killed_reading_goes_on_and_gives_the_same(
    lm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"My lamp number {i} is broken." for i in range(9)]
    cache = tmp_path / "new" / "states.jsonl"
    seen: list[int] = []
    whole = read_turns(lm, [*texts, "", texts[0]], progress=seen.append)
    assert sum(seen) == 11 and whole[9].isnan().all() and (whole[0] == whole[10]).all()
    read_turns(lm, texts[:4], cache=cache)
    cache.write_text(cache.read_text()[:-40])  # the last line was not finished
    counted: list[int] = []
    monkeypatch.setattr(discriminator, "_GROUP", 3)
    again = read_turns(lm, texts, cache=cache, progress=counted.append)
    assert counted[0] == 3 and sum(counted) == 9
    assert (again == read_turns(lm, texts, cache=cache)).all()
    assert abs(again - whole[:9]).max() < 1e-4, "batches of other sizes round otherwise"
    monkeypatch.setattr(discriminator.Reader, "read", lambda *given, **more: pytest.fail("it is all there"))
    assert (again == read_turns(lm, texts, cache=cache)).all()


def test_a_reference_of_ones_own_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "real.txt"
    path.write_text("".join(f"  Line {i}\n\n" for i in range(10)) + "Line 1\n", "utf-8")
    assert [text for _, text in read_reference(path)] == [f"Line {i}" for i in range(10)]
    path.write_text("one\ntwo\n")
    with pytest.raises(EvaluationError, match=r"real\.txt has 2 different turns"):
        read_reference(path)
    with pytest.raises(EvaluationError, match="cannot read reference turns"):
        read_reference(tmp_path / "nowhere.txt")


# ---- The commands


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Oracle]]:
    with oracle_at() as found:
        yield found


@pytest.fixture
def oracle(server: tuple[str, Oracle]) -> tuple[str, Oracle]:
    server[1].reset()
    return server


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["eval", *map(str, arguments)])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_from_sheets_and_judges_to_elo_beside_the_model_free_rater(
    here: Path, oracle: tuple[str, Oracle], lm: LanguageModel, people: list[Dialogue]
) -> None:
    url, judge = oracle
    judge.answer = lambda prompt, model: pick_the_louder(prompt, model) if model == "loud" else '{"choice": "A"}'
    files = write_dialogues(here, [*people[:6], *shouting(people[:6])])
    output = succeed("sheet", "realism", *files, "--items", 4, "--out", "sheets")
    assert (
        "4 items of realism, and 2 of them a second time" in output and "keep from them: sheets/realism.key" in output
    )
    sheet = Sheet.load("sheets/realism.key.json")

    def quiet(item: Any) -> dict[str, str]:
        return {"choice": "AB"[[side[0] for side in item.of[0]].index("people")]}

    votes_file = filled(sheet, here / "anna.csv", quiet)
    output = succeed("votes", "sheets/realism.key.json", votes_file, "--out", "annotators.jsonl")
    assert "anna: 6 of 6 items, 2 of 2 repeated ones alike" in output
    assert read_headers([here / "annotators.jsonl"])[0]["made_by"]["dialogues"] == [
        {"format": FORMAT, "made": m} for m in ("people", "shouting")
    ]

    specs = [f"--judge={url}#{name}" for name in ("loud", "firstly")]
    output = succeed("judge", "realism", *files, *specs, "--out", "judged.jsonl", "--with", "annotators.jsonl")
    assert "loud: 12 judgments, 12 requests, 0 unreadable answers" in output
    assert re.search(r"firstly: what was shown first was preferred in 1\.00.*6 of 6 pairs .*; position-biased", output)
    assert "Krippendorff's alpha of anna, loud: -" in output and "Krippendorff's alpha of anna, firstly, loud" in output
    succeed("judge", "realism", *files, *specs, "--out", "judged.jsonl")
    assert len(judge.prompts) == 24, "answers were kept beside the judgments"

    model = save_folder(lm, here / "model")
    output = succeed(
        "realism", *files, "--judgments", "annotators.jsonl", "--judgments", "judged.jsonl", "--model", model,
        "--cache", "states.jsonl", "--traits", "impatience,confusion", "--out", "realism.json",
    )  # fmt: skip
    for title in (
        "realism by anna: 4 pairs",
        "realism by loud: 6 pairs",
        "realism by model-free: 6 pairs",
        "realism distance",
    ):
        assert title in output
    figures = json.loads((here / "realism.json").read_text())
    methods = {rater: row["methods"] for rater, row in figures["raters"].items()}
    assert methods["loud"]["shouting"]["win_rate"]["value"] == 1 == methods["anna"]["people"]["win_rate"]["value"]
    assert methods["model-free"]["people"]["elo"]["value"] > 1500 and figures["distance"]["shouting"]["value"] > 0.9
    assert figures["raters"]["firstly"]["position_biased"] and figures["elo_rank_correlation"]["anna / loud"] == -1
    assert figures["agreement"]["anna / loud"]["value"] < 0
    made_by = figures["made_by"]
    assert made_by["reference_turns"] == 80 and made_by["model_fingerprint"] == lm.fingerprint
    assert [header["made"] for header in made_by["dialogues"]] == ["people", "shouting"]
    assert [header["kind"] for header in made_by["judgments"]] == ["realism"] * 2 and "traitbasis_version" in made_by[
        "versions"
    ]
    alone = succeed("realism", *files, "--judgments", "annotators.jsonl", "--no-model-free")
    assert "realism by anna" in alone and "model-free" not in alone


def test_judges_of_traits_and_courses_by_command(here: Path, oracle: tuple[str, Oracle]) -> None:
    url, judge = oracle
    files = write_dialogues(here, many())
    judge.answer = says(traits={"impatience": "low"})
    output = succeed("judge", "fidelity", *files, "--judge", f"{url}#wise", "--out", "f.jsonl")
    assert "wise: 36 judgments, 36 requests, 0 unreadable" in output
    found = read_judgments(["f.jsonl"], "fidelity")
    assert {tuple(j.traits.items()) for j in found} == {(("impatience", "low"),)} and len(found) == 36
    assert {"- confusion:", "- incoherence:"} <= {*re.findall(r"- \w+:", judge.prompts[0])}, (
        "all of the paper's are offered"
    )
    assert "12 judgments" in succeed("judge", "composability", *files, "--judge", f"{url}#wise", "--out", "c.jsonl")
    judge.answer = says(verdict="fade")
    assert "72 judgments" in succeed("judge", "consistency", *files, "--judge", f"{url}#wise", "--out", "k.jsonl")
    assert {v.verdict for v in read_judgments(["k.jsonl"], "consistency")} == {"fade"}
    assert "8 items of consistency" in succeed("sheet", "consistency", *files, "--items", 8, "--out", "s")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["realism", "nowhere.jsonl"], "no dialogues at nowhere.jsonl"),
        (["realism", "steered.jsonl", "--no-model-free", "--judgments", "x"], "no two methods"),
        (["realism", "steered.jsonl", "lora.jsonl", "--judgments", "nowhere.jsonl"], "no judgments at nowhere.jsonl"),
        (["judge", "fidelity", "odd.jsonl", "--judge", "http://localhost:1/v1#m", "--out", "o"], "'grumpy'"),
        (
            ["judge", "realism", "steered.jsonl", "lora.jsonl", "--judge", "http://localhost:1", "--out", "o"],
            "URL#MODEL",
        ),
        (["sheet", "composability", "odd.jsonl", "--out", "s"], "several traits"),
        (["votes", "nowhere.key.json", "a.csv", "--out", "o"], "cannot read"),
    ],
)
def test_what_cannot_be_done_says_why(here: Path, arguments: list[str], words: str) -> None:
    write_dialogues(here, [*many(), talk("odd", "t", "x", traits={"grumpy": "low"})])
    result = run(*arguments)
    assert isinstance(result.exception, TraitBasisError) and words in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    [
        ["judge", "realism", "steered.jsonl", "--out", "o"],
        ["judge", "taste", "steered.jsonl", "--out", "o"],
        ["realism", "steered.jsonl", "lora.jsonl", "--no-model-free"],
        ["sheet", "fidelity", "steered.jsonl", "--traits", "rude", "--out", "s"],
    ],
)
def test_options_that_make_no_sense_are_a_usage_error(here: Path, arguments: list[str]) -> None:
    write_dialogues(here, many())
    assert run(*arguments).exit_code == 2
