"""People in the loop: agreement, the blinded sheet, the votes that come back, and the page in headless Chromium."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import math
import os
import random
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from importlib import resources
from itertools import pairwise, permutations
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import Document
from playwright.sync_api import Browser, Page, expect, sync_playwright
from typer.testing import CliRunner, Result

from traitbasis import cli
from traitbasis.annotate import COLUMNS, Item, Sheet, make_sheet, protect, unprotect
from traitbasis.basis import DEFAULT_DOSE
from traitbasis.contexts import contexts_hash, read_contexts
from traitbasis.errors import AnnotationError, TraitBasisError
from traitbasis.metrics.agreement import Level, bootstrap, krippendorff_alpha
from traitbasis.pairs import load_pairs
from traitbasis.sweep import Cell, Condition, SweptTurn, read_cells
from traitbasis.votes import Votes, automatic_choice, read_votes

_ = math.nan
LEVELS: tuple[Level, ...] = get_args(Level)
HOSTILE = '</script><img src=x onerror="window.hacked = 1"> {{ 7 * 7 }} & \'quoted\', "twice"\nline two \u2028 €'
FORMULAS = ["=1+1", "+49 30 1234", "-5 is what I owe", "@you", "'=quoted", "＝1+1", "'tis late"]
LAYERS = (4, 8, 12)
expect.set_options(timeout=20_000)  # two cores, and other tests on them


# ---- Krippendorff's alpha

# Krippendorff (2011), section C: four observers, twelve units, missing data.
PUBLISHED = [
    [1, 2, 3, 3, 2, 1, 4, 1, 2, _, _, _],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, _, 3],
    [_, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, _],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, _],
]


@pytest.mark.parametrize(
    ("level", "alpha"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849), ("ratio", 0.797)]
)
def test_alpha_of_the_published_example(level: Level, alpha: float) -> None:
    assert krippendorff_alpha(PUBLISHED, level) == pytest.approx(alpha, abs=5e-4)


def test_alpha_worked_by_hand() -> None:
    """Two annotators, items (0,0), (1,1), (0,1): o_01 = o_10 = 1; n_0 = n_1 = 3. D_o = 2/6, D_e = 18/30."""
    assert krippendorff_alpha([[0, 1, 0], [0, 1, 1]], "nominal") == pytest.approx(1 - (2 / 6) / (18 / 30))
    # (0,0), (0,3): n_0 = 3, n_3 = 1, so δ² is the same factor in D_o and D_e: 1 - 3 * 2 / 6.
    assert krippendorff_alpha([[0, 0], [0, 3]], "interval") == pytest.approx(0.0)
    # (1,2), (1,2), (2,3): n = 2, 3, 1. o_12 = 2, o_23 = 1. Interval: 1 - 5 * (2+1) / (2*3*1 + 3*1*1 + 2*1*4).
    assert krippendorff_alpha([[1, 1, 2], [2, 2, 3]], "interval") == pytest.approx(1 - 15 / 17)
    # Ordinal, mid-ranks 1, 3.5, 5.5: δ² is 6.25, 4 and 20.25. 1 - 5 * (2*6.25 + 4) / (6*6.25 + 3*4 + 2*20.25).
    assert krippendorff_alpha([[1, 1, 2], [2, 2, 3]], "ordinal") == pytest.approx(1 - 5 * 16.5 / 90)


@pytest.mark.parametrize("level", LEVELS)
def test_alpha_is_1_in_agreement_0_by_chance_and_below_0_in_opposition(level: Level) -> None:
    rng = np.random.default_rng(3)
    truth = rng.integers(4, size=40).astype(float)
    assert krippendorff_alpha([truth, truth, truth], level) == pytest.approx(1)
    assert krippendorff_alpha(rng.integers(4, size=(3, 4000)), level) == pytest.approx(0, abs=0.03)
    assert krippendorff_alpha([truth, 3 - truth], level) < -0.2


@pytest.mark.parametrize("level", LEVELS)
def test_an_item_with_one_vote_does_not_count(level: Level) -> None:
    lonely = [[*row, 9 if i == 0 else _, _] for i, row in enumerate(PUBLISHED)]
    assert krippendorff_alpha(lonely, level) == krippendorff_alpha(PUBLISHED, level)


@pytest.mark.parametrize(
    "votes",
    [
        np.zeros((0, 0)),
        np.full((3, 4), _),
        [[1, 2, 3]],  # one annotator
        [[1, _], [_, 2]],  # no item has two votes
        [[2, 2], [2, 2]],  # no variation: nothing to expect
        [[2, 2, 1], [2, 2, _]],  # none among what counts
    ],
)
def test_alpha_is_nan_where_undefined(votes: Sequence[Sequence[float]]) -> None:
    assert all(math.isnan(krippendorff_alpha(votes, level)) for level in LEVELS)


def test_what_is_no_table_of_votes_is_refused() -> None:
    for votes, level, words in [
        ([1, 2], "nominal", "(annotators, items)"),
        ([[math.inf, 1]], "nominal", "infinite"),
        ([[-1, 1]], "ratio", "negative"),
        ([[1, 1]], "rational", "nominal, ordinal, interval, ratio"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            krippendorff_alpha(votes, level)  # type: ignore[arg-type]


def naive_alpha(rows: list[list[int | None]], level: Level) -> float:
    """Alpha pair by pair, in exact fractions: D_o over pairs within items, D_e over pairs of all votes that pair."""
    items = [[vote for vote in column if vote is not None] for column in zip(*rows, strict=True)]
    items = [votes for votes in items if len(votes) >= 2]
    pool = [vote for votes in items for vote in votes]
    n = Counter(pool)

    def delta(c: int, k: int) -> Fraction:
        if level == "nominal":
            return Fraction(c != k)
        if level == "interval":
            return Fraction(c - k) ** 2
        if level == "ratio":
            return Fraction(c - k, c + k) ** 2 if c + k else Fraction(0)
        low, high = sorted((c, k))
        return (sum(n[g] for g in range(low, high + 1)) - Fraction(n[c] + n[k], 2)) ** 2

    expected = sum((delta(a, b) for a, b in permutations(pool, 2)), Fraction(0))
    if not expected:
        return math.nan
    observed = sum((delta(a, b) / (len(v) - 1) for v in items for a, b in permutations(v, 2)), Fraction(0))
    return float(1 - (len(pool) - 1) * observed / expected)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 6).flatmap(
        lambda items: st.lists(
            st.lists(st.none() | st.integers(0, 5), min_size=items, max_size=items), min_size=1, max_size=4
        )
    ),
    st.sampled_from(LEVELS),
)
def test_alpha_equals_a_count_pair_by_pair(rows: list[list[int | None]], level: Level) -> None:
    votes = [[_ if vote is None else vote for vote in row] for row in rows]
    assert krippendorff_alpha(votes, level) == pytest.approx(naive_alpha(rows, level), abs=1e-9, nan_ok=True)


def test_a_bootstrap_interval_draws_items_and_is_repeatable() -> None:
    rng = np.random.default_rng(0)
    votes = rng.normal(size=(3, 400))
    low, high = bootstrap(lambda drawn: float(drawn.mean()), votes)
    error = votes.mean(axis=0).std() / math.sqrt(400)
    assert (low, high) == pytest.approx((votes.mean() - 1.96 * error, votes.mean() + 1.96 * error), abs=0.3 * error)
    assert (low, high) == bootstrap(lambda drawn: float(drawn.mean()), votes)
    assert (low, high) != bootstrap(lambda drawn: float(drawn.mean()), votes, seed=1)
    # Whole items are drawn: columns that agree still agree in every draw.
    same = np.arange(20.0)
    assert bootstrap(lambda drawn: krippendorff_alpha(drawn, "interval"), [same, same]) == pytest.approx((1, 1))
    assert all(map(math.isnan, bootstrap(lambda drawn: 1.0, [[2.0]])))
    assert all(map(math.isnan, bootstrap(lambda drawn: math.nan, votes, times=3)))


# ---- The sheet


def swept(layers: Sequence[int] = LAYERS, doses: Sequence[float] = (0.1, 0.2), turns: int = 12) -> list[Cell]:
    """A sweep that was written by hand: every turn says where it is from, by a number alone."""
    contexts = read_contexts()
    cases = [(contexts[i % 5].id, 1000 + i) for i in range(turns)]

    def cell(
        number: int, condition: Condition, trait: str | None = None, layer: int | None = None, dose: float = 0.0
    ) -> Cell:
        texts = (f"Turn {number * 100 + i} of an order, please." for i in range(turns))
        spoken = [SweptTurn(*case, text, {"probe": 0.5}) for case, text in zip(cases, texts, strict=False)]
        return Cell(condition, trait, layer, dose, tuple(spoken))

    cells = [
        cell(0, "unsteered"),
        cell(1, "prompted", "impatience"),
        cell(2, "random", layer=8, dose=0.2),
        cell(3, "steered", "rude", 8, 0.2),
    ]
    places = [(layer, dose) for dose in doses for layer in layers]
    return cells + [cell(number, "steered", "impatience", *place) for number, place in enumerate(places, 4)]


def with_texts(cells: list[Cell], *texts: str) -> list[Cell]:
    """Other texts for the first turns of the unsteered cell."""
    turns = tuple(replace(turn, text=text) for turn, text in zip(cells[0].turns, texts, strict=False))
    return [replace(cells[0], turns=turns + cells[0].turns[len(turns) :]), *cells[1:]]


def written(path: Path, cells: Sequence[Cell], **header: object) -> Path:
    """A sweep's file."""
    lines: list[object] = [
        {"format": "traitbasis.sweep/1", "model": "tiny", "contexts_hash": contexts_hash(read_contexts()), **header}
    ]
    for c in cells:
        turns = [{"context": t.context, "seed": t.seed, "text": t.text, "scores": dict(t.scores)} for t in c.turns]
        lines.append({"condition": c.condition, "trait": c.trait, "layer": c.layer, "dose": c.dose, "turns": turns})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def read_table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file))


