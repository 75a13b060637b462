"""People as raters: blinded sheets, the votes that come back, and the page in headless Chromium."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import Document
from playwright.sync_api import Browser, Page, expect, sync_playwright
from talks import (
    DEFINITIONS,
    HOSTILE,
    KINDS,
    filled,
    many,
    talk,
    write_dialogues,
)
from typer.testing import CliRunner

from traitbasis import cli
from traitbasis.annotate import unprotect
from traitbasis.cli.evaluate import save_figures
from traitbasis.errors import AnnotationError, EvaluationError
from traitbasis.evaluation.judgments import (
    AnyJudgment,
    Judgment,
    Kind,
    Preference,
    Verdict,
    judged,
    player_of,
    read_judgments,
    write_judgments,
)
from traitbasis.evaluation.realism import (
    realism,
)
from traitbasis.evaluation.sheets import Sheet, make_sheet, read_votes

expect.set_options(timeout=20_000)  # two cores, and other tests on them


@pytest.mark.parametrize("kind", KINDS)
def test_annotators_get_the_same_bytes_whatever_the_methods_are_called(kind: Kind, tmp_path: Path) -> None:
    """Methods change names (and their order with them), and so do tasks and files' order."""
    dialogues = many()
    names = {"steered": "b", "prompted": "c", "lora": "a"}
    renamed = [replace(d, method=names[d.method], task=f"other {d.task[::-1]}") for d in reversed(dialogues)]
    files = [
        make_sheet(kind, given, DEFINITIONS, items=9, headers=[{"of": folder}]).save(tmp_path / folder)
        for folder, given in (("one", dialogues), ("two", renamed))
    ]
    (table, page, key), others = files
    assert table.read_bytes() == others[0].read_bytes() and page.read_bytes() == others[1].read_bytes()
    assert key.read_bytes() != others[2].read_bytes()
    more = make_sheet(kind, dialogues, DEFINITIONS, items=9, seed=1).save(tmp_path / "three")
    assert table.read_bytes() != more[0].read_bytes()


def test_dialogues_that_say_the_same_do_not_unblind(tmp_path: Path) -> None:
    """An unsteered customer and a steered one at zero say the same: one item, and an answer for both."""
    dialogues = many(["steered", "prompted"])
    dialogues += [replace(d, method="unsteered") for d in dialogues if d.method == "steered"]
    swapped = {"steered": "unsteered", "unsteered": "steered"}
    renamed = [replace(d, method=swapped.get(d.method, d.method)) for d in dialogues]
    for kind in KINDS:
        a, b = (make_sheet(kind, given, DEFINITIONS, items=7).save(tmp_path / kind / name)
                for name, given in (("a", dialogues), ("b", renamed)))  # fmt: skip
        assert a[0].read_bytes() == b[0].read_bytes() and a[1].read_bytes() == b[1].read_bytes()
    sheet = make_sheet("fidelity", dialogues, DEFINITIONS, items=50)
    assert len({item.talks for item in sheet.items}) == len(sheet.items) - sum(bool(i.repeats) for i in sheet.items)
    assert {len(item.of) for item in sheet.items} == {1, 2}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_for_annotators_names_a_method_a_condition_or_a_task(kind: Kind, tmp_path: Path) -> None:
    sheet = make_sheet(
        kind, many(["mysteered", "myprompted", "mylora"]), DEFINITIONS, items=12, headers=[{"dose": 9131}]
    )
    table, page, key = sheet.save(tmp_path)
    for path in (table, page):
        text = path.read_text("utf-8-sig")
        assert not re.search(r"steered|prompted|lora|task-\d|9131|W77120|secretly|impatience-|generated", text)
        places = [text.index(item.id) for item in sheet.items]
        assert places == sorted(places)
    assert re.search("mysteered", key.read_text("utf-8")) and Sheet.load(key) == sheet
    if kind == "realism":
        assert not re.search("impatien|skeptic", table.read_text("utf-8"), re.IGNORECASE)
    else:
        assert all(definition in page.read_text("utf-8") for d in sheet.traits.values() for definition in d)


