"""From a request to user turns, without ever blocking the event loop: the engine's thread calls back into a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from traitbasis.engines.base import Failure, Ticket
from traitbasis.simulator import PreparedTurn, UserSimulator, UserTurn

_DISCONNECT_POLL_SECONDS = 0.25


class RunningTurns:
    """Submitted user turns for one request. Iterate for their pieces and, last of each, the turn; leaving cancels."""

    def __init__(self, simulator: UserSimulator, prepared: Sequence[PreparedTurn]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, str | UserTurn | Failure]] = asyncio.Queue()
        self.count = len(prepared)
        self._tickets: list[Ticket] = []
        try:
            for number, turn in enumerate(prepared):
                self._tickets.append(simulator.submit(turn, partial(self._hand_over, number)))
        except BaseException:  # such as a queue that is full by now
            self.cancel()
            raise

    async def items(self) -> AsyncIterator[tuple[int, str | UserTurn]]:
        """Which turn, and a piece of its text or the whole UserTurn. Raises what the engine reports."""
        open_turns = self.count
        try:
            while open_turns:
                number, item = await self._queue.get()
                if isinstance(item, Failure):
                    raise item.error
                yield number, item
                open_turns -= isinstance(item, UserTurn)
        finally:
            self.cancel()

    async def turns(self, request: Request) -> list[UserTurn]:
        """The whole turns, in order; cancelled when the client goes away meanwhile."""

        async def collect() -> list[UserTurn]:
            found = {number: item async for number, item in self.items() if isinstance(item, UserTurn)}
            return [found[number] for number in sorted(found)]

        task = asyncio.create_task(collect())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_DISCONNECT_POLL_SECONDS)
                if done:
                    return task.result()
                if await request.is_disconnected():
                    self.cancel()
        finally:
            task.cancel()

    def _hand_over(self, number: int, item: str | UserTurn | Failure) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, item))

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            ticket.cancel()


async def start(simulator: UserSimulator, messages: Any, traits: Any, *, n: int = 1, **options: Any) -> RunningTurns:
    """Check a request off the event loop and submit `n` turns for it."""

    def prepare() -> list[PreparedTurn]:
        return [simulator.prepare(messages, traits, choice=choice, **options) for choice in range(n)]

    return RunningTurns(simulator, await run_in_threadpool(prepare))
