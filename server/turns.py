"""From a request to user turns, without ever blocking the event loop: the engine's thread calls back into a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from traitbasis.engines.base import Failure
from traitbasis.simulator import PreparedTurn, UserSimulator, UserTurn

_DISCONNECT_POLL_SECONDS = 0.25


class RunningTurn:
    """A submitted user turn. Iterate for its pieces and, last, the turn; closing cancels the generation."""

    def __init__(self, simulator: UserSimulator, prepared: PreparedTurn) -> None:
        loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[str | UserTurn | Failure] = asyncio.Queue()

        def hand_over(item: str | UserTurn | Failure) -> None:
            loop.call_soon_threadsafe(self._queue.put_nowait, item)

        self._ticket = simulator.submit(prepared, hand_over)

    async def items(self) -> AsyncIterator[str | UserTurn]:
        """Pieces of text, then the UserTurn. Raises what the engine reports."""
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, Failure):
                    raise item.error
                yield item
                if isinstance(item, UserTurn):
                    return
        finally:
            self._ticket.cancel()

    async def turn(self, request: Request) -> UserTurn:
        """The whole turn; cancelled when the client goes away meanwhile."""

        async def last() -> UserTurn:
            return [item async for item in self.items()][-1]  # type: ignore[return-value]

        task = asyncio.create_task(last())
        try:
            while True:
                done, _ = await asyncio.wait({task}, timeout=_DISCONNECT_POLL_SECONDS)
                if done:
                    return task.result()
                if await request.is_disconnected():
                    self._ticket.cancel()
        finally:
            task.cancel()


async def start(simulator: UserSimulator, messages: Any, traits: Any, **options: Any) -> RunningTurn:
    """Check a request off the event loop and submit it."""
    prepared = await run_in_threadpool(simulator.prepare, messages, traits, **options)
    return RunningTurn(simulator, prepared)
