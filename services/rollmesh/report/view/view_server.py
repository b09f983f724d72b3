"""Server of the page of a run that has ended, on a loopback address."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from rollmesh.checkpoints.sealing import known_token, link_with_token
from rollmesh.config import RunConfig
from rollmesh.gateway.app import EVENTS, mount_page
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.gateway.read_routes import PREFIX
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.view.recorded_reads import RecordedReads
from rollmesh.runtime.api_app import api_app, no_check, token_check
from rollmesh.runtime.http_server import accepted_hosts, public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.request_guard import RequestMetrics

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
    async with public_server(app, config, _HOST, port, "--port", PortSecurity()) as url:
        ready(link_with_token(url, token))
        await shutdown.wait()
        reads.hub.close(EndEvent(time=time.time(), by="signal"))


def _app(run: RecordedRun, config: RunConfig, reads: RecordedReads, requests: RequestMetrics, token: str) -> FastAPI:
    check = token_check(token)
    app = api_app(
        "view",
        "A run that has ended, read from its run folder.",
        PREFIX,
        [reads.router(check if config.gateway.token_for_reads else no_check, check)],
        requests,
        hosts=accepted_hosts(config, _HOST),
        further_models=EVENTS,
    )

    if reads.has_report:

        @app.get(f"/{REPORT_FILE}", include_in_schema=False)
        async def report() -> Response:
            return FileResponse(run.path / REPORT_FILE, headers={"Content-Security-Policy": _REPORT_POLICY})

    mount_page(app)
    return app