def test_a_sheet_has_as_many_turns_of_each_layer_and_of_the_unsteered_model() -> None:
    sheet = make_sheet(swept(), "impatience", turns_per_layer=10)
    places = Counter((item.condition, item.layer, item.dose) for item in sheet.items)
    assert places == {("unsteered", None, 0.0): 10, **{("steered", layer, 0.2): 10 for layer in LAYERS}}
    # On the same tasks: contexts and seeds are paired, and each context comes once before any comes again.
    drawn: dict[object, set[tuple[str, int]]] = defaultdict(set)
    for item in sheet.items:
        drawn[item.condition, item.layer, item.dose].add((item.context, item.seed))
    assert len(set(map(frozenset, drawn.values()))) == 1
    assert set(Counter(context for context, _ in drawn["unsteered", None, 0.0]).values()) == {2}
    (cell,) = [c for c in swept() if (c.trait, c.layer, c.dose) == ("impatience", 8, 0.2)]
    texts = {(turn.context, turn.seed): turn.text for turn in cell.turns}
    assert all(item.text == texts[item.context, item.seed] for item in sheet.items if item.layer == 8)
    context = next(c for c in read_contexts() if c.id == sheet.items[0].context)
    assert sheet.items[0].agent == context.turns[-1].text and sheet.items[0].task == context.turns[0].text
    assert (sheet.definition, sheet.opposite) == (
        load_pairs("impatience").definition,
        load_pairs("impatience").opposite,
    )


def test_layers_doses_and_the_seed_choose() -> None:
    cells = swept()
    sheet = make_sheet(cells, load_pairs("impatience"), layers=[12, 4], dose=[0.1, 0.2], turns_per_layer=3)
    steered = {(layer, dose) for layer in (4, 12) for dose in (0.1, 0.2)}
    assert {(item.layer, item.dose) for item in sheet.items} == {(None, 0.0), *steered}
    assert len(sheet.items) == 15
    assert make_sheet(cells[::-1], "impatience") == make_sheet(cells, "impatience")  # repeatable
    one, other = (make_sheet(cells, "impatience", seed=seed) for seed in (0, 1))
    assert one.id != other.id and not {i.id for i in one.items} & {i.id for i in other.items}
    assert {i.seed for i in make_sheet(cells, "impatience", turns_per_layer=5).items} != {
        i.seed for i in make_sheet(cells, "impatience", turns_per_layer=5, seed=1).items
    }


