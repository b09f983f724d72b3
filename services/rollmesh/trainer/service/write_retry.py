"""Retry of writes, with exponential back-off, while the disk is full or the object store is unreachable."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.training_session import Stopped

T = TypeVar("T")

_TRANSIENT = {Reason.DISK_FULL: "disk full", Reason.UNREACHABLE: "object store unreachable"}
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Retry:
    """Retry of writes that fail on a full disk or an unreachable store. Generators keep their policy meanwhile."""

    def __init__(
        self,
        metrics: TrainerMetrics,
        health: Health,
        shutdown: Shutdown,
        first_pause_seconds: float = _FIRST_PAUSE_SECONDS,
    ) -> None:
        self._metrics = metrics
        self._health = health
        self._shutdown = shutdown
        self._first_pause_seconds = first_pause_seconds
        self._log = get_logger("write_retry")

    async def run(self, operation: str, write: Callable[[], Awaitable[T]]) -> T:
        """Return the result of ``write``, retried on disk_full and unreachable.

        Raises Stopped at shutdown, and every other CheckpointError of ``write``.
        """
        pause = self._first_pause_seconds
        while True:
            try:
                result = await write()
            except CheckpointError as error:
                self._metrics.failures.labels(reason=str(error.reason)).inc()
                problem = _TRANSIENT.get(Reason(error.reason))
                if problem is None:
                    raise
                self._log.error(str(error.reason), what=operation, retry_seconds=pause, message=str(error))
                self._health.set_ready(False, f"{problem}: {operation}")
            else:
                self._health.set_ready(True)
                return result
            if await wait_or_shutdown(self._shutdown, pause):
                raise Stopped(f"{operation}: shut down while waiting: {problem}")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
