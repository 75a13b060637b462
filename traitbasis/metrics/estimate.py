"""A figure with its interval: the bootstrap over tasks that all evaluations of dialogues and episodes share.

What belongs to one task (turns, trials, conditions) stays together when it is drawn again: dialogues about one task are
alike, and an interval over single turns would be too narrow. Source: Efron and Tibshirani (1993), An Introduction to
the Bootstrap, chapters 8 and 13.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval; nan where undefined."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def __format__(self, spec: str) -> str:
        """Each figure by `spec`; a dash where there is none, the value alone where there is no interval."""
        if math.isnan(self.value):
            return "-"
        value, low, high = (format(part, spec or ".2f") for part in (self.value, self.low, self.high))
        return value if math.isnan(self.low) or self.low == self.high == self.value else f"{value} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)

    @property
    def record(self) -> dict[str, float | None]:
        """For JSON, which has no nan; four digits."""
        return {name: finite(value) for name, value in asdict(self).items()}


def finite(value: float, digits: int = 4) -> float | None:
    """A figure for JSON, which has no nan: rounded, None where undefined."""
    return None if math.isnan(value) else round(value, digits)


def over_tasks(
    statistic: Callable[[Sequence[T]], float],
    by_task: Mapping[str, Sequence[T]],
    *,
    times: int = 2000,
    seed: int = 0,
    coverage: float = 0.95,
) -> Estimate:
    """`statistic` of all items, and its percentile interval when tasks are drawn again with replacement.

    by_task: items by task. Draws for which the statistic is undefined (nan) are left out; without two tasks, or when
    no draw is defined, there is no interval. Raises ValueError when there is no item at all.
    """
    groups = [list(items) for _, items in sorted(by_task.items()) if items]
    if not groups:
        raise ValueError("there is nothing to estimate from: no task has an item")
    value = float(statistic([item for group in groups for item in group]))
    if len(groups) < 2:
        return Estimate(value)
    drawn = draw_tasks(len(groups), times, seed)
    found = np.array([statistic([item for i in row for item in groups[i]]) for row in drawn], dtype=np.float64)
    return Estimate(value, *percentiles(found, coverage))


def mean_over_tasks(values: Iterable[tuple[str, float]], seed: int = 0) -> Estimate:
    """``over_tasks`` of the mean of (task, value), by tasks' sums, which is faster. nan are left out, and with them the
    tasks that have nothing else; nan without any value."""
    known: dict[str, list[float]] = defaultdict(list)
    for task, value in values:
        if not math.isnan(value):
            known[task].append(value)
    if not known:
        return Estimate(math.nan)
    sums = {task: [(sum(some), len(some))] for task, some in known.items()}
    return over_tasks(lambda some: sum(total for total, _ in some) / sum(n for _, n in some), sums, seed=seed)


def draw_tasks(tasks: int, times: int, seed: int) -> NDArray[np.int64]:
    """Which tasks each draw takes, ``(times, tasks)``: the draws that all intervals with this seed have in common."""
    return np.random.default_rng(seed).integers(tasks, size=(times, tasks))


def percentiles(found: NDArray[np.float64], coverage: float = 0.95) -> tuple[float, float]:
    """The interval of a figure's draws; nan among them are left out, and (nan, nan) when nothing else is there."""
    found = found[~np.isnan(found)]
    if not found.size:
        return math.nan, math.nan
    low, high = np.quantile(found, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def mean(values: Sequence[float]) -> float:
    """Mean of what is not nan; nan when nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan
