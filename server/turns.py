"""From a request to user turns, without ever blocking the event loop: the engine's thread calls back into a queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from fastapi import Request
from starlette.concurrency import run_in_threadpool

from traitbasis.engines.base import Failure, Ticket
from traitbasis.simulator import UserSimulator
from traitbasis.tries import PreparedTurn, UserTurn

from .metrics import Observer


class RunningTurns:
    """Submitted user turns for one request. Iterate for their pieces and, last of each, the turn; leaving cancels."""

    def __init__(self, simulator: UserSimulator, observer: Observer, prepared: Sequence[PreparedTurn]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, str | UserTurn | Failure]] = asyncio.Queue()
        self.count = len(prepared)
        self._tickets: list[Ticket] = []
        try:
            prompts: list[tuple[int, ...]] = []
            for number, turn in enumerate(prepared):
                again = turn.request.prompt_ids in prompts[-1:]  # choices of one prompt stand together
                prompts.append(turn.request.prompt_ids)
                listener = observer.watch(partial(self._hand_over, number), choice=int(again))
                self._tickets.append(simulator.submit(turn, listener))
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
        """The whole turns, in order; cancelled at once when the client goes away meanwhile."""

        async def collect() -> list[UserTurn]:
            found = {number: item async for number, item in self.items() if isinstance(item, UserTurn)}
            return [found[number] for number in sorted(found)]

        async def disconnected() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        collecting, gone = asyncio.create_task(collect()), asyncio.create_task(disconnected())
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                self.cancel()
            return await collecting
        finally:
            collecting.cancel()
            gone.cancel()

    def _hand_over(self, number: int, item: str | UserTurn | Failure) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, item))

    def cancel(self) -> None:
        """End what still runs."""
        for ticket in self._tickets:
            ticket.cancel()


async def start(
    simulator: UserSimulator, observer: Observer, prepare: Callable[[], Sequence[PreparedTurn]]
) -> RunningTurns:
    """Check a request off the event loop, by `prepare`, and submit its turns."""
    return RunningTurns(simulator, observer, await run_in_threadpool(prepare))