def test_methods_conditions_tasks_and_sides_come_equally_often() -> None:
    sheet = make_sheet("realism", many(tasks=6), {}, items=36)
    once = [item for item in sheet.items if not item.repeats]
    assert len(once) == 36 and len(sheet.items) == 40
    of = [sides for item in once for sides in item.of]
    assert {*Counter(frozenset(player_of(s) for s in sides) for sides in of).values()} == {12}
    for label, share in ((0, 9), (1, 6)):  # condition, task
        assert all(abs(count - share) <= 1 for count in Counter(sides[0][1][label] for sides in of).values())
    left = sum(player_of(sides[0]) < player_of(sides[1]) for sides in of)
    assert 9 <= left <= 27, "sides are drawn"


def test_some_items_come_again_later_with_their_sides_exchanged() -> None:
    for kind in KINDS:
        sheet = make_sheet(kind, many(tasks=6), DEFINITIONS, items=20)
        by_id = {item.id: n for n, item in enumerate(sheet.items)}
        again = [item for item in sheet.items if item.repeats]
        assert len(again) >= 2
        for item in again:
            first = sheet.items[by_id[item.repeats]]
            assert by_id[item.id] > by_id[item.repeats] and item.id != first.id
            assert item.talks == (first.talks[::-1] if kind == "realism" else first.talks)
            assert item.of == (tuple(s[::-1] for s in first.of) if kind == "realism" else first.of)


def test_votes_on_pairs_become_preferences(tmp_path: Path) -> None:
    """Anna always takes the steered one where it is there; Ben takes what is on the left."""
    sheet = make_sheet("realism", many(tasks=6), {}, items=30)

    def anna(item: Any) -> dict[str, str]:
        return {"choice": {0: "a", 1: "B"}.get([s[0] for s in item.of[0]].index("steered"), "")
                if "steered" in {s[0] for s in item.of[0]} else "tie"}  # fmt: skip

    files = [
        filled(sheet, tmp_path / "anna.csv", anna),
        filled(sheet, tmp_path / "x.csv", lambda i: {"choice": "A"}, "Ben"),
    ]
    read = read_votes(sheet, files)
    assert [*read.answers] == ["Ben", "anna"]
    same, twice = read.repeated()["anna"]
    assert same == twice == 3 and read.repeated()["Ben"] == (0, 3)
    path = write_judgments(tmp_path / "people.jsonl", "realism", read.judgments(), {})
    ben, rated = realism(read_judgments([path], "realism"))
    assert rated.rater == "anna" and rated.ratings["steered"].win_rate.value == 1 and rated.twice == 3
    assert rated.inconsistent == 0 and ben.inconsistent == ben.twice == 3 and ben.biased


def test_votes_on_traits_and_courses_become_what_judges_say(tmp_path: Path) -> None:
    dialogues = many()
    sheet = make_sheet("fidelity", dialogues, DEFINITIONS, items=8)
    (blank,) = [item.id for item in sheet.items if not item.repeats][:1]

    def traits(item: Any) -> dict[str, str]:
        return {} if item.id == blank else {"impatience": "High"} if item.repeats else {"skeptical": "none"}

    read = read_votes(sheet, [filled(sheet, tmp_path / "anna.csv", traits)])
    found = read_judgments([write_judgments(tmp_path / "j.jsonl", "fidelity", read.judgments(), {})], "fidelity")
    again = {item.of[0][0]: item.repeats for item in sheet.items if item.repeats}
    for judgment in found:  # the first answer counts, and the second where there was none
        expected = {"impatience": "high"} if again.get((judgment.method, judgment.key)) == blank else {}
        assert judgment.traits == expected and judgment.rater == "anna"
    assert len(found) == (8 if blank in again.values() else 7)

    sheet = make_sheet("consistency", dialogues, DEFINITIONS, items=8)
    read = read_votes(sheet, [filled(sheet, tmp_path / "ben.csv", lambda item: {"verdict": "FADE"})])
    asked = {(item.of[0][0], item.trait) for item in sheet.items}
    assert {((v.method, v.key), v.trait) for v in read.judgments() if isinstance(v, Verdict)} == asked
    assert len(read.judgments()) == 8 and all(trait in dict(DEFINITIONS) for _, trait in asked)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda row: {"choice": "C"}, r"line 2: item \w{6}: choice is 'C', not A, B, tie"),
        (lambda row: {"item": "nobody"}, "line 2: unknown item 'nobody'"),
        (lambda row: {"A": "Customer: other", "choice": "A"}, r"line 2: the text is not that of item"),
        (lambda row: {}, "has no vote in it"),
    ],
)
def test_a_malformed_file_of_votes_is_refused_with_file_and_line(
    edit: Callable[[dict[str, str]], dict[str, str]], words: str, tmp_path: Path
) -> None:
    sheet = make_sheet("realism", many(), {}, items=5)
    first = sheet.items[0].id
    path = filled(sheet, tmp_path / "anna.csv", lambda item: edit({}) if item.id == first else {})
    with pytest.raises(AnnotationError, match=rf"anna\.csv.*{words}"):
        read_votes(sheet, [path])


