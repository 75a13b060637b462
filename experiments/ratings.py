"""Are the instruments right? A reader rates turns without knowing what they are, and each instrument is compared.

The sheet is drawn from what ``selection.py`` measured, in equal parts from every trait and condition. It has columns
for a rating from 0 (no sign of the trait) to 3 (strong). Items have random names and a shuffled order; the key, kept
from the reader, says what they are and what the instruments said.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import table, write_json

from traitbasis.annotate import one_line, protect
from traitbasis.contexts import contexts_hash, read_contexts
from traitbasis.errors import AnnotationError
from traitbasis.files import write_whole
from traitbasis.metrics.instruments import concordance, rank_correlation
from traitbasis.pairs import load_pairs

FORMAT = "traitbasis.blind_ratings/1"
COLUMNS = ("item", "trait", "definition", "agent", "text", "rating")
CLEAR, NONE = 2, 0  # an instrument's AUC is of ratings of at least CLEAR against ratings of NONE


@dataclass(frozen=True)
class Rated:
    """One rated turn: its rating, and scores by the instrument's name."""

    trait: str
    condition: str
    rating: int
    scores: Mapping[str, float | None]


def write_sheet(results: Path, contexts: Path, sheet: Path, key: Path, items: int = 160, seed: int = 0) -> None:
    """Draw `items` turns of what ``selection.py`` wrote to `results`, fewer where there are no more, and write the
    sheet (CSV) and its key (JSON). Raises AnnotationError for results that are not there or of other contexts."""
    try:
        found = json.loads(results.read_text(encoding="utf-8"))
        turns, made_by = found["turns"], found["made_by"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise AnnotationError(f"cannot read {results} ({error}); measure first, without --sheet") from error
    known = read_contexts(contexts)
    if made_by["contexts_hash"] != contexts_hash(known):
        raise AnnotationError(f"{results} was measured on other contexts than {contexts}; give those with --contexts")
    agent = {context.id: context.turns[-1].text for context in known}
    traits = {trait: load_pairs(trait) for trait in found["traits"]}
    drawn = draw(turns, items, seed)
    rng = random.Random(f"names {seed}")
    names = rng.sample(range(10_000, 100_000), len(drawn))
    rows = [
        [
            f"t{name}",
            turn["trait"],
            traits[turn["trait"]].definition,
            one_line(agent[turn["context"]]),
            turn["text"],
            "",
        ]
        for name, turn in zip(names, drawn, strict=True)
    ]
    for path in (sheet, key):
        path.parent.mkdir(parents=True, exist_ok=True)
    hidden = {row[0]: turn for row, turn in zip(rows, drawn, strict=True)}
    write_json(key, {"format": FORMAT, "made_by": made_by, "seed": seed, "items": hidden})
    lines = [COLUMNS, *([protect(cell) for cell in row] for row in rows)]
    write_whole(sheet, "\ufeff" + _to_csv(lines))  # Excel takes UTF-8 for something else without the mark


def draw(turns: list[dict[str, Any]], items: int, seed: int = 0) -> list[dict[str, Any]]:
    """`items` of the turns, as many of each trait and condition as can be, shuffled."""
    rng = random.Random(f"draw {seed}")
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for turn in turns:
        groups.setdefault((turn["trait"], turn["condition"]), []).append(turn)
    for group in groups.values():
        rng.shuffle(group)
    order = list(groups)
    rng.shuffle(order)
    drawn: list[dict[str, Any]] = []
    while len(drawn) < items and any(groups.values()):
        for name in order:
            if groups[name] and len(drawn) < items:
                drawn.append(groups[name].pop())
    rng.shuffle(drawn)
    return drawn


def read_ratings(sheet: Path, key: Path) -> list[Rated]:
    """The rated turns of a sheet; a turn without a rating is left out. Raises AnnotationError, naming file and line."""
    try:
        hidden = json.loads(key.read_text(encoding="utf-8"))
        if hidden["format"] != FORMAT:
            raise AnnotationError(f"{key} is no key of such a sheet (its format is {hidden['format']!r})")
        text = sheet.read_text(encoding="utf-8-sig")
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise AnnotationError(f"cannot read {sheet} with {key}: {error}") from error
    reader, found = csv.DictReader(io.StringIO(text, newline="")), {}
    if missing := {"item", "rating"} - {*(reader.fieldnames or ())}:
        raise AnnotationError(f"{sheet} has no column {', '.join(sorted(missing))}")
    for row in reader:
        item, rating, where = (
            (row["item"] or "").strip(),
            (row["rating"] or "").strip(),
            f"{sheet}, line {reader.line_num}",
        )
        if item not in hidden["items"]:
            raise AnnotationError(f"{where}: item {item!r} is not in {key}")
        if item in found:
            raise AnnotationError(f"{where}: item {item!r} is there twice")
        if rating and rating not in ("0", "1", "2", "3"):
            raise AnnotationError(f"{where}: the rating of {item!r} is {rating!r}; it must be 0, 1, 2 or 3, or empty")
        if rating:
            turn = hidden["items"][item]
            scores = {
                name.removesuffix(f":{turn['trait']}"): value
                for name, value in turn["scores"].items()
                if name.endswith(f":{turn['trait']}")
            }
            found[item] = Rated(turn["trait"], turn["condition"], int(rating), scores)
    if not found:
        raise AnnotationError(f"{sheet} has no ratings; fill in the column 'rating' with 0 to 3")
    return list(found.values())


def validity(rated: list[Rated], instrument: str) -> tuple[float, float]:
    """AUC of an instrument (ratings of at least 2 against 0) and its Spearman's rho with the ratings; nan where
    undefined: no turn was rated so, or all alike."""
    rho = rank_correlation([turn.scores.get(instrument) for turn in rated], [turn.rating for turn in rated])
    apart = [turn for turn in rated if turn.rating >= CLEAR or turn.rating == NONE]
    clear = [float(turn.rating >= CLEAR) for turn in apart]
    return concordance(clear, [turn.scores.get(instrument) for turn in apart]), rho


def show_ratings(rated: list[Rated]) -> None:
    """Print, as Markdown, each instrument against the ratings by trait, and the mean rating of each condition."""
    instruments = list(dict.fromkeys(name for turn in rated for name in turn.scores))
    traits = list(dict.fromkeys(sorted(turn.trait for turn in rated)))
    rows = []
    for trait in [*traits, "all"]:
        own = [turn for turn in rated if trait in (turn.trait, "all")]
        counts = [sum(turn.rating == rating for turn in own) for rating in range(4)]
        figures = [_figure(value) for name in instruments for value in validity(own, name)]
        rows.append([trait, str(len(own)), "/".join(map(str, counts)), *figures])
    titles = [f"{name}: {what}" for name in instruments for what in ("AUC", "Spearman")]
    print(table(["trait", "rated", "rated 0/1/2/3", *titles], rows))
    conditions = list(dict.fromkeys(sorted(turn.condition for turn in rated)))
    print()
    rows = []
    for trait in traits:
        by_condition = [[t.rating for t in rated if (t.trait, t.condition) == (trait, name)] for name in conditions]
        rows.append(
            [trait, *(f"{sum(given) / len(given):.2f} ({len(given)})" if given else "" for given in by_condition)]
        )
    print(table(["mean rating (turns)", *conditions], rows))


def _figure(value: float) -> str:
    return "undefined" if math.isnan(value) else f"{value:.2f}"


def _to_csv(rows: list[Any]) -> str:
    import io

    buffer = io.StringIO(newline="")
    csv.writer(buffer).writerows(rows)
    return buffer.getvalue()
