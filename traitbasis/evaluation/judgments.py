"""What raters say of dialogues, on disk: people, judges and the package's own instruments in one format.

A file is JSON lines: a header with its kind and what made it, then one record a line. Fidelity and composability ask
the same question (which traits does the customer show?), so their files serve each other.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args, overload

import numpy as np
from pydantic import TypeAdapter, ValidationError

from traitbasis.dialogues import Dialogue
from traitbasis.errors import EvaluationError
from traitbasis.evaluation.transcripts import is_neutral
from traitbasis.files import write_whole
from traitbasis.metrics.agreement import Level, krippendorff_alpha
from traitbasis.metrics.estimate import Estimate, over_tasks

FORMAT = "traitbasis.judgments/1"
LEVELS = ("low", "medium", "high")
Kind = Literal["fidelity", "composability", "consistency", "realism"]
Key: TypeAlias = tuple[str, str, int, str]  # of a dialogue within its method: spec, task, trial, positions
Side: TypeAlias = tuple[str, Key]  # a dialogue: method and key
Course = Literal["fade", "stable", "escalate", "absent"]
Choice = Literal["first", "second", "tie"]


@dataclass(frozen=True)
class Judgment:
    """Which traits one rater (an instrument, a judge, a person) finds in a dialogue's customer.

    method, key: of the dialogue (``Dialogue.key``). traits: level (``low``, ``medium``, ``high``, or ``present`` where
    none is said) by named trait; empty when the customer shows none.
    """

    method: str
    key: Key
    rater: str
    traits: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """How a trait goes through one dialogue, to one rater. verdict: ``absent`` where it never shows."""

    method: str
    key: Key
    rater: str
    trait: str
    verdict: Course


@dataclass(frozen=True)
class Preference:
    """Which of two customers seems more like a real person, to one rater who was shown `first` first.

    first, second: method and key. A rater who was shown a pair in both orders has a record of each.
    """

    first: Side
    second: Side
    rater: str
    choice: Choice

    @property
    def task(self) -> str:
        """What both dialogues are about."""
        return self.first[1][1]


AnyJudgment: TypeAlias = Judgment | Verdict | Preference


def write_judgments(path: Path, kind: Kind, judgments: Sequence[AnyJudgment], made_by: Mapping[str, Any]) -> Path:
    """Write a file of judgments, whole. made_by: raters, dialogues' headers, versions (contract 11)."""
    lines: list[Mapping[str, Any]] = [{"format": FORMAT, "kind": kind, "made_by": made_by}]
    lines += [asdict(judgment) for judgment in judgments]
    return write_whole(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


@overload
def read_judgments(paths: Iterable[str | Path], kind: Literal["fidelity", "composability"]) -> list[Judgment]: ...
@overload
def read_judgments(paths: Iterable[str | Path], kind: Literal["consistency"]) -> list[Verdict]: ...
@overload
def read_judgments(paths: Iterable[str | Path], kind: Literal["realism"]) -> list[Preference]: ...
def read_judgments(paths: Iterable[str | Path], kind: Kind) -> Sequence[AnyJudgment]:
    """The judgments in several files, in order.

    Raises EvaluationError naming the file that is missing, damaged or of another kind, and the rater who judged the
    same thing twice.
    """
    found: dict[tuple[Any, ...], tuple[AnyJudgment, Path]] = {}
    for path in map(Path, paths):
        header, records = _read(path)
        if header["kind"] not in _served_by(kind):
            raise EvaluationError(f"{path} holds judgments of {header['kind']}, not of {kind}")
        for record in records:
            if (other := found.setdefault(_identity(record), (record, path)))[0] is not record:
                _, *what = _identity(record)
                raise EvaluationError(f"{path} and {other[1]} both hold what {record.rater} says of {what}")
    return [record for record, _ in found.values()]


def read_headers(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """What made the judgments of several files."""
    return [_read(Path(path))[0] for path in paths]


def side_of(dialogue: Dialogue) -> Side:
    """A dialogue as judgments name it."""
    return dialogue.method, dialogue.key


def player_of(side: Side) -> str:
    """A method's name in tables; with what is steered, where that is not the default."""
    method, (_, _, _, positions) = side
    return method if positions == "generated" else f"{method} (positions={positions})"


def shown(dialogue: Dialogue) -> tuple[tuple[str, str], ...]:
    """(speaker, text) as raters get them: no instruction, which may name what they are to find, and no stop token that
    stands alone, which is said to the harness."""
    tokens = {token.strip() for token in dialogue.stop_tokens}
    return tuple(
        (turn.speaker, turn.text)
        for turn in dialogue.turns
        if turn.speaker != "customer" or turn.text.strip() not in tokens
    )


def judged(kind: Kind, dialogues: Iterable[Dialogue]) -> list[Dialogue]:
    """The dialogues that a question is asked about: of mixes for composability, of one trait and of neutral customers
    for fidelity, of customers with traits and neutral ones, the null, for consistency, all for realism. Raises
    EvaluationError when there is none, for consistency none of a customer with traits.
    """
    least, most, what = {
        "fidelity": (0, 1, "one trait or none"),
        "composability": (2, math.inf, "several traits"),
        "consistency": (1, math.inf, "traits"),
        "realism": (0, math.inf, "any traits"),
    }[kind]
    dialogues = list(dialogues)
    found = [dialogue for dialogue in dialogues if least <= len(dialogue.traits) <= most]
    if not found or (kind == "consistency" and all(map(is_neutral, found))):
        raise EvaluationError(f"there is no dialogue of a customer with {what}, which {kind} is about")
    return dialogues if kind == "consistency" else found


def courses_of(dialogues: Sequence[Dialogue]) -> list[tuple[Dialogue, str]]:
    """What consistency asks: how each intended trait goes through a dialogue; of a neutral customer's, how each trait
    does that others intend. What a rater finds there is the null: a judge that sees traits everywhere sees them there.
    """
    traits = sorted({trait for dialogue in dialogues if not is_neutral(dialogue) for trait in dialogue.traits})
    return [
        (dialogue, trait)
        for dialogue in dialogues
        for trait in (traits if is_neutral(dialogue) else sorted(dialogue.traits))
    ]


# ---- Agreement


def agreement(judgments: Sequence[AnyJudgment], *, seed: int = 0) -> dict[tuple[str, ...], Estimate]:
    """Krippendorff's alpha of judgments of one kind: of all raters under their names, then of every two of them.

    Traits are compared by dialogue and trait (absent, low, medium, high: ordinal; only absent or present where a rater
    says no levels), verdicts as names (nominal), preferences by pair (lost, tie, won: ordinal; see ``votes_of``),
    each pair from both its sides, since which comes first is up to the methods' names. Intervals draw tasks again.
    Empty with fewer than two raters.
    """
    level, cells = _cells(judgments)
    raters = sorted({rater for rater, _ in cells})
    items = sorted({item for _, item in cells})
    column = {item: i for i, item in enumerate(items)}
    table = np.full((len(raters), len(items)), np.nan)
    for (rater, item), value in cells.items():
        table[raters.index(rater), column[item]] = value
    by_task: dict[str, list[int]] = defaultdict(list)
    for item in items:
        by_task[item[0]].append(column[item])
    groups = [tuple(raters), *combinations(raters, 2)] if len(raters) > 2 else list(combinations(raters, 2))

    def alpha(rows: list[int]) -> Callable[[Sequence[int]], float]:
        return lambda columns: krippendorff_alpha(table[np.ix_(rows, list(columns))], level)

    return {
        group: over_tasks(alpha([raters.index(rater) for rater in group]), by_task, times=500, seed=seed)
        for group in groups
    }


def votes_of(preferences: Iterable[Preference]) -> dict[str, dict[tuple[Side, Side], float]]:
    """By rater and pair of dialogues, what the first of the pair got: 1 won, 0 lost, 0.5 a tie.

    Pairs stand in the order of names, however they were shown. One who prefers another dialogue in the other order
    sees no difference: a tie.
    """
    showings: dict[str, dict[tuple[Side, Side], list[float]]] = defaultdict(lambda: defaultdict(list))
    for vote in preferences:
        score = {"first": 1.0, "tie": 0.5, "second": 0.0}[vote.choice]
        in_order = vote.first <= vote.second
        pair = (vote.first, vote.second) if in_order else (vote.second, vote.first)
        showings[vote.rater][pair].append(score if in_order else 1 - score)
    return {
        rater: {pair: scores[0] if len(set(scores)) == 1 else 0.5 for pair, scores in pairs.items()}
        for rater, pairs in showings.items()
    }


def _cells(judgments: Sequence[AnyJudgment]) -> tuple[Level, dict[tuple[str, tuple[Any, ...]], float]]:
    """Values by rater and item; an item begins with its task."""
    if preferences := [judgment for judgment in judgments if isinstance(judgment, Preference)]:
        return "ordinal", {
            (rater, (a[1][1], *sides)): won
            for rater, pairs in votes_of(preferences).items()
            for (a, b), score in pairs.items()
            for sides, won in (((a, b), score), ((b, a), 1 - score))
        }
    if verdicts := [judgment for judgment in judgments if isinstance(judgment, Verdict)]:
        courses = get_args(Course)
        return "nominal", {(v.rater, (v.key[1], v.method, v.key, v.trait)): courses.index(v.verdict) for v in verdicts}
    traits = [judgment for judgment in judgments if not isinstance(judgment, Preference | Verdict)]
    named = sorted({trait for judgment in traits for trait in judgment.traits})
    levels: dict[str | None, float] = {None: 0.0, **{level: i + 1.0 for i, level in enumerate(LEVELS)}}
    if any("present" in judgment.traits.values() for judgment in traits):  # somebody says no levels
        levels = {level: float(level is not None) for level in (None, "present", *LEVELS)}
    return "ordinal", {
        (j.rater, (j.key[1], j.method, j.key, trait)): levels[j.traits.get(trait)] for j in traits for trait in named
    }


# ---- One file


def _served_by(kind: Kind) -> tuple[Kind, ...]:
    same: tuple[Kind, ...] = ("fidelity", "composability")
    return same if kind in same else (kind,)


def _identity(record: AnyJudgment) -> tuple[Any, ...]:
    """What no rater may say twice."""
    if isinstance(record, Preference):
        return record.rater, record.first, record.second
    trait = (record.trait,) if isinstance(record, Verdict) else ()
    return record.rater, record.method, record.key, *trait


def _read(path: Path) -> tuple[dict[str, Any], list[AnyJudgment]]:
    if not path.is_file():
        raise EvaluationError(f"no judgments at {path}; make some with: traitbasis eval judge, or eval sheet and votes")
    try:
        header, *lines = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
        if header["format"] != FORMAT or header["kind"] not in get_args(Kind):
            raise EvaluationError(f"{path} holds no judgments of this version (its format is {header['format']!r})")
        return header, [_record(header["kind"], line) for line in lines]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path} holds no judgments, or is damaged: {error}") from error


def _record(kind: Kind, line: dict[str, Any]) -> AnyJudgment:
    """Raises ValueError or TypeError for what is none: metrics sort and compare all of its fields."""
    types: dict[Kind, type[AnyJudgment]] = {"realism": Preference, "consistency": Verdict}
    kept = types.get(kind, Judgment)
    if unknown := line.keys() - {field.name for field in fields(kept)}:
        raise ValueError(f"unknown field {min(unknown)!r}")
    found: AnyJudgment = checked(kept, line)
    if isinstance(found, Judgment) and (levels := set(found.traits.values()) - {*LEVELS, "present"}):
        raise ValueError(f"a level is {levels.pop()!r}")
    return found


def checked(kind: Any, value: Any) -> Any:
    """A value from JSON as a dataclass or tuple of these types. Raises ValueError naming field and fault."""
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
