"""What the experiments share: intervals over tasks, tables, files, a progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from traitbasis.basis import Basis, find_basis
from traitbasis.errors import ArtifactError, TraitBasisError
from traitbasis.files import write_whole
from traitbasis.model import LanguageModel
from traitbasis.select import bootstrap


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """Each figure by `spec`; the mean alone where there is no band."""
        mean, low, high = (format(value, spec or "+.2f") for value in (self.mean, self.low, self.high))
        return mean if self.low == self.high == self.mean else f"{mean} [{low}, {high}]"

    def __str__(self) -> str:
        return format(self)

    @property
    def record(self) -> dict[str, float | None]:
        """For JSON, which has no nan."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def over_tasks(values: Tensor, seeds: int) -> Interval:
    """Mean of ``(seeds * tasks,)`` values, all tasks once and then again. Tasks are resampled: turns of one task stay
    together. Turns that are nan were not measured, and do not count."""
    by_task = values.reshape(seeds, -1).nanmean(0)
    by_task = by_task[~by_task.isnan()]
    if not len(by_task):
        return Interval(math.nan, math.nan, math.nan)
    return Interval(*(round(value, 4) for value in (float(by_task.mean()), *bootstrap(by_task))))


def own_basis(lm: LanguageModel, path: Path | None = None) -> Basis | None:
    """The model's basis; None where it has none and no file was named."""
    try:
        return find_basis(lm, path)
    except ArtifactError:
        if path is not None:
            raise
        return None


def versions() -> dict[str, str]:
    """What goes with every published number (contract 11), beside the model and the settings."""
    return {name: version(name) for name in ("traitbasis", "transformers", "torch")}


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_json(path: Path, content: Any) -> None:
    """Write under a temporary name first. Raises ValueError for nan, which JSON does not have."""
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar, told how many steps are done."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def run(main: Callable[[], None]) -> None:
    """Call a script's main; what was raised on purpose ends it with its message alone."""
    try:
        main()
    except TraitBasisError as error:
        sys.exit(f"error: {error}")