def test_annotators_get_the_same_bytes_whatever_the_labels(tmp_path: Path) -> None:
    """Blinding: the same turns, dealt to other layers, doses and conditions, make the same CSV and the same page."""
    cells = swept()
    wanted = [
        i for i, c in enumerate(cells) if c.condition == "unsteered" or (c.trait == "impatience" and c.dose == 0.2)
    ]
    dealt = list(cells)
    for i, j in zip(wanted, [*wanted[1:], wanted[0]], strict=True):
        dealt[i] = replace(cells[i], turns=cells[j].turns)
    files = [make_sheet(c, "impatience").save(tmp_path / name) for name, c in (("a", cells), ("b", dealt))]
    (table, page, key), others = files
    assert table.read_bytes() == others[0].read_bytes() and page.read_bytes() == others[1].read_bytes()
    assert key.read_bytes() != others[2].read_bytes()
    changed = make_sheet(with_texts(cells, *["Something else."] * 12), "impatience").save(tmp_path / "c")
    assert table.read_bytes() != changed[0].read_bytes() and page.read_bytes() != changed[1].read_bytes()


def test_nothing_for_annotators_names_a_layer_a_dose_or_a_condition(tmp_path: Path) -> None:
    cells = swept(layers=(8761, 8762), doses=(0.2173,))
    sheet = make_sheet(cells, "impatience", dose=0.2173, sweep={"model": "secretive"})
    table, page, key = sheet.save(tmp_path)
    for text in (table.read_text("utf-8-sig"), page.read_text("utf-8")):
        assert not re.search(r"steered|layer|dose|8761|8762|2173|secretive", text, re.IGNORECASE)
        assert not any(item.context in text for item in sheet.items)
        places = [text.index(item.id) for item in sheet.items]
        assert places == sorted(places)
    # Neither the order of items nor that of their names says anything: with 30 turns of three layers in blocks there
    # would be 3 runs, in a shuffle about 20.
    for items in (sheet.items, sorted(sheet.items, key=lambda item: item.id)):
        assert sum(a.layer != b.layer for a, b in pairwise(items)) > 12
    assert {"8761", "8762"} <= set(re.findall(r"\d+", key.read_text("utf-8")))


def test_the_key_brings_the_sheet_back(tmp_path: Path) -> None:
    sheet = make_sheet(with_texts(swept(), HOSTILE), "impatience", seed=5, sweep={"model": "tiny", "seed": 3})
    table, _page, key = sheet.save(tmp_path)
    assert Sheet.load(key) == Sheet.load(tmp_path) == sheet
    item = sheet.items[7]
    entry = json.loads(key.read_text("utf-8"))["items"][item.id]
    assert [entry[name] for name in ("layer", "dose", "condition", "context", "seed")] == [
        item.layer, item.dose, item.condition, item.context, item.seed,
    ]  # fmt: skip
    rows = read_table(table)
    assert list(rows[0]) == list(COLUMNS) and table.read_bytes().startswith(b"\xef\xbb\xbf")
    assert [(row["item"], unprotect(row["turn"])) for row in rows] == [(item.id, item.text) for item in sheet.items]
    assert rows[7]["context"] == f"Agent: {item.agent} (Task: {item.task})"


def test_a_key_is_never_written_over(tmp_path: Path) -> None:
    sheet = make_sheet(swept(), "impatience")
    key = sheet.save(tmp_path)[2]
    sheet.save(tmp_path)  # the same again is harmless
    before = key.read_bytes()
    with pytest.raises(AnnotationError, match=r"impatience\.key\.json is the key of another sheet"):
        make_sheet(swept(), "impatience", seed=1).save(tmp_path)
    assert key.read_bytes() == before and sorted(p.name for p in tmp_path.iterdir()) == [
        "impatience.csv", "impatience.html", "impatience.key.json",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dose": 0.4}, "no dose 0.4; it has 0.1, 0.2"),
        ({"layers": [8, 9]}, "no layer 9 at dose 0.2; it has 4, 8, 12"),
        ({"turns_per_layer": 13}, "has 12 turns in the sweep, and 13 are asked for"),
        ({"turns_per_layer": 0}, "at least one"),
        ({"trait": "skeptical"}, "no steered turns of 'skeptical'; it has impatience, rude"),
        ({"cells": swept()[1:]}, "no unsteered turns"),
        ({"contexts": read_contexts()[1:]}, "unknown context"),
        ({"sweep": {"contexts_hash": "beef"}}, "made on beef"),
    ],
)
def test_a_sheet_that_cannot_be_made_says_why(options: dict[str, object], words: str) -> None:
    arguments: dict[str, object] = {"cells": swept(), "trait": "impatience", **options}
    with pytest.raises(AnnotationError, match=re.escape(words)):
        make_sheet(**arguments)  # type: ignore[arg-type]


def test_a_key_that_is_none_says_so(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match=r"must hold one key, .* holds none"):
        Sheet.load(tmp_path)
    for content, words in [("{}", "is not a"), ('{"format": "traitbasis.annotation/1"}', "damaged"), ("[", "damaged")]:
        (tmp_path / "x.key.json").write_text(content)
        with pytest.raises(AnnotationError, match=rf"x\.key\.json.*{words}"):
            Sheet.load(tmp_path)
    with pytest.raises(AnnotationError, match="cannot read"):
        Sheet.load(tmp_path / "nowhere.json")


@given(st.text() | st.sampled_from(FORMULAS))
def test_a_protected_text_is_no_formula_and_comes_back(text: str) -> None:
    cell = protect(text)
    assert unprotect(cell) == text
    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠"))


# ---- Votes


@pytest.fixture
def sheet(tmp_path: Path) -> Sheet:
    """Three layers and the control, ten turns each, saved in ``sheets``."""
    sheet = make_sheet(with_texts(swept(turns=10), HOSTILE, *FORMULAS), "impatience", sweep={"model": "tiny"})
    sheet.save(tmp_path / "sheets")
    return sheet


Rate = Callable[[Item], tuple[object, ...]]


def votes_file(path: Path, sheet: Sheet, rate: Rate, annotator: str | None = None, delimiter: str = ",") -> Path:
    """The sheet's CSV filled in; `rate` gives rating, usable and comment, as far as it likes."""
    name = [] if annotator is None else [annotator]
    rows = [[*COLUMNS, *(["annotator"] if name else [])]]
    for item in sheet.items:
        vote = (*rate(item), "", "", "")[:3]
        rows.append([item.id, item.said_before, protect(item.text), *map(str, vote), *name])
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


BEST = {None: 0, 4: 1, 8: 3, 12: 2}  # what annotators see at each layer


def test_votes_come_back_by_layer_with_a_choice(tmp_path: Path, sheet: Sheet) -> None:
    files = [
        votes_file(tmp_path / "anna.csv", sheet, lambda item: (BEST[item.layer], "", "")),
        votes_file(tmp_path / "x.csv", sheet, lambda item: (BEST[item.layer], "yes", "=ha"), annotator="Ben  Okri"),
        votes_file(
            tmp_path / "chen.csv",
            sheet,
            lambda item: (min(BEST[item.layer] + 1, 3), "no" if item.layer == 4 else "yes"),
        ),
    ]
    votes = read_votes(tmp_path / "sheets", files)
    assert votes.annotators == ("Ben Okri", "anna", "chen")
    assert votes.given() == {"Ben Okri": 40, "anna": 40, "chen": 40}
    rows = votes.by_layer()
    assert [(row.layer, row.dose, row.turns, row.votes) for row in rows] == [
        (None, 0.0, 10, 30), (4, 0.2, 10, 30), (8, 0.2, 10, 30), (12, 0.2, 10, 30),
    ]  # fmt: skip
    assert [row.rating.value for row in rows] == pytest.approx([1 / 3, 4 / 3, 3, 7 / 3])
    assert [row.usable.value for row in rows] == pytest.approx([1, 2 / 3, 1, 1])
    choice = votes.choice()
    assert choice is rows[2] and votes.agrees(8, 0.2) and not votes.agrees(12, 0.2)
    assert votes.agrees(8, 0.1) is True and votes.agrees(12, 0.1) is False, "by layer: the sheet has no dose of 0.1"
    assert votes.agrees(9, 0.2) is None, "nobody saw it"
    assert votes.of(12, 0.2) is rows[3] and votes.of(12, 0.1) is None
    assert ("Ben Okri", sheet.items[0].id, "=ha") in votes.comments


def test_the_figures_are_those_of_an_independent_count(tmp_path: Path, sheet: Sheet) -> None:
    rng = random.Random(4)
    cast: dict[str, dict[str, tuple[int | None, bool]]] = {}
    files = []
    for name in ("a", "b", "c"):
        cast[name] = {i.id: (rng.choice([None, 0, 1, 2, 3]), rng.random() < 0.8) for i in sheet.items}
        own = cast[name]

        def rate(item: Item, own: dict[str, tuple[int | None, bool]] = own) -> tuple[object, ...]:
            rating, usable = own[item.id]
            return ("", "") if rating is None else (rating, "yes" if usable else "no")

        files.append(votes_file(tmp_path / f"{name}.csv", sheet, rate))
    votes = read_votes(sheet, files)
    for row in votes.by_layer():
        means, shares, count = [], [], 0
        for item in (i for i in sheet.items if (i.layer, i.dose) == (row.layer, row.dose)):
            given = [c[item.id] for c in cast.values() if c[item.id][0] is not None]
            count += len(given)
            if given:
                means.append(sum(r or 0 for r, _ in given) / len(given))
                shares.append(sum(u for _, u in given) / len(given))
        assert (row.rating.value, row.usable.value) == pytest.approx((np.mean(means), np.mean(shares)))
        assert (row.turns, row.votes) == (len(means), count)
        assert min(means) <= row.rating.low < row.rating.value < row.rating.high <= max(means)
    table = [[c[i.id][0] for i in sheet.items] for c in cast.values()]
    assert votes.alpha["rating"].value == pytest.approx(naive_alpha(table, "ordinal"))
    marks = [[None if c[i.id][0] is None else int(c[i.id][1]) for i in sheet.items] for c in cast.values()]
    assert votes.alpha["usable"].value == pytest.approx(naive_alpha(marks, "nominal"))
    assert votes.alpha["rating"].low < votes.alpha["rating"].value < votes.alpha["rating"].high


def test_expression_is_not_bought_with_unusable_turns(tmp_path: Path, sheet: Sheet) -> None:
    """Layer 8 is the strongest. It may lose one turn in ten more than the control, and no more."""

    def cast(spoiled: int) -> Votes:
        bad = {i.id for i in [i for i in sheet.items if i.layer == 8][:spoiled]}
        bad.add(next(i.id for i in sheet.items if i.layer is None))  # the control is not perfect, either

        def rate(item: Item) -> tuple[object, ...]:
            return BEST[item.layer], "no" if item.id in bad else "yes"

        return read_votes(sheet, [votes_file(tmp_path / f"anna{spoiled}.csv", sheet, rate)])

    for spoiled, layer in ((0, 8), (2, 8), (3, 12), (10, 12)):
        choice = cast(spoiled).choice()
        assert choice is not None and choice.layer == layer, spoiled


def test_of_equal_layers_the_more_usable_then_the_lower_is_chosen(tmp_path: Path, sheet: Sheet) -> None:
    spoiled = next(i.id for i in sheet.items if i.layer == 4)
    votes = read_votes(
        sheet, [votes_file(tmp_path / "a.csv", sheet, lambda i: (2, "no" if i.id == spoiled else "yes"))]
    )
    choice = votes.choice()
    assert choice is not None and choice.layer == 8
    assert math.isnan(votes.alpha["rating"].value)  # one annotator agrees with nobody


def test_without_a_usable_layer_or_a_control_nothing_is_chosen(tmp_path: Path, sheet: Sheet) -> None:
    broken = votes_file(tmp_path / "a.csv", sheet, lambda i: (3, "no" if i.layer else "yes"))
    assert read_votes(sheet, [broken]).choice() is None and read_votes(sheet, [broken]).agrees(8, 0.2) is None
    no_control = votes_file(tmp_path / "b.csv", sheet, lambda i: (3, "yes") if i.layer else ())
    assert read_votes(sheet, [no_control]).choice() is None
    result = read_votes(sheet, [no_control]).result()
    assert result["layers"][0]["rating"]["value"] is None and json.dumps(result, allow_nan=False)


