"""Reads behind the page of a run that has ended: everything from its run folder, read once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError
from rollmesh.gateway.events import EventHub
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.models.items import (
    DeadLetterList,
    GeneratorList,
    PolicyList,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, SnapshotEvent, Timeline
from rollmesh.gateway.run_reads import RunReads
from rollmesh.gateway.trajectory_views import archived_detail
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.view.recorded_curves import curves_beside, recorded_curves, recorded_policies
from rollmesh.report.view.recorded_overview import no_rollouts, recorded_overview
from rollmesh.runtime.request_guard import NotFound


class RecordedReads(RunReads):
    """Reads of a run folder: no rollout is in progress, and the queue is not read."""

    def __init__(
        self, run: RecordedRun, config: RunConfig, metrics: GatewayMetrics, beside: Sequence[RecordedRun] = ()
    ) -> None:
        """Read the records of the run, and the curves of other runs beside it; blocks."""
        super().__init__(config, run.path)
        self._curves = recorded_curves(run)
        self._beside = [recorded_curves(other) for other in beside]
        self._policies = recorded_policies(run)
        # A link cannot carry the token in a header: the report is not served where reads need it.
        self.has_report = not config.gateway.token_for_reads and (run.path / REPORT_FILE).exists()
        self._overview = recorded_overview(run, self._curves, report=self.has_report)
        self.hub = EventHub(self._snapshot, config.gateway.most_event_clients, metrics)

    def overview(self) -> Overview:
        return self._overview

    def timeline(self) -> Timeline:
        return no_rollouts(self._overview)

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        return self.hub.follow(after)

    def _snapshot(self) -> SnapshotEvent:
        return SnapshotEvent(overview=self._overview, timeline=self.timeline())

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        return curves_beside(self._curves, self._beside, names, points)

    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        return TrajectoryPage(items=[], next_cursor=None)

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
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

    async def policies(self, limit: int) -> PolicyList:
        return PolicyList(policies=self._policies[:limit], total=len(self._policies))

    async def generators(self) -> GeneratorList:
        return GeneratorList(generators=[])

    async def dead_letters(self, limit: int) -> DeadLetterList:
        return DeadLetterList(dead_letters=[], total=0)
