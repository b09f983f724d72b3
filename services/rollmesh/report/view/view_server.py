"""Page of a run that has ended: everything from its run folder, read once, and served on a loopback address."""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from rollmesh.checkpoints.sealing import known_token, link_with_token
from rollmesh.config import RunConfig
from rollmesh.gateway.curves import names_of
from rollmesh.gateway.events import EventHub, GatewayMetrics
from rollmesh.gateway.main import page_app
from rollmesh.gateway.models.items import PolicyList, TrajectoryDetail
from rollmesh.gateway.models.live import Overview, SeriesAnswer, SnapshotEvent, Timeline
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.gateway.read_routes import RunReads
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.view.recorded_curves import curves_beside, recorded_curves, recorded_policies
from rollmesh.report.view.recorded_overview import no_rollouts, recorded_overview
from rollmesh.runtime.api_app import no_check, token_check
from rollmesh.runtime.http_server import accepted_hosts, public_listener, public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.request_guard import NotFound, RequestMetrics

_HOST = "127.0.0.1"
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline' data:; img-src data:; "
    "frame-ancestors 'none'"
)
"""Content policy of the report: one file with inline styles, scripts and data, which fetches nothing."""


async def serve_view(
    run: RecordedRun,
    config: RunConfig,
    port: int,
    shutdown: Shutdown,
    ready: Callable[[str], None],
    beside: Sequence[RecordedRun] = (),
) -> None:
    """Serve the page until ``shutdown``; ``ready`` receives the link to it. Raises ConfigError if the port is taken.

    The curves of ``beside`` are drawn with those of the run. The link carries the token of the run, or one of this
    process if the run's cannot be read from here.
    """
    metrics = Metrics("gateway")
    reads = await asyncio.to_thread(RecordedReads, run, config, GatewayMetrics(metrics), beside)
    token = known_token(config) or secrets.token_urlsafe(32)
    app = _app(run, config, reads, RequestMetrics(metrics, "page"), token)
    async with public_server(app, *public_listener(config, _HOST, port, "--port"), PortSecurity()) as url:
        ready(link_with_token(url, token))
        await shutdown.wait()
        reads.hub.close(EndEvent(time=time.time(), by="signal"))


def _app(run: RecordedRun, config: RunConfig, reads: "RecordedReads", requests: RequestMetrics, token: str) -> FastAPI:
    check = token_check(token)
    router = reads.router(check if config.gateway.token_for_reads else no_check, check)
    summary = "A run that has ended, read from its run folder."
    app = page_app("view", summary, [router], requests, accepted_hosts(config, _HOST))
    if reads.has_report:

        @app.get(f"/{REPORT_FILE}", include_in_schema=False)
        async def report() -> Response:
            return FileResponse(run.path / REPORT_FILE, headers={"Content-Security-Policy": _REPORT_POLICY})

    return app


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