def test_missing_votes_are_missing_and_a_comment_alone_is_kept(tmp_path: Path, sheet: Sheet) -> None:
    rated, marked, said = sheet.items[:3]
    given = {rated.id: (2,), marked.id: ("", "no"), said.id: ("", "", "hm")}
    votes = read_votes(sheet, [votes_file(tmp_path / "a.csv", sheet, lambda i: given.get(i.id, ()))])
    at = {item.id: column for column, item in enumerate(sheet.items)}
    assert votes.ratings[0, at[rated.id]] == 2 and votes.usable[0, at[rated.id]] == 1
    assert math.isnan(votes.ratings[0, at[marked.id]]) and votes.usable[0, at[marked.id]] == 0
    assert np.isnan(votes.ratings).sum() == 39 and np.isnan(votes.usable).sum() == 38
    assert votes.comments == (("a", said.id, "hm"),)


@pytest.mark.parametrize(
    "saved",
    [
        lambda text: text.removeprefix("\ufeff").encode("utf-8"),
        lambda text: text.encode("utf-8"),
        lambda text: text.replace("\r\n", "\n").encode("utf-8") + b"\n\n",
        lambda text: text.removeprefix("\ufeff").encode("cp1252", "replace"),  # Excel's plain CSV
        lambda text: text.replace("item,", " Item ,", 1).encode("utf-8"),
    ],
)
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_what_spreadsheets_save_is_read(
    tmp_path: Path, sheet: Sheet, saved: Callable[[str], bytes], delimiter: str
) -> None:
    file = votes_file(tmp_path / "a.csv", sheet, lambda i: (f"{BEST[i.layer]}.0", "YES"), delimiter=delimiter)
    with file.open(encoding="utf-8", newline="") as opened:
        text = opened.read()
    file.write_bytes(saved(text))
    assert [row.rating.value for row in read_votes(sheet, [file]).by_layer()] == [0, 1, 3, 2]


def edited(sheet: Sheet, edit: Callable[[list[list[str]]], object]) -> bytes:
    """A file with all rated 1, changed by `edit`; row 0 is the heading."""
    rows = [list(COLUMNS), *([i.id, "", f"turn of {i.id}", "1", "yes", ""] for i in sheet.items)]
    edit(rows)
    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows(rows)
    return buffer.getvalue().encode()


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda rows: rows[3].__setitem__(3, "4"), r"line 4: item \w{6}: rating '4' is not 0, 1, 2 or 3"),
        (lambda rows: rows[3].__setitem__(3, "1.5"), "line 4: .*'1.5'"),
        (lambda rows: rows[3].__setitem__(3, "clear"), "line 4: .*'clear'"),
        (lambda rows: rows[3].__setitem__(3, "-1"), "line 4: .*'-1'"),
        (lambda rows: rows[5].__setitem__(4, "maybe"), "line 6: .*usable 'maybe' is not yes or no"),
        (lambda rows: rows[2].__setitem__(0, "Nobody"), "line 3: unknown item 'nobody'"),
        (lambda rows: rows.append(rows[1]), r"line 42: a voted on item \w{6} before, in .*a\.csv, line 2"),
        (lambda rows: rows[0].__setitem__(3, "score"), "line 1: no column rating; found item, context"),
        (lambda rows: rows[2].append("more"), "line 3: 7 fields, and the heading has 6"),
        (lambda rows: [row.__setitem__(slice(3, 5), ["", ""]) for row in rows[1:]], "has no vote in it"),
        (lambda rows: [row.__setitem__(0, "bbbbbb") for row in rows[1:]], "votes on another sheet"),
        (lambda rows: rows.clear(), "is empty"),
        (lambda rows: rows[4].__setitem__(2, "x" * 200_000), "line 5: not CSV"),
    ],
)
def test_a_malformed_file_is_refused_with_file_and_line(
    tmp_path: Path, sheet: Sheet, edit: Callable[[list[list[str]]], object], words: str
) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(edited(sheet, lambda rows: None))
    read_votes(sheet, [file])  # it is the edit that is refused
    file.write_bytes(edited(sheet, edit))
    with pytest.raises(AnnotationError, match=words) as raised:
        read_votes(sheet, [file])
    assert str(file) in str(raised.value)


def test_lines_are_counted_in_the_file_not_in_rows(tmp_path: Path, sheet: Sheet) -> None:
    """A turn may have several lines."""
    names = [item.id for item in sheet.items]
    (tmp_path / "a.csv").write_text(f'item,turn,rating\n{names[0]},"one\ntwo\nthree",1\n\n{names[1]},four,9\n')
    with pytest.raises(AnnotationError, match=r"a\.csv, line 6: "):
        read_votes(sheet, [tmp_path / "a.csv"])


def test_columns_that_were_sorted_one_by_one_are_noticed(tmp_path: Path, sheet: Sheet) -> None:
    rows = [list(COLUMNS), *([i.id, "", protect(i.text), "1", "", ""] for i in sheet.items)]
    for row, turn in zip(rows[1:], sorted(row[2] for row in rows[1:]), strict=True):
        row[2] = turn
    with (tmp_path / "a.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(AnnotationError, match=r"line 2: the turn is not that of item"):
        read_votes(sheet, [tmp_path / "a.csv"])


def test_all_files_are_checked_and_one_annotator_votes_once(tmp_path: Path, sheet: Sheet) -> None:
    half = {item.id for item in sheet.items[:20]}
    first = votes_file(tmp_path / "1.csv", sheet, lambda i: (1,) if i.id in half else (), annotator="anna")
    second = votes_file(tmp_path / "2.csv", sheet, lambda i: () if i.id in half else (1,), annotator="anna")
    assert read_votes(sheet, [first, second]).given() == {"anna": 40}  # in two sittings
    wrong = votes_file(tmp_path / "3.csv", sheet, lambda i: (7,) if i is sheet.items[-1] else (1,))
    with pytest.raises(AnnotationError) as raised:
        read_votes(sheet, [first, wrong, first])
    lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"{wrong}, line ") and "'7'" in lines[0]
    assert lines[1].startswith(f"{first}, line 2: anna voted on item {sheet.items[0].id} before, in {first}, line 2")
    assert len(lines) == 11 and lines[-1] == "and 11 more"
    with pytest.raises(AnnotationError, match="no file"):
        read_votes(sheet, [])
    with pytest.raises(AnnotationError, match=r"cannot read votes from .*nowhere\.csv"):
        read_votes(sheet, [tmp_path / "nowhere.csv"])


