"""An engine that replays written texts: the engine protocol without a model."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

from traitbasis.engines.base import EngineStats, Event, Failure, Finish, Listener, Request


@dataclass
class Script:
    """One generation: pieces of text, one a token, and how it ends; `waits` holds it until it is cancelled."""

    pieces: Sequence[str]
    finish: Finish = "stop"
    waits: bool = False
    fails: Exception | None = None


@dataclass
class _Ticket:
    cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        self.cancelled.set()


class ScriptedEngine:
    """Answers the n-th submission with the n-th script, the last one from then on; an exception is raised by submit.

    threaded: tell listeners from the engine's own thread, as real engines do; else from within ``submit``.
    """

    def __init__(self, *scripts: Script | str | Exception, threaded: bool = True) -> None:
        self._scripts = [Script([script]) if isinstance(script, str) else script for script in scripts]
        self.requests: list[Request] = []
        self.tickets: list[_Ticket] = []
        self._jobs: SimpleQueue[tuple[Script, Listener, _Ticket] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True) if threaded else None
        if self._thread:
            self._thread.start()

    def submit(self, request: Request, listener: Listener, *, again: bool = False) -> _Ticket:
        script = self._scripts[min(len(self.requests), len(self._scripts) - 1)]
        self.requests.append(request)
        if isinstance(script, Exception):
            raise script
        ticket = _Ticket()
        self.tickets.append(ticket)
        if self._thread:
            self._jobs.put((script, listener, ticket))
        else:
            self._play(script, listener, ticket)
        return ticket

    def stats(self) -> EngineStats:
        return EngineStats(max_batch=1, max_queue=1, max_context=None, prompt_tokens=len(self.requests))

    def close(self) -> None:
        if self._thread:
            self._jobs.put(None)
            self._thread.join(10)

    def _work(self) -> None:
        while job := self._jobs.get():
            self._play(*job)

    def _play(self, script: Script, listener: Listener, ticket: _Ticket) -> None:
        try:
            for number, piece in enumerate(script.pieces):
                listener(Event(number, piece))
            if script.waits:
                assert ticket.cancelled.wait(10), "nobody cancelled"
                listener(Event(None, "", "cancelled"))
            elif script.fails:
                listener(Failure(script.fails))
            else:
                listener(Event(None, "", script.finish))
        except Exception:  # as in the real engine: a listener's mistake does not end the thread
            ticket.cancel()
