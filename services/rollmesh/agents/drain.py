"""Shutdown notice for the calls in progress, sent while there is still time to answer them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from rollmesh.agents.openai_errors import OpenAiError, gone, unavailable
from rollmesh.errors import StoreError
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.tasks import cancel_and_wait

_ANSWER_SECONDS = 2.0
"""Time for answers that are nearly complete; shorter than the HTTP server's grace period, which closes connections
without an answer."""
_POLL_SECONDS = 1.0


class Drain:
    """Shutdown notice, sent once; every call that waits for it ends with its error."""

    def __init__(self, notice: asyncio.Task[OpenAiError]) -> None:
        self._notice = notice

    async def wait(self) -> OpenAiError:
        """Wait for the notice; return the error for the waiting call."""
        return await asyncio.shield(self._notice)


@asynccontextmanager
async def drain_at(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> AsyncIterator[Drain]:
    """Provide a notice sent on ``shutdown``: immediately if the run is complete, otherwise after a grace period."""
    notice = asyncio.create_task(_notice(shutdown, complete), name="drain")
    try:
        yield Drain(notice)
    finally:
        await cancel_and_wait(notice)


async def _notice(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> OpenAiError:
    await shutdown.wait()
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        async with asyncio.timeout(_POLL_SECONDS):
            if await complete():
                return gone("the run has ended: it needs no more rollouts", "run_complete")
    except (TimeoutError, StoreError):
        pass  # Redis may already be shut down
    await asyncio.sleep(deadline - time.monotonic())
    return unavailable(
        "the agents service is shutting down; retry: the session continues after its restart", "shutting_down"
    )