# ---- The command


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a sweep of a model called tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    cells = swept()
    folder = tmp_path / "vectors" / "tiny" / "selection"
    written(folder / "impatience.jsonl", [cell for cell in cells if cell.condition == "steered"])
    written(folder / "baselines.jsonl", [cell for cell in cells if cell.condition != "steered"])
    return tmp_path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["annotate", *map(str, arguments)])


def succeed(*arguments: str | Path) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_from_a_sweep_to_the_choice_beside_the_automatic_one(here: Path) -> None:
    output = succeed("sheet", "--trait", "impatience", "--model", "tiny", "--layers", "4,8", "--out", "sheets")
    assert "30 turns to rate" in output and "keep from them: sheets/impatience.key.json" in output
    sheet = Sheet.load("sheets")
    assert sheet == make_sheet(
        read_cells("vectors/tiny/selection/impatience.jsonl")[1]
        + read_cells("vectors/tiny/selection/baselines.jsonl")[1],
        "impatience",
        layers=[4, 8],
        sweep=read_cells("vectors/tiny/selection/impatience.jsonl")[0],
    )
    files = [votes_file(here / f"{name}.csv", sheet, lambda i: (BEST[i.layer],)) for name in ("anna", "[ben]")]
    output = succeed("read", "sheets", *files, "--out", "results/votes.json")
    for words in ("3.00 (3.00 to 3.00)", "[ben]: 30 of 30 turns", "of rating (ordinal): 1.00 (1.00 to 1.00)"):
        assert words in output
    assert "of usable (nominal): undefined" in output
    assert "the votes choose layer 8 at dose 0.2, rated 3.00" in output and "no automatic choice" in output
    result = json.loads((here / "results" / "votes.json").read_text())
    assert result["choice"] == {"layer": 8, "dose": 0.2} and result["automatic"] is result["agrees"] is None
    assert result["annotators"] == {"[ben]": 30, "anna": 30} and result["sweep"]["model"] == "tiny"
    assert result["alpha"]["usable"] == {"value": None, "low": None, "high": None}

    def automatic(layer: int | None, path: str = "vectors/tiny/selection.json") -> None:
        (here / path).write_text(json.dumps({"traits": {"impatience": {"layer": layer, "dose": 0.2}}}))

    automatic(8)
    assert "they agree" in succeed("read", "sheets/impatience.key.json", *files)
    automatic(4)
    output = succeed("read", "sheets", *files, "--out", "votes.json")
    assert "the automatic choice is layer 4 at dose 0.2, rated 1.00" in output and "they do not agree" in output
    assert json.loads((here / "votes.json").read_text())["agrees"] is False
    assert "they do not agree: layer 8 by votes, layer 4 by measurement" in output
    automatic(12, "mine.json")
    output = succeed("read", "sheets", *files, "--selection", "mine.json")
    assert "which is not on the sheet" in output and "saw nothing of layer 12" in output
    assert "they do not agree" not in output
    automatic(None)
    assert "no automatic choice" in succeed("read", "sheets", *files)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot read"),
        ("[", "no selection"),
        ("{}", "no selection"),
        ('{"traits": {"rude": {}}}', "chooses nothing for 'impatience'; it has rude"),
        ('{"made_by": {"model_fingerprint": "beef"}, "traits": {}}', "fingerprint beef"),
        (
            '{"made_by": {"model_fingerprint": "f00d"}, "traits": {"impatience": {"layer": 1, "dose": 0.1, "made_by": '
            '{"model_fingerprint": "beef"}}}}',
            "fingerprint beef",
        ),
        ('{"made_by": 3, "traits": {}}', "no selection"),
        ('{"traits": {"impatience": [1]}}', "no selection"),
        ('{"traits": {"impatience": {"layer": 1.5, "dose": 0.1}}}', r"layer 1\.5 of impatience"),
        ('{"traits": {"impatience": {"layer": true, "dose": 0.1}}}', "layer True of impatience"),
        ('{"traits": {"impatience": {"layer": "8", "dose": 0.1}}}', "layer '8' of impatience"),
        ('{"traits": {"impatience": {"layer": 8, "dose": NaN}}}', "dose nan of impatience"),
        ('{"traits": {"impatience": {"layer": 8, "dose": Infinity}}}', "dose inf of impatience"),
        ('{"traits": {"impatience": {"layer": 8, "dose": "0.1"}}}', r"dose '0\.1' of impatience"),
    ],
)
def test_a_selection_that_cannot_be_compared_says_why(
    tmp_path: Path, sheet: Sheet, content: str | None, words: str
) -> None:
    path = tmp_path / "selection.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AnnotationError, match=words):
        automatic_choice(replace(sheet, sweep={"model_fingerprint": "f00d"}), path)


def test_choices_at_doses_that_people_did_not_see_are_compared_by_layer(here: Path) -> None:
    succeed("sheet", "--trait", "impatience", "--model", "tiny", "--layers", "4,8", "--dose", "0.1", "--out", "sheets")
    votes = votes_file(here / "anna.csv", Sheet.load("sheets"), lambda i: (BEST[i.layer],))

    def read(layer: int, dose: float) -> str:
        made_by = {"model_fingerprint": "f00d"}
        content = {"made_by": made_by, "traits": {"impatience": {"layer": layer, "dose": dose}}}
        (here / "mine.json").write_text(json.dumps(content))
        return succeed("read", "sheets", votes, "--selection", "mine.json", "--out", "votes.json")

    output = read(8, 0.3)
    assert "the votes choose layer 8 at dose 0.1" in output
    assert "automatic choice is layer 8 at dose 0.3, which is not on the sheet; of that layer it has dose 0.1" in output
    assert "they agree on layer 8; doses cannot be compared" in output and "not agree" not in output
    assert json.loads((here / "votes.json").read_text())["agrees"] is True
    assert "they do not agree: layer 8 by votes, layer 4 by measurement" in read(4, 0.3)
    assert json.loads((here / "votes.json").read_text())["agrees"] is False
    assert "they agree on layer 8\n" in read(8, 0.1)


