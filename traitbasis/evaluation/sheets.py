"""People as raters of whole dialogues: a blinded sheet of items, and what comes back as judgments.

As with single turns (``annotate.py``): a page and a spreadsheet for annotators, and a key that is kept from them.
Annotators are asked what judges are asked (``judges.py``). Nothing that they get depends on methods, levels, tasks or
doses: what is drawn, its order, its sides and its names are decided by what was said alone, so the same dialogues
under other labels make the same files, byte for byte. Dialogues in which the same is said are one item, and its answer
is an answer for each of them.

Items are drawn so that methods, conditions and tasks come about equally often. Some come twice, with their sides
exchanged where there are two: how often an annotator says the same again bounds what their votes can show.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, get_args

import jinja2

from traitbasis.annotate import draw_names, one_line, page_policy, protect, unprotect
from traitbasis.dialogues import Dialogue
from traitbasis.errors import AnnotationError
from traitbasis.evaluation.judges import COURSES
from traitbasis.evaluation.judgments import (
    AnyJudgment,
    Choice,
    Judgment,
    Kind,
    Preference,
    Side,
    Verdict,
    checked,
    courses_of,
    judged,
    player_of,
    shown,
    side_of,
)
from traitbasis.evaluation.realism import pairs_of, say_the_same
from traitbasis.files import write_whole
from traitbasis.votes import folded, read_rows

FORMAT = "traitbasis.sheet/1"
REPEATS = 0.1  # of the items come a second time
_CELL = 32_000  # characters; Excel's cells hold 32,767, and an apostrophe and a note may be among them
_PUT_AWAY = re.compile(r"[\x00-\x1f\x7f-\x9f]")

Talk = tuple[tuple[str, str], ...]  # speaker, text
_CHOICES: Mapping[str, Choice] = {"A": "first", "B": "second", "tie": "tie"}


@dataclass(frozen=True)
class Question:
    """A column to fill in. options: what may stand there, with what it means."""

    name: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class Item:
    """What an annotator judges at once. Annotators see id, talks and trait; the rest stands in the key alone.

    talks: one dialogue, or two for realism. trait: what is asked about, for consistency. of: the dialogues that say
    this, one for each talk. repeats: id of the item that this one is again.
    """

    id: str
    talks: tuple[Talk, ...]
    trait: str
    of: tuple[tuple[Side, ...], ...]
    repeats: str = ""


@dataclass(frozen=True)
class Sheet:
    """Blinded items of one kind, in the order that annotators see.

    traits: definition and opposite of each trait that is asked about. dialogues: headers of their files.
    """

    kind: Kind
    traits: Mapping[str, tuple[str, str]]
    seed: int
    items: tuple[Item, ...]
    dialogues: Sequence[Mapping[str, Any]] = field(default_factory=tuple)

    @property
    def id(self) -> str:
        """Tells sheets apart (8 hex digits)."""
        return hashlib.sha256(" ".join([self.kind, *(item.id for item in self.items)]).encode()).hexdigest()[:8]

    @property
    def questions(self) -> tuple[Question, ...]:
        """What is asked of each item."""
        if self.kind == "realism":
            meanings = ("customer A", "customer B", "no difference")
            return (Question("choice", dict(zip(_CHOICES, meanings, strict=True))),)
        if self.kind == "consistency":
            return (Question("verdict", {str(course): meaning for course, meaning in COURSES.items()}),)
        levels = {"none": "not shown", "low": "a little", "medium": "clearly", "high": "strongly"}
        return tuple(Question(trait, levels) for trait in self.traits)

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the spreadsheet."""
        talks = ("A", "B") if self.kind == "realism" else ("dialogue",)
        trait = ("trait",) if self.kind == "consistency" else ()
        return ("item", *talks, *trait, *(question.name for question in self.questions), "comment")

    def save(self, folder: str | Path) -> tuple[Path, Path, Path]:
        """Write ``<kind>.csv`` and ``<kind>.html`` for annotators, and ``<kind>.key.json``; the paths in this order.

        Raises AnnotationError when the folder holds another sheet's key: without it, votes on that sheet are lost.
        """
        table, page, key = (Path(folder) / f"{self.kind}{end}" for end in (".csv", ".html", ".key.json"))
        content = json.dumps({"format": FORMAT, "sheet": self.id, **asdict(self)}, indent=1) + "\n"
        if key.exists() and key.read_text("utf-8") != content:
            raise AnnotationError(
                f"{key} is the key of another sheet, and without it votes on that sheet cannot be read; "
                "write to another folder, or delete it"
            )
        write_whole(key, content)
        write_whole(table, self._table())
        write_whole(page, self._page())
        return table, page, key

    @classmethod
    def load(cls, path: str | Path) -> Sheet:
        """Read a sheet back from its key. Raises AnnotationError for what is none."""
        path = Path(path)
        try:
            key = json.loads(path.read_text("utf-8"))
            if not isinstance(key, dict) or key.get("format") != FORMAT or key["kind"] not in get_args(Kind):
                raise AnnotationError(f"{path} is not a {FORMAT} file; expected the sheet's .key.json")
            traits = checked(dict[str, tuple[str, str]], key["traits"])
            items = checked(tuple[Item, ...], key["items"])
            talks = 2 if key["kind"] == "realism" else 1
            if any(len(of) != talks for item in items for of in (item.talks, *item.of)):
                raise ValueError(f"an item has not {talks} dialogues")
            return cls(key["kind"], traits, int(key["seed"]), items, tuple(key["dialogues"]))
        except OSError as error:
            raise AnnotationError(f"cannot read {path}: {error.strerror or error}") from error
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise AnnotationError(f"{path} is a damaged key: {error}") from error

    def cells(self, item: Item) -> list[str]:
        """What stands in an item's row before the answers."""
        return [item.id, *map(as_text, item.talks), *([item.trait] if self.kind == "consistency" else [])]

    def _table(self) -> str:
        buffer = io.StringIO(newline="")
        writer = csv.writer(buffer)
        writer.writerow(self.columns)
        for item in self.items:
            cells = [protect(cell) for cell in self.cells(item)]
            writer.writerow(cells + [""] * (len(self.columns) - len(cells)))
        return "\ufeff" + buffer.getvalue()  # Excel takes UTF-8 for something else without the mark

    def _page(self) -> str:
        template = (resources.files("traitbasis.evaluation") / "sheet.html").read_text("utf-8")
        environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        data = {
            "id": self.id,
            "kind": self.kind,
            "columns": self.columns,
            "questions": [{"name": q.name, "options": list(q.options.items())} for q in self.questions],
            "items": [
                {"id": item.id, "talks": item.talks, "trait": item.trait, "cells": list(map(protect, self.cells(item)))}
                for item in self.items
            ],
        }
        return environment.from_string(template).render(
            policy=page_policy(template), kind=self.kind, traits=self.traits, sheet=data
        )


