"""Waits of the trainer: writes that are retried, and the report in the queue of what it waits for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from rollmesh.checkpoints.durable import full_disk
from rollmesh.errors import CheckpointError, Reason, StoreUnavailable
from rollmesh.runtime.health import Health, Waits
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.store import TrajectoryStore
from rollmesh.trainer.service.trainer_metrics import IO_ERROR, TrainerMetrics
from rollmesh.trainer.service.training_session import LOOP_NAME, Stopped

T = TypeVar("T")

_TRANSIENT = {Reason.DISK_FULL: "disk full", Reason.UNREACHABLE: "object store unreachable"}
_BACKOFF = Backoff(first_seconds=1.0, longest_seconds=60.0)
_SCRAPE_SECONDS = 45.0
"""Delay before an error of the operating system ends the process: its count must be scraped before, and Prometheus may
scrape every 30 seconds."""
_OF_A_NEWER_TRAINER = (FileNotFoundError, FileExistsError)
"""Errors of a trainer that was superseded: the newer one deletes its unfinished files, or writes the same ones."""


class Retry:
    """Retry of writes that fail on a full disk or an unreachable store. Generators keep their policy meanwhile."""

    def __init__(
        self,
        metrics: TrainerMetrics,
        health: Health,
        shutdown: Shutdown,
        backoff: Backoff = _BACKOFF,
        scrape_seconds: float = _SCRAPE_SECONDS,
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._shutdown = shutdown
        self._backoff = backoff
        self._scrape_seconds = scrape_seconds
        self._log = get_logger("write_retry")

    async def run(self, operation: str, write: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``write``, retried on disk_full and unreachable.

        Raises Stopped at shutdown, every other CheckpointError of ``write``, and its OSError after a scrape.
        """

        async def attempt() -> T:
            try:
                return await write()
            except _OF_A_NEWER_TRAINER:
                raise
            except OSError as error:
                if full_disk(error):
                    raise CheckpointError(f"{operation}: {error}", reason=Reason.DISK_FULL) from error
                await self._let_scrape(operation, error)
                raise

        async def wait(error: CheckpointError, pause: float) -> None:
            self._health.beat(LOOP_NAME)
            self._metrics.failures.labels(reason=str(error.reason)).inc()
            problem = _TRANSIENT.get(Reason(error.reason))
            if problem is None:
                self._health.waits.end(operation)
                raise error
            self._log.error(str(error.reason), what=operation, retry_seconds=pause, message=str(error))
            self._health.waits.begin(operation, f"{problem}: {operation}: {error}", blocks=True)
            if await wait_or_shutdown(self._shutdown, pause):
                raise Stopped(f"{operation}: shut down while waiting: {problem}")

        result = await retry(attempt, CheckpointError, self._backoff, wait)
        self._health.waits.end(operation)
        return result

    async def _let_scrape(self, operation: str, error: OSError) -> None:
        """Count an error that ends the process, and wait until Prometheus has read the count."""
        self._metrics.failures.labels(reason=IO_ERROR).inc()
        self._log.error(IO_ERROR, what=operation, ends_in_seconds=self._scrape_seconds, message=str(error))
        self._health.waits.begin(operation, f"{error}: {operation}", blocks=True)
        await wait_or_shutdown(self._shutdown, self._scrape_seconds)


_POLL_SECONDS = 1.0


@asynccontextmanager
async def shared_waits(store: TrajectoryStore, waits: Waits) -> AsyncIterator[None]:
    """Write every change of ``waits`` to the queue within the block."""
    sharing = asyncio.create_task(_share(store, waits), name="share-waits")
    try:
        yield
    finally:
        await cancel_and_wait(sharing)


async def _share(store: TrajectoryStore, waits: Waits) -> None:
    shown: str | None = None  # an earlier trainer may have left a text
    while True:
        if (text := waits.text()) != shown:
            with contextlib.suppress(StoreUnavailable):
                await store.training.show_waits(text)
                shown = text
        await asyncio.sleep(_POLL_SECONDS)
