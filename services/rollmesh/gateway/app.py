"""The FastAPI application of the gateway: REST API, page, and a pointer to the OpenAI-compatible API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from rollmesh.checkpoints.sealing import api_token
from rollmesh.config import RunConfig
from rollmesh.gateway.action_routes import ActionRoutes
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.live_reads import LiveReads
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.models.live import SnapshotEvent, TickEvent
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.gateway.read_routes import PREFIX
from rollmesh.runtime.api_app import Check, api_app, no_check, token_check
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.http_server import accepted_hosts
from rollmesh.runtime.request_guard import NotFound, RequestMetrics
from rollmesh.store import TrajectoryStore

EVENTS = (SnapshotEvent, TickEvent, EndEvent)
"""Models of the event stream, for the OpenAPI document."""
PAGE = Path(__file__).parent / "page"


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
    app = api_app(
        "gateway",
        "Live state of a run, and operator actions.",
        PREFIX,
        [
            LiveReads(config, store, poller).router(read_check, check),
            ActionRoutes(config, store, metrics).router(check),
            _openai_pointer(config, read_check),
        ],
        requests,
        hosts=accepted_hosts(config, host),
        most_bytes=config.gateway.max_request_bytes,
        further_models=EVENTS,
    )

    mount_page(app)
    return app


def _openai_pointer(config: RunConfig, check: Check) -> APIRouter:
    """Return a route that refuses every call of ``/v1`` and names the service that answers it."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(check)], include_in_schema=False)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    def moved(path: str) -> None:
        url = next((each.url for each in read_endpoints(Path(config.folder), "agents")), None)
        hint = f"use {url}" if url else "call the agents service of the run; agents.enabled=true starts one"
        raise NotFound(f"/v1/{path}: the gateway does not serve the OpenAI-compatible API", hint=hint)

    return api


def mount_page(app: FastAPI) -> None:
    """Serve the page at ``/`` and its files under ``/page``."""

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        # Revalidate on every load: an old page may not match the API.
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", _Static(directory=PAGE), name="page")


class _Static(StaticFiles):
    """Files of the page, revalidated on every request (a 304 response costs little for a page of this size)."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response