def test_what_is_no_sheet_and_no_votes_says_so(tmp_path: Path) -> None:
    sheet = make_sheet("realism", many(), {}, items=5)
    once = filled(sheet, tmp_path / "anna.csv", lambda item: {"choice": "A"})
    with pytest.raises(AnnotationError, match=r"anna answered item .* before"):
        read_votes(sheet, [once, once])
    with pytest.raises(AnnotationError, match="no file of votes"):
        read_votes(sheet, [])
    key = sheet.save(tmp_path / "s")[2]
    sheet.save(tmp_path / "s")  # the same again is harmless
    with pytest.raises(AnnotationError, match="the key of another sheet"):
        make_sheet("realism", many(), {}, items=5, seed=1).save(tmp_path / "s")
    for content, words in (
        ("{}", "is not a"),
        ("[", "damaged"),
        (key.read_text().replace('"talks"', '"t"'), "damaged"),
    ):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(AnnotationError, match=rf"x\.json.*{words}"):
            Sheet.load(tmp_path / "x.json")
    with pytest.raises(AnnotationError, match="none; give at least one"):
        make_sheet("realism", many(), {}, items=0)
    with pytest.raises(AnnotationError, match="all pairs of dialogues say the same"):
        make_sheet("realism", [talk("a", "t", "x"), talk("b", "t", "x")], {}, items=3)
    for kind, words in (("composability", "several traits"), ("consistency", "with traits")):
        with pytest.raises(EvaluationError, match=words):
            judged(kind, [talk("a", "t", "x")])  # type: ignore[arg-type]


