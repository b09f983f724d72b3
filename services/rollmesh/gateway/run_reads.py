"""Reads behind the REST API: of a live run (``LiveReads``) or of a run folder (``report.view``)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rollmesh.gateway.models.api_model import About
from rollmesh.gateway.models.batch_pages import BatchList, BatchOrder, BatchPage
from rollmesh.gateway.models.ending import RunSettings
from rollmesh.gateway.models.items import (
    DeadLetterList,
    GeneratorList,
    PolicyList,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.models.process_views import LogTail, ProcessList


class RunReads(Protocol):
    """Reads of one run; they raise ``ApiError`` and the errors of the store."""

    def about(self) -> About:
        """Return the fixed facts of the run."""

    def settings(self) -> RunSettings:
        """Return the resolved run file."""

    def overview(self) -> Overview:
        """Return the newest state."""

    def timeline(self) -> Timeline:
        """Return the rollouts in progress or recently ended."""

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream the events after an id."""

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return curves."""

    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        """Return one page of the queue."""

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return one trajectory."""

    async def batches(self) -> BatchList:
        """Return the train steps that have a batch file."""

    async def batch(self, train_step: int, order: BatchOrder, descending: bool, first: int, limit: int) -> BatchPage:
        """Return some trajectories of one batch file."""

    async def policies(self, limit: int) -> PolicyList:
        """Return announced policies, newest first."""

    async def generators(self) -> GeneratorList:
        """Return the live generators."""

    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Return failed trajectories, newest first."""

    async def processes(self) -> ProcessList:
        """Return the processes of the run on this machine."""

    async def log(self, name: str, lines: int) -> LogTail:
        """Return the last lines of the log of a process."""
