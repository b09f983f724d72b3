"""Reads behind the page of a run that has ended: everything from its run folder, read once."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.config import RunConfig
from rollmesh.gateway.curves import names_of
from rollmesh.gateway.events import EventHub
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.models.items import PolicyList, TrajectoryDetail
from rollmesh.gateway.models.live import Overview, SeriesAnswer, SnapshotEvent, Timeline
from rollmesh.gateway.read_routes import RunReads
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

    def _snapshot(self) -> SnapshotEvent:
        return SnapshotEvent(overview=self._overview, timeline=no_rollouts(self._overview))

    async def overview(self) -> Overview:
        return self._overview

    async def timeline(self) -> Timeline:
        return no_rollouts(self._overview)

    async def series(self, names: str = "", points: int = 300) -> SeriesAnswer:
        return curves_beside(self._curves, self._beside, names_of(names), points)

    async def trajectory(self, trajectory_id: str, first_token: int = 0, token_limit: int = 4096) -> TrajectoryDetail:
        step = self._overview.train_step
        if (found := await self._in_batches(trajectory_id, None, step, first_token, token_limit)) is not None:
            return found
        raise NotFound(
            f"no batch file has the trajectory {trajectory_id}",
            field="trajectory_id",
            hint="ids are <group>.<member>, as listed by /api/v1/batches; untrained ones are in the queue only",
        )

    async def policies(self, limit: int = 100) -> PolicyList:
        return PolicyList(policies=self._policies[:limit], total=len(self._policies))
