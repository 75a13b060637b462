"""A new trait's pair file: from the template through every mistake to one that ``load_pairs`` takes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.errors import PairError
from traitbasis.pair_check import Finding, changes, check_pair_file
from traitbasis.pairs import known_traits, load_pairs, pair_set_hash
from traitbasis.scaffold import check_name, scaffold, write_scaffold

ROOT = Path(__file__).parent.parent
NAME = "seafaring"  # does not ship
# A word for each pair, so that no two replies are alike.
OWN = "brig cove dock edda fjord gale hull isle jetty keel luff mast"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["new-trait", *map(str, arguments)])


def fill(text: str, pairs: int = 12) -> str:
    """Write definition, opposite, and the replies of the first `pairs`, on the empty lines and nowhere else."""
    text = text.replace("definition: >-\n\n", "definition: >-\n  Talks as sailors do.\n")
    text = text.replace("opposite: >-\n\n", "opposite: >-\n  Talks as landsmen do.\n")
    head, *blocks = text.split("  - id: ")
    for number, (block, own) in enumerate(zip(blocks[:pairs], OWN.split(), strict=False)):
        facts = ", ".join(json.loads(block.split("facts: ")[1].splitlines()[0]))
        for side, word in (("positive", own), ("negative", f"{own}less")):
            block = block.replace(f"{side}: >-\n\n", f"{side}: >-\n      The {word} one: {facts}.\n")
        blocks[number] = block
    return "  - id: ".join([head, *blocks])


def written(folder: Path, change: Callable[[str], str] = lambda text: text, pairs: int = 12) -> Path:
    path = folder / "own.yaml"
    path.write_text(change(fill(scaffold(NAME), pairs)), encoding="utf-8")
    return path


def line_of(path: Path, start: str, nth: int = 1) -> int:
    """Number of the `nth` line that begins with `start`."""
    numbers = [i for i, line in enumerate(path.read_text().splitlines(), 1) if line.startswith(start)]
    return numbers[nth - 1]


# --- the template -----------------------------------------------------------------------------------------------------


def test_the_template_has_twelve_pairs_without_replies(here: Path) -> None:
    assert run(NAME).exit_code == 0
    document = yaml.safe_load((here / f"{NAME}.yaml").read_text())
    pairs = document["pairs"]
    assert document["trait"] == NAME
    assert [pair["use"] for pair in pairs] == ["default"] * 4 + ["heldout"] * 8
    domains = {"airline", "retail", "telecom", "telehealth"}
    assert {pair["domain"] for pair in pairs[:4]} == domains
    late = [(pair["domain"], any("customer" in turn for turn in pair["context"])) for pair in pairs[4:]]
    assert sorted(late) == sorted((domain, is_late) for domain in domains for is_late in (False, True))
    assert all(pair["positive"] == pair["negative"] == "" and pair["facts"] for pair in pairs)
    source = yaml.safe_load((ROOT / "contrastive_pairs/contexts/scaffold.yaml").read_text())["scenarios"]
    assert [(p["context"], p["facts"]) for p in pairs] == [(s["context"], s["facts"]) for s in source]


def test_what_the_replies_must_say_the_customer_knows_and_has_not_said() -> None:
    for pair in yaml.safe_load(scaffold(NAME))["pairs"]:
        system = pair["context"][0]["system"]
        said = " ".join(turn["customer"] for turn in pair["context"] if "customer" in turn)
        assert [fact for fact in pair["facts"] if fact not in system or fact in said] == [], pair["id"]


def test_no_context_of_the_template_is_used_elsewhere() -> None:
    folder = ROOT / "contrastive_pairs"
    files = [*(folder / f"{trait}.yaml" for trait in known_traits()), folder / "contexts/selection.yaml"]
    documents = [yaml.safe_load(file.read_text()) for file in [*files, ROOT / "experiments/scenarios.yaml"]]
    others = [entry for document in documents for entry in document.get("pairs") or document["scenarios"]]
    assert len(others) > 100
    told = [set(entry["context"][0]["system"].split()) for entry in others]
    codes = {fact for entry in others for fact in entry["facts"]}
    for pair in yaml.safe_load(scaffold(NAME))["pairs"]:
        system = set(pair["context"][0]["system"].split())
        assert all(len(system & other) / len(system | other) < 0.5 for other in told), pair["id"]
        assert not [fact for fact in pair["facts"] if re.search(r"\d.*\d.*\d", fact) and fact in codes], pair["id"]


def test_contexts_of_a_shipped_trait_can_be_taken(here: Path) -> None:
    assert run(NAME, "--from", "skeptical", "--out", "deep/own.yaml").exit_code == 0
    text = (here / "deep/own.yaml").read_text()
    shipped = load_pairs("skeptical").select("default", "heldout")
    assert [pair["id"] for pair in yaml.safe_load(text)["pairs"]] == [pair.id for pair in shipped]
    (here / "own.yaml").write_text(fill(text))
    taken = load_pairs(here / "own.yaml").pairs
    assert [(p.context, p.facts, p.use) for p in taken] == [(p.context, p.facts, p.use) for p in shipped]
    comments = " ".join(line.strip(" #") for line in text.splitlines() if line.startswith("    #"))
    assert all(" ".join(pair.negative.split()) in comments for pair in shipped)
    assert "shipped: " in str(run("other", "--from", "sceptical").exception)


def test_a_file_that_exists_is_never_written_over(here: Path) -> None:
    (here / f"{NAME}.yaml").write_text("mine")
    with pytest.raises(PairError, match=r"seafaring\.yaml exists; .*--check.*--out"):
        write_scaffold(NAME, Path(f"{NAME}.yaml"))
    assert isinstance(run(NAME).exception, PairError)
    assert (here / f"{NAME}.yaml").read_text() == "mine"
    with pytest.raises(PairError, match=r"must end in \.yaml"):
        write_scaffold(NAME, Path("own.txt"))
    assert [file.name for file in here.iterdir()] == [f"{NAME}.yaml"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Over-Sharing", "such as 'over_sharing'"),
        ("../x", "such as 'x'"),
        ("7", "a letter first$"),
        ("", "a letter first$"),
        ("skeptical", "'skeptical' is a trait that ships"),
        ("skeptic", "'skeptic' is an alias of 'skeptical'"),
        ("all", "means something else"),
        ("basis", "means something else"),
        ("off", "means something else"),
        ("high", "means something else"),
        ("baselines", "file names"),
        ("judge", "file names"),
        ("yes", "means something else"),  # YAML reads it as true
        ("null", "means something else"),
    ],
)
def test_a_name_that_cannot_be_is_refused(name: str, says: str, here: Path) -> None:
    with pytest.raises(PairError, match=says):
        check_name(name)
    with pytest.raises(PairError, match=says):
        write_scaffold(name, Path("own.yaml"))
    assert list(here.iterdir()) == []


def test_a_reserved_name_is_a_finding_too(here: Path) -> None:
    path = written(here, lambda text: text.replace(f"trait: {NAME}", "trait: judge"))
    (finding,) = check_pair_file(path).findings
    assert finding.field == "trait" and "'judge' cannot name a trait" in finding.message


def test_the_check_promises_no_saturation_that_was_not_measured(here: Path) -> None:
    (said,) = [str(f) for f in check_pair_file(written(here, pairs=2)).findings if "default pairs are done" in str(f)]
    assert "in the paper" in said and "sixteen" in said and "docs/selection.md" in said
    measured = " ".join((ROOT / "docs" / "selection.md").read_text(encoding="utf-8").split())
    assert "sixteen pairs point closer to the trait and express it half as strongly again" in measured


# --- the check --------------------------------------------------------------------------------------------------------


def test_a_fresh_template_is_unfinished_with_every_pair_listed(here: Path) -> None:
    run(NAME)
    report = check_pair_file(f"{NAME}.yaml")
    assert not report.ready and report.mistakes == 0
    assert len(report.pairs) == 12 and all(pair.missing == ("positive", "negative") for pair in report.pairs)
    text = (here / f"{NAME}.yaml").read_text().splitlines()
    assert all(text[pair.line - 1] == f"  - id: {pair.id}" for pair in report.pairs)
    result = run(NAME, "--check")
    assert result.exit_code == 1 and result.output.count("write both sides") == 12
    assert all(pair.id in result.output for pair in report.pairs)
    assert "field 'definition': is not written yet" in result.output
    assert "0 of 4 default pairs, 0 of 8 heldout pairs are done; mistakes: 0" in result.output


def test_a_filled_file_is_ready_and_can_be_loaded(here: Path) -> None:
    path = written(here)
    report = check_pair_file(path)
    assert report.findings == () and report.ready and all(pair.done for pair in report.pairs)
    pair_set = load_pairs(path)
    assert len(pair_set.for_extraction()) == 4 and len(pair_set.select("heldout")) == 8
    assert [pair.words for pair in report.pairs] == [pair.lengths for pair in pair_set.pairs]
    assert [pair.turn for pair in report.pairs] == [pair.turn for pair in pair_set.pairs]
    result = run(path, "--check")
    assert result.exit_code == 0 and "traitbasis extract --pairs" in result.output


@pytest.mark.parametrize("trait", known_traits())
def test_a_shipped_file_is_ready(trait: str) -> None:
    findings = check_pair_file(ROOT / "contrastive_pairs" / f"{trait}.yaml").findings
    assert [str(finding) for finding in findings] == []


def test_half_of_the_pairs_written_is_half_of_the_work(here: Path) -> None:
    path = written(here, pairs=6)
    report = check_pair_file(path)
    assert (report.done("default"), report.done("heldout"), report.mistakes) == (4, 2, 0)
    assert [str(f) for f in report.findings if not f.pair] == [
        f"line {line_of(path, 'pairs:')}: field 'pairs': 2 of 8 heldout pairs are done; "
        "they never enter the vector and measure it; the fewer they are, the coarser"
    ]
    assert [f.field for f in report.findings if f.pair] == ["positive", "negative"] * 6


FIRST = "The brig one: JX52RB, 31E, aisle seat."
OTHER = "The brigless one: JX52RB, 31E, aisle seat."
SECOND = "The cove one: Ostwick radio, 62915, refund."


def swap(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


def without_last_pairs(count: int) -> Callable[[str], str]:
    return lambda text: "  - id: ".join(text.split("  - id: ")[:-count])


# what is wrong, how it comes about, (how its line begins, which of those lines), what is said of it
MISTAKES: dict[str, tuple[Callable[[str], str], tuple[str, int], str]] = {
    "a fact missing": (
        swap(OTHER, "The brigless one: JX52RB, aisle seat."),
        ("    negative:", 1),
        "pair 'airline-aisle-seat': field 'negative': does not contain the fact '31E'",
    ),
    "a side much longer": (
        swap(FIRST, FIRST + " And so it goes on and on and on."),
        ("    positive:", 1),
        "pair 'airline-aisle-seat': field 'positive': has 16 words, 2.3 times the 7 of 'negative'",
    ),
    "the same reply twice": (
        lambda t: swap("62915, refund", "62915, refund, JX52RB, 31E, aisle seat")(t).replace(
            OTHER, "The cove one: Ostwick Radio; 62915, refund, JX52RB, 31E, aisle seat!"
        ),
        ("    positive:", 2),
        "pair 'retail-radio-refund': field 'positive': is the same reply as that of pair 'airline-aisle-seat' in line",
    ),
    "two sides alike": (
        swap(OTHER, FIRST),
        ("    negative:", 1),
        "field 'negative': is the same reply as that of pair 'airline-aisle-seat'",
    ),
    "the same id twice": (
        swap("id: retail-radio-refund", "id: airline-aisle-seat"),
        ("  - id:", 2),
        "pair 'airline-aisle-seat': field 'id': is the same id as that of pair 'airline-aisle-seat' in line",
    ),
    "no id": (
        swap("- id: retail-radio-refund\n    ", "- "),
        ("  - domain:", 1),
        "pair number 2: field 'id'",
    ),
    "an unknown use": (swap("use: heldout", "use: test"), ("    use:", 5), "pair 'airline-second-bag': field 'use'"),
    "facts that are text": (
        swap('["4486", "5 GB"]', "4486"),
        ("    facts:", 3),
        "'telecom-more-data': field 'facts'",
    ),
    "a fact that is a number": (
        swap('"4486"', "4486"),
        ("    facts:", 3),
        "field 'facts.0'",
    ),
    "no facts": (swap('["4486", "5 GB"]', "[]"), ("    facts:", 3), "'telecom-more-data': field 'facts'"),
    "a speaker called user": (
        swap("- customer: I would", "- user: I would"),
        ("      - user:", 1),
        "pair 'airline-aisle-seat': field 'context.2': speaker 'user' is ambiguous",
    ),
    "an unknown field of a pair": (
        swap("    use:", "    uses: x\n    use:"),
        ("    uses:", 1),
        "field 'uses'",
    ),
    "an unknown field": (swap("aliases:", "alias: x\naliases:"), ("alias:", 1), "field 'alias'"),
    "an alias that ships": (
        swap("aliases: []", "aliases: [skeptic]"),
        ("aliases:", 1),
        "is a name of 'skeptical'",
    ),
    "a name that is an alias": (
        swap(f"trait: {NAME}", "trait: skeptic"),
        ("trait:", 1),
        "is a name of 'skeptical'",
    ),
    "a name with capitals": (swap(f"trait: {NAME}", "trait: Sea"), ("trait:", 1), "field 'trait': String should match"),
    "too few held-out": (
        without_last_pairs(3),
        ("pairs:", 1),
        "5 of 8 heldout pairs are done; only 5 are marked 'use: heldout'; they never enter the vector",
    ),
    "a pair that is no mapping": (lambda t: t + "  - text\n", ("  - text", 1), "pair number 13: must be a mapping"),
    "a word that gives the sides away": (
        lambda t: re.sub(r"The (\w+)less one", r"The \1less arr one", t),
        ("    negative:", 1),
        "'arr' is in the negative reply and not in the positive one in 12 of 12 pairs",
    ),
    "a key twice": (
        swap("    negative: >-", "    positive: >-"),
        ("    positive:", 2),
        "column 5: not valid YAML: 'positive' is there already",
    ),
    "a colon in plain text": (
        swap("aliases: []", "aliases: a: b"),
        ("aliases:", 1),
        "column 11: not valid YAML: mapping values are not allowed here",
    ),
    "a reply that is not indented": (
        swap(f"      {SECOND}", f"  {SECOND}"),
        ("  The cove", 1),
        "column 3: not valid YAML",
    ),
    "a tab": (swap("    use: default", "\tuse: default"), ("\tuse", 1), "column 1: not valid YAML"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_reported_with_its_line(mistake: str, here: Path) -> None:
    change, where, says = MISTAKES[mistake]
    path = written(here, change)
    report = check_pair_file(path)
    found = [finding for finding in report.findings if says in str(finding)]
    assert [finding.line for finding in found] == [line_of(path, *where)], [str(f) for f in report.findings]
    assert report.mistakes >= 1 and not found[0].unfinished
    result = run(path, "--check")
    assert result.exit_code == 1 and says in result.output


def test_a_mistake_in_a_pair_does_not_hide_those_in_others(here: Path) -> None:
    path = written(here, lambda t: t.replace(FIRST, "Ahoy.").replace("use: heldout", "use: later", 1), pairs=11)
    report = check_pair_file(path)
    assert {finding.pair for finding in report.findings if finding.pair} == {
        "'airline-aisle-seat'",
        "'airline-second-bag'",
        "'telehealth-blood-test'",
    }
    assert [finding.line for finding in report.findings] == sorted(finding.line for finding in report.findings)
    assert [pair.mistakes for pair in report.pairs] == [4, 0, 0, 0, 1, *[0] * 7], "three facts and the length; a use"


def test_a_trait_of_length_may_differ_in_it_and_markers_are_no_give_away(here: Path) -> None:
    def change(text: str) -> str:
        text = re.sub(r"The (\w+)less one", r"Well, well, well, what a lot, the \1less one of them all", text)
        return text.replace("aliases: []", "length_free: true\nmarkers: [well, what, a, lot, of, them, all]")

    assert check_pair_file(written(here, change)).findings == ()
    findings = check_pair_file(written(here, lambda t: change(t).replace("\nlength_free: true", ""))).findings
    assert sum("times the" in str(f) for f in findings) == 12


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        (b"", 1, "expected a mapping"),
        (b"- a\n", 1, "expected a mapping"),
        (b"a: b\n# caf\xe9\n", 2, "UTF-8"),
        (b"a: b\nc: d\x07\n", 2, "column 5: a character"),
        (b"a: 1\n---\nb: 2\n", 2, "column 1: not valid YAML"),
        (b"a: &a [*a]\n", 1, "'a'"),
        (b"pairs: &p [*p]\n", 1, "must be a mapping"),
        (b"pairs: {a: b}\n", 1, "must be a list"),
        (b"a: 2024-13-45\n", 1, "not valid YAML"),
        (b"[" * 3000, 1, "not valid YAML"),
    ],
)
def test_whatever_a_file_holds_is_reported(content: bytes, line: int, says: str, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_bytes(content)
    report = check_pair_file(path)
    assert any(finding.line == line and says in str(finding) for finding in report.findings), report.findings
    with pytest.raises(PairError):
        load_pairs(path)


def test_a_file_that_is_not_there_is_an_error(here: Path) -> None:
    with pytest.raises(PairError, match=r"cannot read pair file gone\.yaml: No such file"):
        check_pair_file("gone.yaml")
    assert isinstance(run("gone.yaml", "--check").exception, PairError)
    assert run(NAME, "--check", "--watch").exit_code == 2


# --- watching ---------------------------------------------------------------------------------------------------------


def test_a_saved_file_is_noticed_and_nothing_else(here: Path) -> None:
    path = written(here)
    stop, seen = threading.Event(), []

    def watch() -> None:
        for _ in changes(path, poll=0.01, stop=stop):
            seen.append(path.read_text())

    def wait(count: int) -> None:
        deadline = time.monotonic() + 5
        while len(seen) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(seen) == count

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        wait(1)
        (here / "new").write_text("one")
        path.unlink()
        time.sleep(0.05)
        (here / "new").rename(path)  # as editors save
        wait(2)
        os.utime(path, ns=(1, 1))
        wait(3)
    finally:
        stop.set()
        thread.join(5)
    assert not thread.is_alive() and seen[1:] == ["one", "one"]


def test_watching_begins_the_file_and_reports_each_time_it_is_saved(here: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "traitbasis.cli", "new-trait", NAME, "--watch"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=here,
    )
    assert process.stdout
    try:
        lines = iter(process.stdout.readline, "")
        assert any("0 of 4 default pairs, 0 of 8 heldout" in line for line in lines)
        path = here / f"{NAME}.yaml"
        (here / "new.yaml").write_text(fill(path.read_text(), 11))
        (here / "new.yaml").rename(path)
        assert any("4 of 4 default pairs, 7 of 8 heldout" in line for line in lines)
        (here / "new.yaml").write_text(fill(path.read_text()))
        (here / "new.yaml").rename(path)
        assert any(line.startswith("ready:") for line in lines)
        assert any("Ctrl-C" in line for line in lines)
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
    assert load_pairs(path).trait == NAME and pair_set_hash(load_pairs(path).pairs)


def test_a_finding_says_where() -> None:
    assert str(Finding(3, "'x'", "facts", "is wrong")) == "line 3: pair 'x': field 'facts': is wrong"
    assert str(Finding(3, "", "", "is wrong")) == "line 3: is wrong"