def test_what_a_model_wrote_is_no_formula_and_no_markup(tmp_path: Path) -> None:
    dialogues = [talk(m, "t", f"{HOSTILE} {m}", "=1+1") for m in "ab"]
    table, page, _ = make_sheet("realism", dialogues, {}, items=3).save(tmp_path)
    with table.open(encoding="utf-8-sig", newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@"))]
    assert any(" ".join(HOSTILE.split()) in unprotect(cell) for cell in cells)
    html = page.read_text("utf-8")
    assert not re.search(r"https?://", html) and "<img" not in html
    document = Document(html)
    assert not [name for _, name, _ in document.attributes if name in ("src", "href", "style") or name.startswith("on")]


def test_a_cell_comes_back_from_a_spreadsheet_that_drops_what_it_cannot_hold(tmp_path: Path) -> None:
    """Excel's cells end at 32,767 characters, and no control character is saved."""
    dialogues = [talk("a", "t", "Long. " * 50_000, "\x00\x0bBell\x07", traits={"impatience": "high"})]
    sheet = make_sheet("consistency", dialogues, DEFINITIONS, items=1)

    def saved(item: Any) -> dict[str, str]:
        cell = sheet.cells(item)[1]
        return {"dialogue": re.sub(r"[\x00-\x09\x0b-\x1f]", "", cell[:32_767]), "verdict": "stable"}

    (verdict,) = read_votes(sheet, [filled(sheet, tmp_path / "anna.csv", saved)]).judgments()
    assert isinstance(verdict, Verdict) and verdict.verdict == "stable"
    assert "the rest is on the page" in sheet.cells(sheet.items[0])[1]


@pytest.mark.parametrize(
    "command",
    [
        "realism {a} --no-model-free --judgments {j} --out {b}",
        "fidelity {a} --no-instruments --judgments {j} --out {j}",
        "fidelity {a} --html {b}",
        "composability {a} --cache {b}",
        "consistency {a} --plot {b}",
        "conduct {b} --out {a}",
        "conduct {b} --out {b}",
        "judge realism {a} --judge http://127.0.0.1:9/v1#m --out {b}",
        "judge realism {a} {b} --judge http://127.0.0.1:9/v1#m --out {new} --cache {a}",
        "votes {key} {votes} --out {votes}",
        "votes {key} {votes} --out {a}",
    ],
)
def test_nothing_is_written_over_what_took_long_to_make(command: str, tmp_path: Path) -> None:
    """Dialogues and judgments, whether the command reads them or an option has the wrong path."""
    a, b, *_ = write_dialogues(tmp_path, many())
    votes = tmp_path / "anna.csv"
    votes.write_text("item,choice\n")
    judged_here = write_judgments(tmp_path / "j.jsonl", "realism", [], {})
    _, _, key = make_sheet("realism", many(), {}, items=2).save(tmp_path)
    files = {"a": a, "b": b, "j": judged_here, "key": key, "votes": votes, "new": tmp_path / "new.jsonl"}
    kept = {path: path.read_bytes() for path in files.values() if path.exists()}
    arguments = [part.format(**files) for part in command.split()]
    ran = CliRunner(env={"COLUMNS": "500"}).invoke(cli.app, ["eval", *arguments])
    assert ran.exit_code == 2 and "would be written over" in ran.output, (ran.output, ran.exception)
    assert kept == {path: path.read_bytes() for path in files.values() if path.exists()}


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("fidelity", "rater", []),
        ("fidelity", "method", 1.5),
        ("fidelity", "traits", {"impatience": "some"}),
        ("fidelity", "key", ["", "t", float("inf"), "generated"]),
        ("fidelity", "more", 1),
        ("consistency", "trait", {}),
        ("consistency", "verdict", "grows"),
        ("realism", "first", ["a", ["", "t", 0]]),
        ("realism", "choice", None),
    ],
)
def test_a_damaged_judgment_is_named(tmp_path: Path, kind: Any, field: str, value: Any) -> None:
    """And not by a traceback of the metric that sorts or compares it."""
    side = ("a", ("", "t", 0, "generated"))
    whole: dict[Kind, AnyJudgment] = {
        "fidelity": Judgment(*side, "W", {"impatience": "low"}),
        "consistency": Verdict(*side, "W", "impatience", "fade"),
        "realism": Preference(side, ("b", side[1]), "W", "first"),
    }
    path = write_judgments(tmp_path / "j.jsonl", kind, [whole[kind]], {})
    assert read_judgments([path], kind) == [whole[kind]]
    header, line = path.read_text().splitlines()
    path.write_text(f"{header}\n{json.dumps({**json.loads(line), field: value})}\n")
    with pytest.raises(EvaluationError, match=r"j\.jsonl holds no judgments, or is damaged"):
        read_judgments([path], kind)


@pytest.mark.parametrize(
    "damage",
    [{"trait": []}, {"id": None}, {"talks": [[["agent", None]]]}, {"talks": []}, {"of": [[]]}, {"repeats": {}}],
)
def test_a_damaged_key_is_named(tmp_path: Path, damage: dict[str, Any]) -> None:
    _, _, path = make_sheet("consistency", many(), DEFINITIONS, items=3).save(tmp_path)
    key = json.loads(path.read_text())
    key["items"][0] |= damage
    path.write_text(json.dumps(key))
    with pytest.raises(AnnotationError, match="is a damaged key"):
        Sheet.load(path)


def test_no_trait_takes_the_place_of_another_column() -> None:
    with pytest.raises(AnnotationError, match="'comment' would be a column twice"):
        make_sheet("fidelity", many(), {**DEFINITIONS, "comment": ("Comments.", "Is silent.")}, items=3)


def test_what_is_no_number_in_a_header_ends_no_evaluation(tmp_path: Path) -> None:
    """JSON has no nan; Python's reads and writes it, and so may have what made a file of dialogues."""
    save_figures(tmp_path / "f.json", {"headers": [{"sampling": {"temperature": float("nan")}}, (float("inf"), 0.5)]})
    found = json.loads((tmp_path / "f.json").read_text(), parse_constant=pytest.fail)
    assert found == {"headers": [{"sampling": {"temperature": None}}, [None, 0.5]]}


