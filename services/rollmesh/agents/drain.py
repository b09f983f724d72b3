"""What the calls under way are told when their gateway stops, while there is still time for an answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rollmesh.agents.openai_errors import OpenAiError, gone, unavailable
from rollmesh.errors import StoreError
from rollmesh.runtime.lifecycle import Shutdown

_ANSWER_SECONDS = 2.0
"""Time for answers that are nearly complete; shorter than the grace of the HTTP server, which ends them without one."""
_LOOK_SECONDS = 1.0


class Drain:
    """Said once, at the end; every call that hears it ends with its error."""

    def __init__(self) -> None:
        self._said = asyncio.Event()
        self._error = _stopping()

    async def heard(self) -> OpenAiError:
        """Wait for it; returns the error of the call that waits."""
        await self._said.wait()
        return self._error

    def say(self, error: OpenAiError) -> None:
        """End the calls under way, and each that comes."""
        self._error = error
        self._said.set()


@asynccontextmanager
async def farewell_at(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> AsyncIterator[Drain]:
    """A farewell that is said at ``shutdown``: at once when the run needs no more rollouts, else after a moment."""
    farewell = Drain()
    task = asyncio.create_task(_say(farewell, shutdown, complete), name="farewell")
    try:
        yield farewell
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _say(farewell: Drain, shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> None:
    await shutdown.wait()
    deadline = time.monotonic() + _ANSWER_SECONDS
    over = False
    try:
        async with asyncio.timeout(_LOOK_SECONDS):
            over = await complete()
    except (TimeoutError, StoreError):
        pass  # Redis may have stopped first
    if over:
        farewell.say(gone("the run has ended: it has all the rollouts that it needs", "run_complete"))
        return
    await asyncio.sleep(deadline - time.monotonic())
    farewell.say(_stopping())


def _stopping() -> OpenAiError:
    return unavailable("the gateway is shutting down; a session goes on at the next one", "shutting_down")