def make_sheet(
    kind: Kind,
    dialogues: Iterable[Dialogue],
    traits: Mapping[str, tuple[str, str]],
    *,
    items: int,
    seed: int = 0,
    headers: Sequence[Mapping[str, Any]] = (),
) -> Sheet:
    """Draw up to `items` different items, and a tenth as many again (two at least) a second time.

    traits: definition and opposite, of all that annotators are to choose from; for consistency of those intended.
    Raises AnnotationError for less than one item, EvaluationError when there is nothing to ask about.
    """
    if items < 1:
        raise AnnotationError(f"a sheet of {items} items is none; give at least one")
    if taken := {*traits} & {"item", "dialogue", "trait", "comment", "annotator"}:
        raise AnnotationError(f"a trait named {min(taken)!r} would be a column twice; give its pairs another name")
    candidates = _candidates(kind, list(dialogues))
    content = json.dumps([[talks, trait] for talks, trait in sorted(candidates)])
    rng = random.Random(f"{seed} {kind} {hashlib.sha256(content.encode()).hexdigest()}")
    drawn = _draw(candidates, items, rng)
    names = draw_names(2 * len(drawn), rng)
    found = []
    for name, (talks, trait) in zip(names, drawn, strict=False):
        item = Item(name, talks, trait, tuple(candidates[talks, trait]))
        found.append(_exchanged(item) if kind == "realism" and rng.random() < 0.5 else item)
    again = rng.sample(found[: (len(found) + 1) // 2], min(max(2, round(REPEATS * len(found))), len(found) // 2))
    for name, item in zip(names[len(drawn) :], again, strict=False):  # in the second half: not while it is remembered
        repeated = replace(_exchanged(item) if kind == "realism" else item, id=name, repeats=item.id)
        found.insert(rng.randint((len(found) + 1) // 2 + 1, len(found)), repeated)
    asked = {} if kind == "realism" else {trait: traits[trait] for trait in sorted(traits)}
    if kind == "consistency":
        asked = {trait: asked[trait] for trait in sorted({item.trait for item in found})}
    return Sheet(kind, asked, seed, tuple(found), tuple(headers))


def as_text(talk: Talk) -> str:
    """A dialogue as a spreadsheet shows it, a message a line. Without what spreadsheets drop when they save a file, so
    that the cell comes back as it was: control characters, and whatever a cell has no room for."""
    said = "\n".join(f"{speaker.capitalize()}: {one_line(_PUT_AWAY.sub(' ', text))}" for speaker, text in talk)
    return said if len(said) <= _CELL else f"{said[:_CELL]} … (the rest is on the page)"


# ---- Drawing

_Content = tuple[tuple[Talk, ...], str]  # talks, trait


def _candidates(kind: Kind, dialogues: Sequence[Dialogue]) -> dict[_Content, list[tuple[Side, ...]]]:
    """What can be asked about, by what annotators see of it, with the dialogues that it is of."""
    found: dict[_Content, list[tuple[Side, ...]]] = defaultdict(list)
    if kind == "realism":
        for pair in pairs_of(dialogues):
            if not say_the_same(pair):
                a, b = sorted(pair, key=shown)
                found[(shown(a), shown(b)), ""].append((side_of(a), side_of(b)))
        if not found:
            raise AnnotationError("all pairs of dialogues say the same; there is nothing to choose between")
        return found
    asked = judged(kind, dialogues)
    for dialogue, trait in courses_of(asked) if kind == "consistency" else [(each, "") for each in asked]:
        found[(shown(dialogue),), trait].append((side_of(dialogue),))
    return found


def _draw(candidates: Mapping[_Content, Sequence[tuple[Side, ...]]], count: int, rng: random.Random) -> list[_Content]:
    """`count` candidates, each time one whose methods, condition and task came least often. Labels are only counted,
    so that other names draw the same."""
    left = sorted(candidates)
    rng.shuffle(left)
    labels = {content: Counter(label for sides in candidates[content] for label in _labels(sides)) for content in left}
    kinds = Counter(kind for kind, _ in {label for of in labels.values() for label in of})
    came: Counter[tuple[str, Any]] = Counter()
    drawn: list[_Content] = []
    while left and len(drawn) < count:
        best = min(left, key=lambda c: sum(n * came[label] * kinds[label[0]] for label, n in labels[c].items()))
        left.remove(best)
        drawn.append(best)
        came.update(labels[best])
    return drawn


def _labels(sides: tuple[Side, ...]) -> list[tuple[str, Any]]:
    players = sorted(player_of(side) for side in sides)
    spec, task, _, _ = sides[0][1]
    methods = [("method", player) for player in players]
    return [*methods, ("methods", tuple(players)), ("condition", spec), ("task", task)]


def _exchanged(item: Item) -> Item:
    return replace(item, talks=item.talks[::-1], of=tuple(sides[::-1] for sides in item.of))


# ---- What comes back


@dataclass(frozen=True)
class Votes:
    """Annotators' answers. answers: by annotator and item's id, the option of each question that was answered.
    comments: (annotator, item, comment)."""

    sheet: Sheet
    answers: Mapping[str, Mapping[str, Mapping[str, str]]]
    comments: tuple[tuple[str, str, str], ...] = ()

    def judgments(self) -> list[AnyJudgment]:
        """One record for each annotator and dialogue (or pair). Of an item that came twice the first answer counts,
        but for realism, where it was shown in the other order: both do (``judgments.votes_of``)."""
        items = {item.id: item for item in self.sheet.items}
        found: list[AnyJudgment] = []
        for rater, given in self.answers.items():
            for name, answer in given.items():
                item = items[name]
                if self.sheet.kind == "realism" or item.repeats not in given:
                    found += [self._judgment(rater, item, sides, answer) for sides in item.of]
        return found

    def repeated(self) -> dict[str, tuple[int, int]]:
        """By annotator, how many repeated items got the same answer again, and how many were answered twice."""
        swap = {"A": "B", "B": "A", "tie": "tie"}
        found = {}
        for rater, given in self.answers.items():
            pairs = [(given[i.repeats], given[i.id]) for i in self.sheet.items if i.repeats in given and i.id in given]
            if self.sheet.kind == "realism":
                pairs = [(first, {name: swap[option] for name, option in again.items()}) for first, again in pairs]
            found[rater] = sum(first == again for first, again in pairs), len(pairs)
        return found

    def _judgment(self, rater: str, item: Item, sides: tuple[Side, ...], answer: Mapping[str, str]) -> AnyJudgment:
        if self.sheet.kind == "realism":
            return Preference(sides[0], sides[1], rater, _CHOICES[answer["choice"]])
        method, key = sides[0]
        if self.sheet.kind == "consistency":
            (verdict,) = [course for course in COURSES if course == answer["verdict"]]
            return Verdict(method, key, rater, item.trait, verdict)
        return Judgment(method, key, rater, {trait: level for trait, level in answer.items() if level != "none"})


def read_votes(sheet: Sheet, files: Iterable[str | Path]) -> Votes:
    """Answers from the CSVs of several annotators, who are named by the column ``annotator``, else by their file.

    A row without an answer is no vote; of a sheet of traits, a trait that is left open in a row with another answer is
    not shown. Raises AnnotationError, which names file, line and item, for an unknown item or option, an item that one
    annotator answered twice, rows whose text is not the item's, and files without a vote.
    """
    items = {item.id: item for item in sheet.items}
    answers: dict[str, dict[str, dict[str, str]]] = defaultdict(dict)
    comments, problems = [], list[str]()
    for file in map(Path, files):
        votes = 0
        names = [question.name.casefold() for question in sheet.questions]
        for line, row in read_rows(file, sheet.columns, ["item", *names]):
            where = f"{file}, line {line}"
            item = items.get(row["item"])
            if item is None:
                problems.append(f"{where}: unknown item {row['item']!r}; it is not on this sheet of {sheet.kind}")
                continue
            if not _is_row_of(sheet, item, row):
                problems.append(f"{where}: the text is not that of item {item.id}; were columns sorted one by one?")
                continue
            rater = one_line(unprotect(row.get("annotator", ""))) or file.stem
            if comment := unprotect(row.get("comment", "")).strip():
                comments.append((rater, item.id, comment))
            try:
                answer = _read_answer(sheet, row)
            except ValueError as error:
                problems.append(f"{where}: item {item.id}: {error}")
                continue
            if answer is None:
                continue
            votes += 1
            if item.id in answers[rater]:
                problems.append(
                    f"{where}: {rater} answered item {item.id} before; two annotators need two names, in the column "
                    "'annotator' or as file names"
                )
            answers[rater][item.id] = answer
        if not votes and not problems:
            problems.append(f"{file} has no vote in it; is it the empty sheet?")
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise AnnotationError("\n".join(problems[:10] + more))
    if not answers:
        raise AnnotationError("no file of votes was given; expected the CSVs that annotators sent back")
    return Votes(sheet, {rater: dict(answers[rater]) for rater in sorted(answers)}, tuple(comments))


def _is_row_of(sheet: Sheet, item: Item, row: Mapping[str, str]) -> bool:
    """Whether what stands in a row is the item's; columns that were deleted prove nothing."""
    expected = zip(sheet.columns, sheet.cells(item), strict=False)
    return all(
        not row.get(name.casefold()) or folded(unprotect(row[name.casefold()])) == folded(cell)
        for name, cell in list(expected)[1:]
    )


def _read_answer(sheet: Sheet, row: Mapping[str, str]) -> dict[str, str] | None:
    """The option of each question, None for a row without an answer. Raises ValueError for what is no option."""
    found: dict[str, str] = {}
    for question in sheet.questions:
        if said := row.get(question.name.casefold(), "").strip():
            options = {option.casefold(): option for option in question.options}
            if said.casefold() not in options:
                raise ValueError(f"{question.name} is {said!r}, not {', '.join(question.options)}")
            found[question.name] = options[said.casefold()]
    if not found:
        return None
    return {question.name: found.get(question.name, "none") for question in sheet.questions}