def test_of_two_doses_on_the_sheet_the_dose_counts(here: Path) -> None:
    succeed("sheet", "--trait", "impatience", "--model", "tiny", "--layers", "8", "--dose", "0.1,0.2", "--out", "both")
    votes = votes_file(here / "anna.csv", Sheet.load("both"), lambda i: (round(10 * i.dose),))
    (here / "mine.json").write_text(json.dumps({"traits": {"impatience": {"layer": 8, "dose": 0.1}}}))
    output = succeed("read", "both", votes, "--selection", "mine.json", "--out", "votes.json")
    assert "they agree on layer 8, not on the dose: 0.2 by votes, 0.1 by measurement" in output
    assert json.loads((here / "votes.json").read_text())["agrees"] is False


def test_the_documents_example_sweeps_what_its_sheet_asks_for() -> None:
    text = (Path(__file__).parent.parent / "docs" / "annotating.md").read_text(encoding="utf-8")
    select, sheet = re.findall(r"^traitbasis (?:select|annotate sheet) .*$", text, re.MULTILINE)[:2]

    def option(line: str, name: str) -> list[str]:
        return line.split(f"--{name} ")[1].split()[0].split(",")

    assert option(select, "layers") == option(sheet, "layers") and option(select, "trait") == option(sheet, "trait")
    assert option(select, "doses") == [f"{DEFAULT_DOSE:g}"] and "--dose" not in sheet


def test_an_error_of_missing_layers_or_doses_names_the_command_that_sweeps_them() -> None:
    own = load_pairs("impatience").model_copy(update={"trait": "seafaring"})
    renamed = [replace(c, trait="seafaring") if c.trait == "impatience" else c for c in swept()]
    for cells, trait, options, command in [
        (swept(), "impatience", {"layers": [8, 9]}, "traitbasis select --trait impatience --layers 8,9 --doses 0.2"),
        (swept(), "impatience", {"dose": [0.1, 0.4]}, "select --trait impatience --layers 4,8,12 --doses 0.1,0.4"),
        (swept(), "skeptical", {"sweep": {"model": "m"}}, "traitbasis select --trait skeptical --model m"),
        (renamed, own, {"layers": [9]}, "traitbasis select --pairs YOUR_PAIRS.yaml --layers 9 --doses 0.2"),
    ]:
        with pytest.raises(AnnotationError) as raised:
            make_sheet(cells, trait, **options)  # type: ignore[arg-type]
        assert str(raised.value).endswith(command)


def test_a_sheet_by_command_takes_your_own_sweep_doses_and_pairs(here: Path) -> None:
    pairs = here / "mine.yaml"
    pairs.write_bytes((resources.files("traitbasis.contrastive_pairs") / "impatience.yaml").read_bytes())
    file = written(here / "mine.jsonl", [c for c in swept() if c.condition in ("steered", "unsteered")])
    output = succeed("sheet", "--pairs", pairs, "--sweep", file, "--dose", "0.1,0.2", "--turns-per-layer", "2")
    assert "14 turns to rate" in output and Sheet.load("annotation").trait == "impatience"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--trait", "impatience", "--model", "nobody"], "traitbasis select --trait impatience"),
        (["--trait", "impatiance"], "no contrastive pairs"),
        (["--trait", "impatience", "--model", "tiny", "--layers", "9"], "no layer 9"),
        (["--trait", "impatience", "--sweep", "other/impatience.jsonl"], "of different sweeps: model_fingerprint"),
    ],
)
def test_a_sheet_that_cannot_be_drawn_is_an_error_with_a_way_out(here: Path, arguments: list[str], words: str) -> None:
    cells = swept()
    written(here / "other" / "impatience.jsonl", [c for c in cells if c.condition == "steered"], model_fingerprint="a")
    written(here / "other" / "baselines.jsonl", cells[:1], model_fingerprint="b")
    result = run("sheet", *arguments)
    assert isinstance(result.exception, TraitBasisError) and words in str(result.exception)
    assert not (here / "annotation").exists()


@pytest.mark.parametrize("arguments", [[], ["--trait", "x", "--pairs", "y"], ["--trait", "x", "--layers", "4-8"]])
def test_options_that_make_no_sense_are_a_usage_error(here: Path, arguments: list[str]) -> None:
    assert run("sheet", *arguments).exit_code == 2


# ---- The page, without a browser


def test_the_page_is_one_document_that_runs_its_own_script_alone(sheet: Sheet, tmp_path: Path) -> None:
    html = (tmp_path / "sheets" / "impatience.html").read_text("utf-8")
    document = Document(html)
    assert not re.search(r"https?://", html) and not re.search(r"@import|url\(", document.inline["style"][0])
    for tag, name, value in document.attributes:
        assert name not in ("src", "href", "style") and not name.startswith("on"), (tag, name, value)
    (policy,) = [
        value for tag, name, value in document.attributes if (tag, name) == ("meta", "content") and "src" in value
    ]
    allowed = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    for tag in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(document.inline[tag][-1].encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"
    assert allowed["default-src"] == "'none'"
    shown = json.loads(document.inline["script"][0])["items"]
    assert shown == [{"id": i.id, "task": i.task, "agent": i.agent, "text": i.text} for i in sheet.items]
    assert load_pairs("impatience").opposite in html


# ---- The page, in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium. CI must have it; elsewhere its absence skips these tests."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None and os.environ.get("CI"):
        pytest.fail(f"the tests of the page need one of {', '.join(names)}")
    if path is None:
        pytest.skip(f"none of {', '.join(names)} is installed; Debian's package chromium is what CI uses")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, sheet: Sheet, tmp_path: Path) -> Iterator[Page]:
    """The sheet's page, opened as a file. Afterwards: no complaint, and nothing was asked of anybody."""
    context = browser.new_context(viewport={"width": 1000, "height": 900}, accept_downloads=True)
    page = context.new_page()
    problems: list[str] = []
    urls: list[str] = []
    page.on("request", lambda request: urls.append(request.url))
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto((tmp_path / "sheets" / "impatience.html").as_uri())
    yield page
    assert problems == [] and not [url for url in urls if not url.startswith(("file:", "blob:"))]
    context.close()


def begin(page: Page, name: str = "Anna") -> None:
    page.get_by_label("Your name").fill(name)
    page.keyboard.press("Enter")
    expect(page.locator("#work")).to_be_visible()


