"""Cells played in parallel, each worker a process of the interpreter that has the harness.

A worker speaks JSON lines (``drivers/worker.py``) and stays alive over many cells, since importing a harness takes
seconds. It needs neither torch nor TraitBasis. When this process ends, however it ends, its workers do.
"""

from __future__ import annotations

import json
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from traitbasis.errors import HarnessError
from traitbasis.outcomes import Cell

# The folder of the drivers comes last: nothing in it hides a module that the harness imports.
_BOOT = "import runpy, sys; sys.path.append(sys.argv[1]); runpy.run_module(sys.argv[2], run_name='__main__')"
_LEFT_SECONDS = 5.0


class WorkerDied(Exception):  # noqa: N818  (no error of ours: what became of it decides)
    """A worker's process ended without an answer; the message has the end of what it wrote to standard error."""


class Worker:
    """A process that plays cells. command: what starts it; settings: its first line.

    ready: what it says of itself. Raises WorkerDied when it does not come up.
    """

    def __init__(self, command: Sequence[str | Path], settings: Mapping[str, Any]) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())  # harnesses write where they run
        self._log = self._stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=folder,
            start_new_session=True,  # Ctrl-C is for us; workers end when their input does
            text=True,
            encoding="utf-8",
        )
        try:
            self.ready: dict[str, Any] = self._ask(settings)["ready"]
        except BaseException:
            self.close()
            raise

    def play(self, cell: Mapping[str, Any]) -> dict[str, Any]:
        """The driver's answer: ``episode`` or ``failed``. Raises WorkerDied."""
        return self._ask({"cell": cell})

    def close(self) -> None:
        """End the process, in the middle of a cell if need be."""
        with suppress(OSError):
            self._process.kill()
        self._process.wait(_LEFT_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what was written to it and not read
                if pipe:
                    pipe.close()
        self._stack.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, what: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout
        try:
            self._process.stdin.write(json.dumps(what) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            if not isinstance(answer, dict) or not answer.keys() & {"ready", "episode", "failed"}:
                raise ValueError("somebody else writes to the driver's output")
        except (OSError, ValueError):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_LEFT_SECONDS)
            raise WorkerDied(f"exit status {self._process.poll()}: {self._last_words()}") from None
        return answer

    def _last_words(self) -> str:
        try:
            self._log.seek(0)
            lines = self._log.read().decode(errors="replace").strip().splitlines()
        except (OSError, ValueError):
            return "nothing is known"
        return " / ".join(line.strip() for line in lines[-3:]) or "it said nothing"


def command_of(python: Path, driver: str) -> list[str | Path]:
    """Runs a driver of this package (``tau_trait``, ``tau2``) by any interpreter that has its harness."""
    return [python.absolute(), "-c", _BOOT, str(Path(__file__).parent), f"drivers.{driver}"]


def play_all(
    cells: Sequence[tuple[Cell, Mapping[str, Any]]],
    start: Callable[[], Worker],
    *,
    concurrency: int,
    first: Worker | None = None,
) -> Generator[tuple[Cell, dict[str, Any]], None, None]:
    """Outcomes as they come: an episode's fields, ``infrastructure`` among them.

    cells: with what their driver is told. first: a worker that is up already; it is closed, too. Raises HarnessError as
    soon as nothing more can come of going on: an endpoint is gone or refuses what is asked, workers do not come up, or
    one failure follows the other. Its last cells then have no outcome, and are still to do. Closing the iterator ends
    the workers at once.
    """
    run = _Run(cells, start, first)
    threads = [threading.Thread(target=run.work, daemon=True) for _ in range(max(1, min(concurrency, len(cells))))]
    for thread in threads:
        thread.start()
    failures = list[Cell]()
    try:
        for _ in cells:
            cell, answer = run.next()
            if "episode" in answer:
                failures.clear()
                yield cell, _episode(answer["episode"], None)
                continue
            failed = answer["failed"]
            if failed["fatal"]:
                yield from run.rest()
                raise HarnessError(f"the run has stopped, {cell} and what follows are still to do: {failed['text']}")
            yield cell, _episode(failed, failed["text"])
            failures.append(cell)
            # One task may be too much for an endpoint, under all conditions; the next would not be.
            if len(failures) >= max(5, 2 * concurrency) and len({(c.domain, c.task) for c in failures}) > 2:
                raise HarnessError(f"the run has stopped after {len(failures)} failures in a row: {failed['text']}")
    finally:
        run.stop()
        for thread in threads:
            thread.join(_LEFT_SECONDS)


class _Run:
    """What the threads of one run share."""

    def __init__(
        self, cells: Sequence[tuple[Cell, Mapping[str, Any]]], start: Callable[[], Worker], first: Worker | None
    ) -> None:
        self._start = start
        self._todo: queue.SimpleQueue[tuple[Cell, Mapping[str, Any]]] = queue.SimpleQueue()
        for cell in cells:
            self._todo.put(cell)
        self._done: queue.SimpleQueue[tuple[Cell, dict[str, Any]] | BaseException] = queue.SimpleQueue()
        self._idle = [first] if first else []
        self._workers = set(self._idle)
        self._lock, self._stopped = threading.Lock(), False

    def next(self) -> tuple[Cell, dict[str, Any]]:
        while True:
            with suppress(queue.Empty):  # a wait without an end could not be interrupted everywhere
                found = self._done.get(timeout=0.5)
                if isinstance(found, BaseException):
                    raise found
                return found

    def rest(self) -> Iterator[tuple[Cell, dict[str, Any]]]:
        """Episodes that have ended already."""
        with suppress(queue.Empty):
            while True:
                found = self._done.get_nowait()
                if not isinstance(found, BaseException) and "episode" in found[1]:
                    yield found[0], _episode(found[1]["episode"], None)

    def work(self) -> None:
        """One thread: its worker plays a cell after the other; one that died is replaced."""
        worker = None
        try:
            while not self._stopped:
                with suppress(IndexError):
                    worker = worker or self._idle.pop()
                cell, told = self._todo.get_nowait()
                worker = worker or self._new()
                try:
                    answer = worker.play(told)
                    self._stopped |= answer.get("failed", {}).get("fatal", False)
                    self._done.put((cell, answer))
                except WorkerDied as death:
                    text = f"the harness's process has ended ({death})"
                    self._done.put((cell, {"failed": {"side": "harness", "fatal": False, "text": text}}))
                    self._drop(worker)
                    worker = None
        except queue.Empty:
            pass
        except WorkerDied as death:
            self._done.put(HarnessError(f"a worker does not come up: {death}"))
        except BaseException as error:  # to whoever waits for the outcomes
            self._done.put(error)
        finally:
            if worker:
                self._drop(worker)

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.close()

    def _new(self) -> Worker:
        worker = self._start()
        with self._lock:
            self._workers.add(worker)
            late = self._stopped
        if late:
            worker.close()
        return worker

    def _drop(self, worker: Worker) -> None:
        with self._lock:
            there = worker in self._workers
            self._workers.discard(worker)
        if there:
            worker.close()


def _episode(found: Mapping[str, Any], failure: str | None) -> dict[str, Any]:
    """The fields of a results file's episode. failure: why it says nothing about the agent."""
    turns = sum(message["speaker"] == "customer" for message in found.get("messages", ()))
    kept = {name: value for name, value in found.items() if name not in ("side", "fatal", "text")}
    if failure is not None:
        kept |= {"reward": 0.0, "ended": "error", "error": failure, "infrastructure": True}
    # As the harness counts it: a reward of 1, rounding aside. What is no number the results file refuses.
    reward = kept["reward"] if isinstance(kept["reward"], int | float) else 0.0
    return {**kept, "success": failure is None and abs(reward - 1) < 1e-6, "turns": turns}


def environment_problem(death: WorkerDied, module: str, install: str, python: Path) -> str:
    """What to do when a worker does not come up."""
    if f"No module named '{module}" in str(death):
        return f"{python} has no {module}; install it ({install}), or name an interpreter that has it with --python"
    return f"the harness does not start in {python}: {death}"
