"""The gateway process: page and REST API on one port, and a separate admin port."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from rollmesh.checkpoints.sealing import api_token
from rollmesh.config import RunConfig
from rollmesh.gateway.action_routes import ActionRoutes
from rollmesh.gateway.events import GatewayMetrics
from rollmesh.gateway.live_reads import LiveReads
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.models.live import SnapshotEvent, TickEvent
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.gateway.read_routes import PREFIX
from rollmesh.runtime.addresses import bind_host
from rollmesh.runtime.api_app import Check, api_app, no_check, token_check
from rollmesh.runtime.endpoints import AdminClient, ServiceStates, read_endpoints
from rollmesh.runtime.http_server import accepted_hosts, public_listener, public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.locks import started_by_launcher
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import NotFound, RequestMetrics
from rollmesh.runtime.service_host import service_host
from rollmesh.store import TrajectoryStore
from rollmesh.store.trajectory_store import open_service_store

PAGE = Path(__file__).parent / "page"
_RETRY_SECONDS = 3.0
"""Time until a request reports that Redis is unreachable."""


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Serve the page and the API until ``shutdown``.

    Raises ConfigError if a port is taken or the token cannot be stored, and StoreUnavailable if Redis does not answer
    at startup.
    """
    address = config.gateway.host or bind_host(config)
    async with service_host(config, "gateway", index) as host:
        host.publish(starting=True)
        metrics = GatewayMetrics(host.metrics)
        store = await open_service_store(host, shutdown, _RETRY_SECONDS)
        client = await host.stack.enter_async_context(AdminClient(host.security))
        states = ServiceStates(Path(config.folder), client)
        poller = MeshPoller(store, config, metrics, host.health, states)
        app = build_app(config, store, poller, metrics, RequestMetrics(host.metrics, "page"), address)
        url = await host.stack.enter_async_context(
            public_server(app, *public_listener(config, address, config.gateway.port, "gateway.port"), host.security)
        )
        host.publish(url=url)
        get_logger("gateway").info("serving", url=url)
        await poller.run(shutdown, launched=started_by_launcher(Path(config.folder)))


def build_app(
    config: RunConfig,
    store: TrajectoryStore,
    poller: MeshPoller,
    metrics: GatewayMetrics,
    requests: RequestMetrics,
    host: str,
) -> FastAPI:
    """Build the application of one run.

    The token guards actions and the run file, and all reads if gateway.token_for_reads is set.
    """
    check = token_check(api_token(config))
    read_check = check if config.gateway.token_for_reads else no_check
    routers = [
        LiveReads(config, store, poller).router(read_check, check),
        ActionRoutes(config, store, metrics).router(check),
        _openai_pointer(config, read_check),
    ]
    summary, limit = "Live state of a run, and operator actions.", config.gateway.max_request_bytes
    return page_app("gateway", summary, routers, requests, accepted_hosts(config, host), limit)


def page_app(
    service: str,
    summary: str,
    routers: Sequence[APIRouter],
    requests: RequestMetrics,
    hosts: Sequence[str],
    most_bytes: int = 8 << 20,
) -> FastAPI:
    """Build an application with these routes, the page at ``/`` and its files under ``/page``."""
    events = (SnapshotEvent, TickEvent, EndEvent)
    app = api_app(
        service, summary, PREFIX, routers, requests, hosts=hosts, most_bytes=most_bytes, further_models=events
    )

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        # Revalidate on every load: an old page may not match the API.
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", _Static(directory=PAGE), name="page")
    return app


class _Static(StaticFiles):
    """Files of the page, revalidated on every request (a 304 response costs little for a page of this size)."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def _openai_pointer(config: RunConfig, check: Check) -> APIRouter:
    """Return a route that refuses every call of ``/v1`` and names the service that answers it."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(check)], include_in_schema=False)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    def moved(path: str) -> None:
        url = next((each.url for each in read_endpoints(Path(config.folder), "agents")), None)
        hint = f"use {url}" if url else "call the agents service of the run; agents.enabled=true starts one"
        raise NotFound(f"/v1/{path}: the gateway does not serve the OpenAI-compatible API", hint=hint)

    return api
