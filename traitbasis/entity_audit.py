"""What has a rewritten benchmark lost? Any two files of records are compared, whoever rewrote them. What an entity is,
and when it is kept: ``metrics/entities.py``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from traitbasis.errors import EvaluationError
from traitbasis.metrics.entities import Entity, entities, invented, kept
from traitbasis.metrics.estimate import Estimate, over_tasks
from traitbasis.static_turns import Record


@dataclass(frozen=True)
class AuditedTurn:
    """Counts of one turn: its entities, those lost, those invented, words before and after, whether it differs."""

    entities: int
    lost: tuple[Entity, ...]
    invented: tuple[Entity, ...]
    words: int
    words_after: int
    changed: bool


@dataclass(frozen=True)
class Audit:
    """What a rewritten benchmark has lost, each figure with its interval over tasks.

    lost: share of the entities. tasks_with_loss, tasks_with_invention: share of the tasks that lost, or got, at least
    one. words_ratio: words after per word before. turns, changed: counts. missing_turns: user turns that one side has
    and the other has not; the entities of those of the original count as lost. missing_tasks: not rewritten at all;
    they count for nothing. by_kind: entities and how many of them were lost, by kind. statuses: of turns, where the
    file says so. examples: some of what is lost: task, turn, entity.
    """

    tasks: int
    turns: int
    changed: int
    entities: int
    lost: Estimate
    tasks_with_loss: Estimate
    tasks_with_invention: Estimate
    words: float
    words_after: float
    words_ratio: Estimate
    missing_turns: int
    missing_tasks: int
    by_kind: dict[str, tuple[int, int]]
    statuses: dict[str, int]
    examples: list[tuple[str, int, str, str]]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            name: value.record if isinstance(value, Estimate) else value
            for name, value in ((name, getattr(self, name)) for name in self.__dataclass_fields__)
        }


def audit(originals: Sequence[Record], rewritten: Sequence[Record], *, seed: int = 0) -> Audit:
    """Compare any rewritten benchmark with its original, record by record: by id where both have them, else by place.

    Raises EvaluationError when the two have no record in common.
    """
    after = {record.id: record for record in rewritten}
    pairs = [(record, after[record.id]) for record in originals if record.id in after]
    if not pairs:
        raise EvaluationError(
            f"the two files have no record in common: ids {originals[0].id!r} and {rewritten[0].id!r}, for example"
        )
    by_task: dict[str, list[AuditedTurn]] = {}
    kinds: dict[str, tuple[int, int]] = {}
    examples: list[tuple[str, int, str, str]] = []
    missing = 0
    for before, other in pairs:
        turns, texts = before.turns, other.turns
        missing += abs(len(turns) - len(texts))
        for number, turn in enumerate(turns):
            text = texts[number] if number < len(texts) else ""
            found = _audited(turn, text)
            by_task.setdefault(before.id, []).append(found)
            for entity in {(entity.kind, entity.key): entity for entity in entities(turn)}.values():
                of_kind, lost = kinds.get(entity.kind, (0, 0))
                kinds[entity.kind] = of_kind + 1, lost + (entity.key in {other.key for other in found.lost})
            examples += [(before.id, number, entity.kind, entity.text) for entity in found.lost]
    if not by_task:
        raise EvaluationError("the two files have no user turn in common")
    flat = [turn for turns in by_task.values() for turn in turns]
    over = partial(over_tasks, by_task=by_task, seed=seed)
    tasks = {task: [turns] for task, turns in by_task.items()}
    return Audit(
        tasks=len(pairs),
        turns=len(flat),
        changed=sum(turn.changed for turn in flat),
        entities=sum(turn.entities for turn in flat),
        lost=over(lambda turns: _share([len(t.lost) for t in turns], [t.entities for t in turns])),
        tasks_with_loss=over_tasks(
            lambda found: _part(any(t.lost for t in turns) for turns in found), tasks, seed=seed
        ),
        tasks_with_invention=over_tasks(
            lambda found: _part(any(t.invented for t in turns) for turns in found), tasks, seed=seed
        ),
        words=sum(turn.words for turn in flat) / len(flat),
        words_after=sum(turn.words_after for turn in flat) / len(flat),
        words_ratio=over(lambda turns: _share([t.words_after for t in turns], [t.words for t in turns])),
        missing_turns=missing,
        missing_tasks=len(originals) - len(pairs),
        by_kind=dict(sorted(kinds.items())),
        statuses=dict(Counter(status for _, other in pairs for status in _statuses(other))),
        examples=examples[:20],
    )


def _audited(turn: str, text: str) -> AuditedTurn:
    found, lost = kept(turn, text)
    return AuditedTurn(
        entities=len(found) + len(lost),
        lost=tuple(lost),
        invented=tuple(invented(turn, text)),
        words=len(turn.split()),
        words_after=len(text.split()),
        changed=turn != text,
    )


def _statuses(record: Record) -> list[str]:
    note = record.data.get("traitbasis") if isinstance(record.data, dict) else None
    turns = note.get("turns") if isinstance(note, Mapping) else None
    turns = turns if isinstance(turns, list) else []  # anybody's file is compared
    return [str(turn["status"]) for turn in turns if isinstance(turn, Mapping) and "status" in turn]


def _share(parts: Sequence[int], wholes: Sequence[int]) -> float:
    return sum(parts) / sum(wholes) if sum(wholes) else float("nan")


def _part(answers: Iterator[bool]) -> float:
    found = list(answers)
    return sum(found) / len(found)
