"""Writing to a disk that may be full, or a store that may be away: again, later and later, until it is time to stop."""

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

_PASSING = {Reason.DISK_FULL: "disk full", Reason.UNREACHABLE: "object store unreachable"}
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Retry:
    """Repeats a write that failed for want of room or of the store; generators serve what they have meanwhile."""

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
        self._log = get_logger("patience")

    async def with_room(self, what: str, write: Callable[[], Awaitable[T]]) -> T:
        """The result of ``write``; raises Stopped at shutdown and any CheckpointError but disk_full and unreachable."""
        pause = self._first_pause_seconds
        while True:
            try:
                result = await write()
            except CheckpointError as error:
                self._metrics.failures.labels(reason=str(error.reason)).inc()
                trouble = _PASSING.get(Reason(error.reason))
                if trouble is None:
                    raise
                self._log.error(str(error.reason), what=what, retry_seconds=pause, message=str(error))
                self._health.set_ready(False, f"{trouble}: {what}")
            else:
                self._health.set_ready(True)
                return result
            if await wait_or_shutdown(self._shutdown, pause):
                raise Stopped(f"{what}: asked to stop while waiting: {trouble}")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
