"""Measuring one trait after the other, in this process or in several, each with a model of its own.

A small model leaves a second core half idle; two processes of one thread each finish nearly twice as many traits. What
is measured is the same: sweeps do not depend on what was drawn before, nor on who else draws.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from traitbasis.cli.common import load_lm, progress

if TYPE_CHECKING:
    from traitbasis.select import Selector
    from traitbasis.sweep import Generator

_ROWS = 256  # of a typical product: most of the time goes into reading turns, many at once
_SMALL = 2**30  # a checkpoint that every process may have a copy of
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Setup:
    """How a model is loaded and what a ``Generator`` gets. purpose: folder beside the vectors for what is measured."""

    purpose: str
    model: str
    folder: Path
    device: str
    dtype: str
    threads: int | None
    options: dict[str, Any]


@dataclass
class Work:
    """A model that traits are measured on."""

    generator: Generator
    home: Path
    _selectors: list[Selector] = field(default_factory=list)

    def selector(self, **options: Any) -> Selector:
        """The selector of this run; made once, with the options of the first call."""
        from traitbasis.select import Selector

        if not self._selectors:
            self._selectors.append(Selector(self.generator, self.home, **options))
        return self._selectors[0]


class Team:
    """Who does the work: this process, or `jobs` others.

    home: folder of the model's vectors. depth: its layers. settings: what a sweep's header says.
    """

    def __init__(self, setup: Setup, jobs: int | None, items: int, stack: ExitStack) -> None:
        dtype = _as_before(setup)
        lm = load_lm(setup.model, setup.device, dtype, threads=setup.threads, rows=_ROWS)
        self.home, self.depth = setup.folder / lm.slug, len(lm.layers)
        jobs = _jobs(lm, setup) if jobs is None else jobs
        self._work: Work | None = None
        if min(jobs, items) <= 1:
            self._work = _begun(setup, lm, stack)
            self.settings = self._work.generator.settings
            return
        setup = replace(setup, dtype=lm.dtype_name, threads=setup.threads or 1)
        del lm
        pool = ProcessPoolExecutor(min(jobs, items), get_context("spawn"), _start, (setup, os.getpid()))
        stack.callback(pool.shutdown, cancel_futures=True)
        self._pool = pool
        self.settings = pool.submit(_settings).result()

    def each(self, what: str, function: Callable[..., Any], items: Sequence[tuple[Any, ...]]) -> Iterator[Any]:
        """``function(work, *item, progress)`` of each item, as they are done. progress is told parts of an item."""
        with progress(what, len(items)) as advance:
            if self._work:
                for item in items:
                    yield function(self._work, *item, advance)
                return
            tasks = [self._pool.submit(_do, function, item) for item in items]
            for task in as_completed(tasks):
                advance(1)
                yield task.result()


@contextmanager
def team(setup: Setup, jobs: int | None, items: int) -> Iterator[Team]:
    """A Team; its models and processes end with the context."""
    with ExitStack() as stack:
        yield Team(setup, jobs, items, stack)


_mine: list[Work] = []  # of a process that works for another


def _start(setup: Setup, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business, and ends the pool
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    lm = load_lm(setup.model, setup.device, setup.dtype, threads=setup.threads)
    _mine.append(_begun(setup, lm, ExitStack()))


def _end_with(parent: int) -> None:
    """A process whose parent was killed must not work on."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _do(function: Callable[..., Any], item: tuple[Any, ...]) -> Any:
    return function(_mine[0], *item, lambda part: None)


def _settings() -> dict[str, Any]:
    return _mine[0].generator.settings


def _begun(setup: Setup, lm: Any, stack: ExitStack) -> Work:
    from traitbasis.sweep import Generator

    return Work(stack.enter_context(Generator(lm, **setup.options)), setup.folder / lm.slug)


def _jobs(lm: Any, setup: Setup) -> int:
    """One for each core, where the model is small and on the CPU; else one."""
    size = sum(parameter.numel() * parameter.element_size() for parameter in lm.model.parameters())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 if setup.threads or lm.device.type != "cpu" or size > _SMALL else cores


def _as_before(setup: Setup) -> str:
    """What is measured to be fastest may change with the machine's load; a run that goes on keeps its dtype."""
    from traitbasis.model import model_slug
    from traitbasis.sweep import BASELINES, read_cells

    path = setup.folder / model_slug(setup.model) / setup.purpose / f"{BASELINES}.jsonl"
    return str(read_cells(path)[0]["dtype"]) if setup.dtype == "fastest" and path.is_file() else setup.dtype
