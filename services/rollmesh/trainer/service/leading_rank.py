"""The shared state of the parts of rank 0, writes that are retried, and the report in the queue of a wait."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.durable import full_disk
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, Reason, StoreUnavailable
from rollmesh.runtime.health import Health, Waits
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.trainer.service.ranks import RankCoordinator, TorchExecutor
from rollmesh.trainer.service.trainer_metrics import IO_ERROR, TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import LOOP_NAME, Stopped, TrainingSession

T = TypeVar("T")

_TRANSIENT = {Reason.DISK_FULL: "disk full", Reason.UNREACHABLE: "object store unreachable"}
_BACKOFF = Backoff(first_seconds=1.0, longest_seconds=60.0)
_SCRAPE_SECONDS = 45.0
"""Delay before an error of the operating system ends the process: its count must be scraped before, and Prometheus may
scrape every 30 seconds."""
_OF_A_NEWER_TRAINER = (FileNotFoundError, FileExistsError)
"""Errors of a trainer that was superseded: the newer one deletes its unfinished files, or writes the same ones."""


@dataclass(eq=False)
class Retry:
    """Retry of writes that fail on a full disk or an unreachable store. Generators keep their policy meanwhile."""

    _metrics: TrainerMetrics
    _health: Health
    _shutdown: Shutdown
    backoff: Backoff = _BACKOFF
    scrape_seconds: float = _SCRAPE_SECONDS
    _log: Logger = field(default_factory=lambda: get_logger("write_retry"), init=False)

    async def run(self, operation: str, write: Callable[[], Awaitable[T]]) -> T:
        """Retry ``write`` on disk_full and unreachable. Raises Stopped at shutdown, and its other errors."""

        async def attempt() -> T:
            try:
                return await write()
            except _OF_A_NEWER_TRAINER:
                raise
            except OSError as error:
                if full_disk(error):
                    raise CheckpointError(f"{operation}: {error}", reason=Reason.DISK_FULL) from error
                # It ends the process, once Prometheus has read its count.
                self._metrics.failures.labels(reason=IO_ERROR).inc()
                self._log.error(IO_ERROR, what=operation, ends_in_seconds=self.scrape_seconds, message=str(error))
                self._health.waits.begin(operation, f"{error}: {operation}", blocks=True)
                await wait_or_shutdown(self._shutdown, self.scrape_seconds)
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

        result = await retry(attempt, CheckpointError, self.backoff, wait)
        self._health.waits.end(operation)
        return result


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeadingRank:
    """The run file, the ranks, the session and the progress of a trainer."""

    config: RunConfig
    ranks: RankCoordinator
    session: TrainingSession
    checkpoints: CheckpointStore
    retry: Retry
    metrics: TrainerMetrics
    progress: Progress
    executor: TorchExecutor
    health: Health
    shutdown: Shutdown

    @property
    def schedule(self) -> Schedule:
        """Schedule of the run file."""
        return Schedule.from_config(self.config)

    async def in_torch(self, call: Callable[[], T]) -> T:
        """Call in the thread of all torch calls."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, call)

    async def retried(self, operation: str, call: Callable[[], T]) -> T:
        """Call in another thread, again while the disk is full or the object store is unreachable (``Retry``)."""
        return await self.retry.run(operation, partial(asyncio.to_thread, call))


_POLL_SECONDS = 1.0


@asynccontextmanager
async def shared_waits(store: TrajectoryStore, waits: Waits) -> AsyncIterator[None]:
    """Write every change of ``waits`` to the queue within the block."""

    async def share() -> None:
        shown: str | None = None  # an earlier trainer may have left a text
        while True:
            if (text := waits.text()) != shown:
                with contextlib.suppress(StoreUnavailable):
                    await store.training.show_waits(text)
                    shown = text
            await asyncio.sleep(_POLL_SECONDS)

    sharing = asyncio.create_task(share(), name="share-waits")
    try:
        yield
    finally:
        await cancel_and_wait(sharing)
