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

    def __init__(self) -> None:
        self._sent = asyncio.Event()
        self._error = _stopping()

    async def wait(self) -> OpenAiError:
        """Wait for the notice; return the error for the waiting call."""
        await self._sent.wait()
        return self._error

    def send(self, error: OpenAiError) -> None:
        """End the calls in progress and every later one."""
        self._error = error
        self._sent.set()


@asynccontextmanager
async def drain_at(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> AsyncIterator[Drain]:
    """Provide a notice sent on ``shutdown``: immediately if the run is complete, otherwise after a grace period."""
    drain = Drain()
    task = asyncio.create_task(_send_at_shutdown(drain, shutdown, complete), name="drain")
    try:
        yield drain
    finally:
        await cancel_and_wait(task)


async def _send_at_shutdown(drain: Drain, shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> None:
    await shutdown.wait()
    deadline = time.monotonic() + _ANSWER_SECONDS
    is_complete = False
    try:
        async with asyncio.timeout(_POLL_SECONDS):
            is_complete = await complete()
    except (TimeoutError, StoreError):
        pass  # Redis may already be shut down
    if is_complete:
        drain.send(gone("the run has ended: it needs no more rollouts", "run_complete"))
        return
    await asyncio.sleep(deadline - time.monotonic())
    drain.send(_stopping())


def _stopping() -> OpenAiError:
    return unavailable(
        "the agents service is shutting down; retry: the session continues after its restart", "shutting_down"
    )