# ---- The page, in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium. CI must have it; elsewhere its absence skips these tests."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None and os.environ.get("CI"):
        pytest.fail("the tests of the page need Chromium")
    if path is None:
        pytest.skip("Chromium is not installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Callable[[Sheet], Page]]:
    """Opens a sheet's page as a file. Afterwards: no complaint, and nothing was asked of anybody."""
    context = browser.new_context(viewport={"width": 1000, "height": 900}, accept_downloads=True)
    problems: list[str] = []
    urls: list[str] = []

    def open_page(sheet: Sheet) -> Page:
        page = context.new_page()
        page.on("request", lambda request: urls.append(request.url))
        page.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(sheet.save(tmp_path / sheet.id)[1].as_uri())
        page.get_by_label("Your name").fill("=Anna [x]")
        page.keyboard.press("Enter")
        expect(page.locator("#work")).to_be_visible()
        return page

    yield open_page
    assert problems == [] and not [url for url in urls if not url.startswith(("file:", "blob:"))]
    context.close()


def downloaded(page: Page, path: Path) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    download.value.save_as(path)
    return path


def test_pairs_are_judged_by_keyboard_and_read_back(opened: Callable[[Sheet], Page], tmp_path: Path) -> None:
    dialogues = [talk(m, "t", f"{HOSTILE} {m}", traits=t) for m in "abc" for t in ({}, {"impatience": "low"})]
    sheet = make_sheet("realism", dialogues, {}, items=6)
    page = opened(sheet)
    for i, item in enumerate(sheet.items):
        expect(page.locator("#place")).to_have_text(f"{i + 1} of {len(sheet.items)}")
        shown_texts = page.locator(".talk .customer span").all_text_contents()
        assert shown_texts == [text for talk in item.talks for speaker, text in talk if speaker == "customer"]
        page.keyboard.press("ab0"[i % 3])
        page.keyboard.press(("Enter", "ArrowRight")[i % 2])
    expect(page.get_by_role("status")).to_contain_text("all have an answer")
    page.keyboard.press("c")
    page.keyboard.type("-2 of 3")
    page.keyboard.press("Escape")
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
    page.reload()  # answers are kept
    page.get_by_label("Your name").fill("=Anna [x]")
    page.keyboard.press("Enter")
    file = downloaded(page, tmp_path / "a.csv")
    read = read_votes(sheet, [file])
    assert read.answers == {
        "=Anna [x]": {item.id: {"choice": ("A", "B", "tie")[i % 3]} for i, item in enumerate(sheet.items)}
    }
    assert read.comments == (("=Anna [x]", sheet.items[-1].id, "-2 of 3"),)
    blank = read_table(tmp_path / sheet.id / "realism.csv")
    assert [[row[name] for name in ("item", "A", "B")] for row in read_table(file)] == [
        [row[name] for name in ("item", "A", "B")] for row in blank
    ]


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_traits_and_courses_are_judged_by_keyboard_and_mouse(opened: Callable[[Sheet], Page], tmp_path: Path) -> None:
    sheet = make_sheet("fidelity", many(), DEFINITIONS, items=4)
    page = opened(sheet)
    assert page.locator("legend").all_text_contents() == ["1 impatience", "2 skeptical"]
    for key in ("1", "1", "Enter", "0", "Enter"):  # impatience: low, medium; none
        page.keyboard.press(key)
    page.get_by_role("group", name="skeptical").get_by_label("high").click()
    page.get_by_role("button", name="Next →").click()
    read = read_votes(sheet, [downloaded(page, tmp_path / "a.csv")])
    ids = [item.id for item in sheet.items]
    assert read.answers["=Anna [x]"] == {
        ids[0]: {"impatience": "medium", "skeptical": "none"},
        ids[1]: {"impatience": "none", "skeptical": "none"},
        ids[2]: {"impatience": "none", "skeptical": "high"},
    }
    sheet = make_sheet("consistency", many(), DEFINITIONS, items=4)
    page = opened(sheet)
    expect(page.get_by_role("group", name=f"How does {sheet.items[0].trait} go")).to_be_visible()
    for key in ("1", "Enter", "2", "Enter", "3", "Enter", "0"):
        page.keyboard.press(key)
    read = read_votes(sheet, [downloaded(page, tmp_path / "b.csv")])
    assert [a["verdict"] for a in read.answers["=Anna [x]"].values()] == ["fade", "stable", "escalate", "absent"]


@pytest.mark.parametrize("width", [360, 1000])
def test_nothing_is_wider_than_the_window(width: int, opened: Callable[[Sheet], Page]) -> None:
    page = opened(make_sheet("realism", many(), {}, items=4))
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
