"""Common state of the parts of rank 0."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.scheduling import Schedule
from rollmesh.trainer.service.ranks import RankCoordinator, TorchExecutor
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.trainer_waits import Retry
from rollmesh.trainer.service.training_session import TrainingSession

T = TypeVar("T")


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
