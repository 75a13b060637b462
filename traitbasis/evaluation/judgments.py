"""What raters say of dialogues, on disk: people, judges and the package's own instruments in one format.

A file is JSON lines: a header with its kind and what made it, then one record a line. Fidelity and composability ask
the same question (which traits does the customer show?), so their files serve each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, overload

from traitbasis.errors import EvaluationError
from traitbasis.files import write_whole

if TYPE_CHECKING:
    from traitbasis.evaluation.traits import Judgment

FORMAT = "traitbasis.judgments/1"
Kind = Literal["fidelity", "composability", "consistency", "realism"]
Key: TypeAlias = tuple[str, str, int, str]  # of a dialogue within its method: spec, task, trial, positions
Course = Literal["fade", "stable", "escalate", "absent"]
Choice = Literal["first", "second", "tie"]


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

    first: tuple[str, Key]
    second: tuple[str, Key]
    rater: str
    choice: Choice

    @property
    def task(self) -> str:
        """What both dialogues are about."""
        return self.first[1][1]


AnyJudgment: TypeAlias = "Judgment | Verdict | Preference"


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
                raise EvaluationError(
                    f"{path} and {other[1]} both hold what {record.rater} says of {_identity(record)}"
                )
    return [record for record, _ in found.values()]


def read_headers(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """What made the judgments of several files."""
    return [_read(Path(path))[0] for path in paths]


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
        header, *lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        if header["format"] != FORMAT or header["kind"] not in get_args(Kind):
            raise EvaluationError(f"{path} holds no judgments of this version (its format is {header['format']!r})")
        return header, [_record(header["kind"], line) for line in lines]
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise EvaluationError(f"{path} holds no judgments, or is damaged: {error}") from error


def _record(kind: Kind, line: dict[str, Any]) -> AnyJudgment:
    if kind == "realism":
        if line["choice"] not in get_args(Choice):
            raise ValueError(f"choice is {line['choice']!r}")
        sides = {side: (line[side][0], _key(line[side][1])) for side in ("first", "second")}
        return Preference(**{**line, **sides})
    line = {**line, "key": _key(line["key"])}
    if kind == "consistency":
        if line["verdict"] not in get_args(Course):
            raise ValueError(f"verdict is {line['verdict']!r}")
        return Verdict(**line)
    from traitbasis.evaluation.traits import Judgment  # it needs torch, which the other kinds do not

    return Judgment(**line)


def _key(value: Any) -> Key:
    spec, task, trial, positions = value
    return str(spec), str(task), int(trial), str(positions)
