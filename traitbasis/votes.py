"""What annotators' votes say about layers: means with intervals, agreement, and the layer they choose.

``read_votes`` reads the CSVs that come back from the annotators of a sheet (``annotate.py``). Its errors name file and
line, since the files were edited by people and saved by spreadsheets.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np

from traitbasis.annotate import COLUMNS, Sheet, one_line, unprotect
from traitbasis.errors import AnnotationError
from traitbasis.files import write_whole
from traitbasis.metrics.agreement import Floats, bootstrap, krippendorff_alpha
from traitbasis.metrics.estimate import Estimate
from traitbasis.model import model_slug

USABLE_MARGIN = 0.1  # the choice may have this much fewer usable turns than the unsteered control

_RESULT = "traitbasis.votes/1"
_YES, _NO = {"yes", "y", "true", "1"}, {"no", "n", "false", "0"}


@dataclass(frozen=True)
class LayerVotes:
    """What annotators said of one layer at one dose, or of the unsteered control (layer None).

    rating: mean strength of the trait, 0 to 3. usable: share of usable turns. Both are means over turns of the mean
    over annotators, so that each turn counts alike. turns: with a vote. votes: ratings and marks of usability count as
    one where they are of one annotator and turn.
    """

    condition: Literal["steered", "unsteered"]
    layer: int | None
    dose: float
    rating: Estimate
    usable: Estimate
    turns: int
    votes: int


@dataclass(frozen=True, eq=False)
class Votes:
    """Votes on a sheet. ratings, usable: ``(annotators, items)`` float64, nan where missing; usable is 0 or 1.

    comments: (annotator, item, comment).
    """

    sheet: Sheet
    annotators: tuple[str, ...]
    ratings: Floats
    usable: Floats
    comments: tuple[tuple[str, str, str], ...] = ()

    def by_layer(self) -> list[LayerVotes]:
        """The unsteered control first, then by dose and layer."""
        return list(self._by_layer)

    @cached_property
    def alpha(self) -> dict[str, Estimate]:
        """Krippendorff's alpha of ``rating`` (ordinal) and of ``usable`` (nominal); nan where undefined."""
        ordinal = partial(krippendorff_alpha, level="ordinal")
        nominal = partial(krippendorff_alpha, level="nominal")
        return {
            "rating": Estimate(ordinal(self.ratings), *bootstrap(ordinal, self.ratings)),
            "usable": Estimate(nominal(self.usable), *bootstrap(nominal, self.usable)),
        }

    def choice(self) -> LayerVotes | None:
        """The layer and dose with the best mean rating, among those whose share of usable turns is at most
        ``USABLE_MARGIN`` below the control's. Of equals, the more usable, then the smaller dose, then the lower layer.

        None when no layer is usable enough, or when the control has no votes to compare with.
        """
        control, *steered = self._by_layer
        enough = [v for v in steered if v.usable.value >= control.usable.value - USABLE_MARGIN - 1e-9]
        return max(
            (v for v in enough if not math.isnan(v.rating.value)),
            key=lambda v: (v.rating.value, v.usable.value, -v.dose, -(v.layer or 0)),
            default=None,
        )

    def agrees(self, layer: int, dose: float) -> bool | None:
        """Whether the votes choose this layer, and this dose where the sheet has it there.

        None when they choose nothing, or when the sheet does not have the layer: people could not choose it.
        """
        choice = self.choice()
        if choice is None or all(row.layer != layer for row in self._by_layer):
            return None
        return choice.layer == layer and (self.of(layer, dose) is None or math.isclose(choice.dose, dose))

    def given(self) -> dict[str, int]:
        """How many turns each annotator voted on."""
        counts = (~(np.isnan(self.ratings) & np.isnan(self.usable))).sum(axis=1)
        return dict(zip(self.annotators, counts.tolist(), strict=True))

    def result(self, automatic: tuple[int, float] | None = None) -> dict[str, Any]:
        """All figures, ready for JSON; undefined ones are None. automatic: the layer and dose to compare with."""
        choice = self.choice()
        figures = {
            "format": _RESULT,
            "trait": self.sheet.trait,
            "sheet": self.sheet.id,
            "seed": self.sheet.seed,
            "sweep": dict(self.sheet.sweep),
            "annotators": self.given(),
            "layers": [asdict(row) for row in self._by_layer],
            "alpha": {of: asdict(alpha) for of, alpha in self.alpha.items()},
            "choice": {"layer": choice.layer, "dose": choice.dose} if choice else None,
            "automatic": {"layer": automatic[0], "dose": automatic[1]} if automatic else None,
            "agrees": self.agrees(*automatic) if automatic else None,
            "comments": [dict(zip(("annotator", "item", "comment"), said, strict=True)) for said in self.comments],
        }
        found: dict[str, Any] = _without_nan(figures)
        return found

    def save(self, path: str | Path, automatic: tuple[int, float] | None = None) -> Path:
        """Write ``result`` as JSON."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.result(automatic), indent=1, allow_nan=False) + "\n")
        return path

    def of(self, layer: int, dose: float) -> LayerVotes | None:
        """Votes of one layer and dose, None when the sheet does not have them."""
        return next((v for v in self._by_layer if v.layer == layer and math.isclose(v.dose, dose)), None)

    @cached_property
    def _by_layer(self) -> tuple[LayerVotes, ...]:
        groups: dict[tuple[bool, float, int], list[int]] = defaultdict(list)
        for column, item in enumerate(self.sheet.items):
            groups[item.condition == "steered", item.dose, -1 if item.layer is None else item.layer].append(column)
        found = []
        for _, columns in sorted(groups.items()):
            item = self.sheet.items[columns[0]]
            ratings, usable = self.ratings[:, columns], self.usable[:, columns]
            voted = ~(np.isnan(ratings) & np.isnan(usable))
            found.append(
                LayerVotes(
                    item.condition,
                    item.layer,
                    item.dose,
                    _mean(ratings),
                    _mean(usable),
                    int(voted.any(axis=0).sum()),
                    int(voted.sum()),
                )
            )
        return tuple(found)


def read_votes(sheet: Sheet | str | Path, files: Iterable[str | Path]) -> Votes:
    """Votes from the CSVs of several annotators. sheet: or its key, or the folder with the key.

    An annotator is named by the column ``annotator``, else by the file's name. ``usable`` is yes or no; a rated turn
    without it is usable. Missing votes are allowed. Commas, semicolons and tabs are read, with or without UTF-8's mark.

    Raises AnnotationError, which names file and line, for an unknown item, a rating that is not 0 to 3, an item that
    one annotator voted on twice, votes of another sheet, rows whose turn is not the item's, and files without a vote.
    """
    sheet = sheet if isinstance(sheet, Sheet) else Sheet.load(sheet)
    column = {item.id: index for index, item in enumerate(sheet.items)}
    owners: dict[str, set[str]] = defaultdict(set)
    for item in sheet.items:
        owners[folded(item.text)].add(item.id)
    cast: dict[tuple[str, str], _Vote] = {}
    comments: list[tuple[str, str, str]] = []
    problems: list[str] = []
    for file in map(Path, files):
        rows = list(read_rows(file))
        if rows and not any(row["item"] in column for _, row in rows):
            problems.append(f"{file} has votes on another sheet: none of its items is in sheet {sheet.id}")
            continue
        before = len(cast), len(problems)
        for line, row in rows:
            where = f"{file}, line {line}"
            if row["item"] not in column:
                problems.append(f"{where}: unknown item {row['item']!r}; the sheet of {sheet.trait} has no such item")
                continue
            turn = folded(unprotect(row.get("turn", "")))
            if turn in owners and row["item"] not in owners[turn]:
                problems.append(
                    f"{where}: the turn is not that of item {row['item']}, but that of {min(owners[turn])}; "
                    "were columns sorted one by one?"
                )
                continue
            try:
                vote = _read_vote(row, where)
            except ValueError as error:
                problems.append(f"{where}: item {row['item']}: {error}")
                continue
            annotator = one_line(unprotect(row.get("annotator", ""))) or file.stem
            if comment := unprotect(row.get("comment", "")).strip():
                comments.append((annotator, row["item"], comment))
            if vote is None:
                continue
            first = cast.setdefault((annotator, row["item"]), vote)
            if first is not vote:
                problems.append(
                    f"{where}: {annotator} voted on item {row['item']} before, in {first.where}; "
                    "two annotators need two names, in the column 'annotator' or as file names"
                )
        if before == (len(cast), len(problems)):
            problems.append(f"{file} has no vote in it; is it the empty sheet?")
    if problems:
        more = [f"and {len(problems) - 10} more"] if len(problems) > 10 else []
        raise AnnotationError("\n".join(problems[:10] + more))
    if not cast:
        raise AnnotationError("no file of votes was given; expected the CSVs that annotators sent back")

    annotators = tuple(sorted({annotator for annotator, _ in cast}))
    ratings, usable = np.full((2, len(annotators), len(sheet.items)), np.nan)
    for (annotator, name), vote in cast.items():
        at = annotators.index(annotator), column[name]
        ratings[at], usable[at] = vote.rating, vote.usable
    return Votes(sheet, annotators, ratings, usable, tuple(comments))


def automatic_choice(sheet: Sheet, path: str | Path | None = None) -> tuple[int, float] | None:
    """Layer and dose that ``traitbasis select`` chose for the sheet's trait; None when it chose nothing.

    path: a ``selection.json``; by default ``vectors/<model>/selection.json`` here, else the one that ships, and None
    when there is neither. Raises AnnotationError for a file that is no selection or another model's, and for a given
    one without the trait.
    """
    name = f"{model_slug(str(sheet.sweep.get('model', '')))}/selection.json"
    shipped = Path(str(resources.files("traitbasis.vectors"))) / name
    files = [Path(path)] if path is not None else [file for file in (Path("vectors") / name, shipped) if file.is_file()]
    if not files:
        return None
    try:
        selection = json.loads(files[0].read_text("utf-8"))
        chosen = selection["traits"].get(sheet.trait)
        # A trait's own is the later one: a file is added to, trait by trait.
        made_by = {**selection.get("made_by", {}), **((chosen or {}).get("made_by") or {})}
        of, ours = made_by.get("model_fingerprint"), sheet.sweep.get("model_fingerprint")
        if of and ours and of != ours:
            raise AnnotationError(
                f"{files[0]} is the selection of a model with fingerprint {of}, and the sheet's has {ours}; "
                "give that of the sheet's model with --selection"
            )
        if chosen is None and path is not None:
            known = ", ".join(selection["traits"]) or "no trait"
            raise AnnotationError(f"{path} chooses nothing for {sheet.trait!r}; it has {known}")
        if chosen is None or chosen["layer"] is None or chosen["dose"] is None:
            return None
        layer, dose = chosen["layer"], chosen["dose"]
        if type(layer) is not int or layer < 0:
            raise AnnotationError(f"{files[0]}: layer {layer!r:.80} of {sheet.trait} is no layer number")
        if type(dose) not in (int, float) or not 0 < dose < math.inf:
            raise AnnotationError(f"{files[0]}: dose {dose!r:.80} of {sheet.trait} is no positive, finite number")
        return layer, float(dose)
    except OSError as error:
        raise AnnotationError(f"cannot read {files[0]}: {error.strerror or error}") from error
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise AnnotationError(f"{files[0]} is no selection: {error!r}") from error


# ---- Reading


@dataclass(frozen=True)
class _Vote:
    where: str
    rating: float
    usable: float


def read_rows(
    file: Path, columns: Sequence[str] = COLUMNS, needed: Iterable[str] = ("item", "rating")
) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of an annotator's CSV by column, each with the line it begins on; empty ones are left out.

    columns: what a whole file has. Raises AnnotationError for a file that cannot be read or lacks a needed column.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise AnnotationError(f"cannot read votes from {file}: {error.strerror or error}") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("cp1252", "replace")  # what Excel on Windows writes when not asked for UTF-8
    heading = re.split(r"[\r\n]", text.lstrip(), maxsplit=1)[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=heading.count))
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            begins, line = line, reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if not names:
                names = [name.strip().casefold() for name in cells]
                if missing := set(needed) - set(names):
                    raise AnnotationError(
                        f"{file}, line {begins}: no column {', '.join(sorted(missing))}; found {', '.join(names)}"
                    )
                continue
            if any(cell.strip() for cell in cells[len(names) :]):
                raise AnnotationError(f"{file}, line {begins}: {len(cells)} fields, and the heading has {len(names)}")
            row = dict(zip(names, cells, strict=False))
            yield begins, {**row, "item": row.get("item", "").strip().lower()}
    except csv.Error as error:
        raise AnnotationError(f"{file}, line {line}: not CSV: {error}") from error
    if not names:
        raise AnnotationError(f"{file} is empty; expected a CSV with the columns {', '.join(columns)}")


def _read_vote(row: Mapping[str, str], where: str) -> _Vote | None:
    """The vote in a row, None when there is none. Raises ValueError for what is no vote."""
    rating = row.get("rating", "").strip()
    usable = row.get("usable", "").strip().casefold()
    if rating and not re.fullmatch(r"[0-3]([.,]0*)?", rating):  # pandas and some spreadsheets write 2.0
        raise ValueError(f"rating {rating!r} is not 0, 1, 2 or 3")
    if usable and usable not in _YES | _NO:
        raise ValueError(f"usable {usable!r} is not yes or no")
    if not rating and not usable:
        return None
    return _Vote(where, float(rating[0]) if rating else math.nan, float(usable not in _NO))


def folded(text: str) -> str:
    """Text as rows are compared: spreadsheets change white space and how accents are written."""
    return one_line(unicodedata.normalize("NFC", text))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_nan(part) for part in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _mean(votes: Floats) -> Estimate:
    """Mean over items of the mean over annotators. votes: ``(annotators, items)``."""
    counted = (~np.isnan(votes)).sum(axis=0)
    items = np.nansum(votes, axis=0)[counted > 0] / counted[counted > 0]
    if not items.size:
        return Estimate(math.nan, math.nan, math.nan)
    return Estimate(float(items.mean()), *bootstrap(lambda drawn: float(drawn.mean()), items))
