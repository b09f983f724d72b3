"""Reads behind the page of a run that has ended: everything from its run folder, read once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from rollmesh.config import RunConfig
from rollmesh.config.load import run_file_text
from rollmesh.errors import CheckpointError
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.batch_lists import BatchLists
from rollmesh.gateway.events import EventHub
from rollmesh.gateway.gateway_metrics import GatewayMetrics
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
from rollmesh.gateway.models.live import Overview, SeriesAnswer, SnapshotEvent, Timeline
from rollmesh.gateway.models.process_views import LogTail, ProcessList
from rollmesh.gateway.run_facts import run_facts
from rollmesh.gateway.run_processes import RunProcesses
from rollmesh.gateway.trajectory_details import archived_detail, open_tokenizer
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.view.recorded_curves import curves_beside, recorded_curves, recorded_policies
from rollmesh.report.view.recorded_overview import no_rollouts, recorded_overview
from rollmesh.runtime.request_guard import NotFound


class RecordedReads:
    """``RunReads`` of a run folder. Batch files are read when they are asked for."""

    def __init__(
        self, run: RecordedRun, config: RunConfig, metrics: GatewayMetrics, beside: Sequence[RecordedRun] = ()
    ) -> None:
        """Read the records of the run, and the curves of other runs beside it; blocks."""
        self._config = config
        tokenizer, self._archive = open_tokenizer(config), Archive(config)
        self._pieces = None if tokenizer is None else tokenizer.pieces
        self._lists = BatchLists(self._archive, self._pieces)
        self._processes = RunProcesses(run.path)
        self._settings = RunSettings(yaml=run_file_text(config))
        self._curves = recorded_curves(run)
        self._beside = [recorded_curves(other) for other in beside]
        self._policies = recorded_policies(run)
        # A link cannot carry the token in a header: the report is not served where reads need it.
        self.has_report = not config.gateway.token_for_reads and (run.path / REPORT_FILE).exists()
        self._overview = recorded_overview(run, self._curves, report=self.has_report)
        self.hub = EventHub(self._snapshot, config.gateway.most_event_clients, metrics)

    def about(self) -> About:
        """Return the fixed facts of the run."""
        return run_facts(self._config, text=self._pieces is not None)

    def settings(self) -> RunSettings:
        """Return the resolved run file."""
        return self._settings

    def overview(self) -> Overview:
        """Return the state at the end of the run."""
        return self._overview

    def timeline(self) -> Timeline:
        """Return no rollout: none is in progress."""
        return no_rollouts(self._overview)

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream one snapshot, then signs of life."""
        return self.hub.follow(after)

    def _snapshot(self) -> SnapshotEvent:
        return SnapshotEvent(overview=self._overview, timeline=self.timeline())

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return curves."""
        return curves_beside(self._curves, self._beside, names, points)

    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        """Return an empty page: the queue is not read."""
        return TrajectoryPage(items=[], next_cursor=None)

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return a trajectory of a batch file."""
        try:
            found = await self._archive.find(trajectory_id.rpartition(".")[0], None)
        except CheckpointError as error:
            raise NotFound(f"{trajectory_id}: its batch file cannot be read: {error}") from error
        if found is not None:
            step, shown = self._overview.train_step, (first_token, token_limit, self._pieces)
            detail = await asyncio.to_thread(archived_detail, found, trajectory_id, step, *shown)
            if detail is not None:
                return detail
        raise NotFound(
            f"no batch file has the trajectory {trajectory_id}",
            field="trajectory_id",
            hint="ids are <group>.<member>, as listed by /api/v1/batches; untrained ones are in the queue only",
        )

    async def batches(self) -> BatchList:
        """Return the train steps that have a batch file."""
        return await self._lists.steps()

    async def batch(self, train_step: int, order: BatchOrder, descending: bool, first: int, limit: int) -> BatchPage:
        """Return some trajectories of one batch file."""
        return await self._lists.page(train_step, order, descending, first, limit)

    async def policies(self, limit: int) -> PolicyList:
        """Return the published policies, newest first."""
        return PolicyList(policies=self._policies[:limit], total=len(self._policies))

    async def generators(self) -> GeneratorList:
        """Return no generator."""
        return GeneratorList(generators=[])

    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Return no dead letter: the queue is not read."""
        return DeadLetterList(dead_letters=[], total=0)

    async def processes(self) -> ProcessList:
        """Return the processes of the run on this machine."""
        return await self._processes.list()

    async def log(self, name: str, lines: int) -> LogTail:
        """Return the last lines of the log of a process."""
        return await self._processes.log(name, lines)