def saved(page: Page, path: Path) -> Path:
    with page.expect_download() as download:
        page.get_by_role("button", name="Download CSV").click()
    assert download.value.suggested_filename.startswith("impatience-") and download.value.suggested_filename.endswith(
        ".csv"
    )
    download.value.save_as(path)
    return path


def place(page: Page, number: int) -> None:
    expect(page.locator("#place")).to_have_text(f"Turn {number} of 40")


def test_the_keyboard_is_enough_and_the_csv_is_read_back(page: Page, sheet: Sheet, tmp_path: Path) -> None:
    expect(page.get_by_label("Your name")).to_be_focused()
    begin(page, "=Anna [x]")
    for number, item in enumerate(sheet.items, 1):
        place(page, number)
        page.keyboard.press(str(BEST[item.layer]))
        if item.layer == 12:
            page.keyboard.press("x")
        page.keyboard.press(("Enter", "ArrowRight")[number % 2])
    expect(page.get_by_role("status")).to_contain_text("all have a vote")
    page.keyboard.press("Backspace")
    page.keyboard.press("ArrowLeft")
    place(page, 38)
    page.keyboard.press("c")
    page.keyboard.type("-2 of 3, x")
    page.keyboard.press("Escape")
    page.keyboard.press("ArrowRight")
    place(page, 39)
    file = saved(page, tmp_path / "download.csv")
    votes = read_votes(sheet, [file])
    assert votes.annotators == ("=Anna [x]",) and votes.comments == (("=Anna [x]", sheet.items[37].id, "-2 of 3, x"),)
    assert [row.rating.value for row in votes.by_layer()] == [0, 1, 3, 2]
    assert [row.usable.value for row in votes.by_layer()] == [1, 1, 1, 0]
    # The page's CSV is the sheet's, with votes: the same columns, contexts and turns, none of them a formula.
    rows, blank = read_table(file), read_table(tmp_path / "sheets" / "impatience.csv")
    assert list(rows[0]) == [*COLUMNS, "annotator"] and file.read_bytes().startswith(b"\xef\xbb\xbf")
    assert [[row[name] for name in COLUMNS[:3]] for row in rows] == [
        [row[name] for name in COLUMNS[:3]] for row in blank
    ]
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@"))]


def test_a_mouse_is_enough(page: Page, sheet: Sheet, tmp_path: Path) -> None:
    begin(page)
    page.get_by_label("2 clear").click()
    page.get_by_role("button", name="Next →").click()
    page.get_by_label("unusable").click()
    page.get_by_role("button", name="← Back").click()
    expect(page.get_by_label("2 clear")).to_be_checked()
    expect(page.get_by_label("unusable")).not_to_be_checked()
    page.get_by_role("button", name="Next without a vote").click()
    place(page, 3)
    page.get_by_role("button", name="Next →").press("3")  # keys work wherever the focus is
    expect(page.get_by_label("3 strong")).to_be_checked()
    page.get_by_role("button", name="Next →").press("Enter")
    place(page, 4)  # once, not twice
    votes = read_votes(sheet, [saved(page, tmp_path / "a.csv")])
    assert votes.ratings[0, :2].tolist() == [2.0, pytest.approx(_, nan_ok=True)] and votes.ratings[0, 2] == 3
    assert votes.usable[0, :3].tolist() == [1, 0, 1] and votes.given() == {"Anna": 3}
    expect(page.get_by_role("status")).to_contain_text("37 turns have no vote yet")


def test_votes_are_kept_for_each_name(page: Page) -> None:
    begin(page)
    page.keyboard.press("3")
    page.keyboard.press("Enter")
    page.keyboard.press("x")
    page.reload()
    expect(page.get_by_label("Your name")).to_have_value("Anna")
    begin(page)
    place(page, 2)
    expect(page.locator("#done")).to_have_text("2 voted on")
    expect(page.get_by_label("unusable")).to_be_checked()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_label("3 strong")).to_be_checked()
    page.reload()
    begin(page, "Ben")  # another annotator at the same desk sees nobody's votes
    place(page, 1)
    expect(page.locator("#done")).to_have_text("0 voted on")
    expect(page.get_by_label("3 strong")).not_to_be_checked()


def test_a_browser_that_keeps_nothing_says_so_and_works(browser: Browser, sheet: Sheet, tmp_path: Path) -> None:
    context = browser.new_context()
    context.add_init_script("Object.defineProperty(window, 'localStorage', { get() { throw new Error('no'); } })")
    page = context.new_page()
    page.goto((tmp_path / "sheets" / "impatience.html").as_uri())
    begin(page)
    expect(page.locator("#not-kept")).to_be_visible()
    page.keyboard.press("1")
    assert read_votes(sheet, [saved(page, tmp_path / "a.csv")]).given() == {"Anna": 1}
    context.close()


def test_a_models_text_is_shown_as_it_is_and_never_run(page: Page, sheet: Sheet, tmp_path: Path) -> None:
    begin(page)
    for number, item in enumerate(sheet.items, 1):
        place(page, number)
        assert page.locator("#turn").text_content() == item.text
        assert page.locator("#agent").text_content() == item.agent
        page.keyboard.press("Enter")
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
    page.keyboard.press("0")
    assert {unprotect(row["turn"]) for row in read_table(saved(page, tmp_path / "a.csv"))} >= {HOSTILE, *FORMULAS}


def test_every_control_has_a_name_and_turns_are_announced(page: Page) -> None:
    begin(page)
    expect(page.locator("#item")).to_be_focused()
    expect(page.locator("#item")).to_have_attribute("aria-live", "polite")
    for control in page.locator("input, textarea, button, progress").all():
        name = control.evaluate("n => n.labels?.[0]?.textContent || n.ariaLabel || n.textContent")
        assert name.strip(), control.evaluate("n => n.outerHTML")
    expect(page.get_by_role("group", name="How strongly does the customer show impatience?")).to_be_visible()
    page.get_by_label("use single keys").click()  # they can be turned off, for those who speak to their computer
    page.keyboard.press("2")
    expect(page.get_by_label("2 clear")).not_to_be_checked()
    assert page.locator("#turn").evaluate("n => parseFloat(getComputedStyle(n).fontSize)") >= 22


@pytest.mark.parametrize("width", [360, 1000])
def test_nothing_is_wider_than_the_window(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    begin(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
