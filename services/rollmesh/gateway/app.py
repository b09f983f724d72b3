"""The FastAPI application of the gateway: REST API, page, and a pointer to the OpenAI-compatible API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.responses import FileResponse, Response
from fastapi.staticfiles import StaticFiles

from rollmesh.gateway.backend_protocols import Actions, Reads
from rollmesh.gateway.models import SnapshotEvent, TickEvent
from rollmesh.gateway.rest_routes import PREFIX, action_router, read_router
from rollmesh.runtime.api_app import api_app
from rollmesh.runtime.api_errors import NotFound
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.token_check import Check

PAGE = Path(__file__).parent / "page"


def create_app(
    reads: Reads,
    actions: Actions,
    *,
    read_check: Check,
    action_check: Check,
    openai_url: Callable[[], str | None],
    metrics: RequestMetrics,
    hosts: Sequence[str] = (),
    most_bytes: int = 8 << 20,
    page: Path = PAGE,
) -> FastAPI:
    """Build the application; ``openai_url`` returns the address of the OpenAI-compatible API if it is known."""
    app = api_app(
        "gateway",
        "Live state of a run, and operator actions.",
        PREFIX,
        [read_router(reads, read_check), action_router(actions, action_check), _openai_pointer(openai_url, read_check)],
        metrics,
        hosts=hosts,
        most_bytes=most_bytes,
        further_models=(SnapshotEvent, TickEvent),
    )

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        # Revalidate on every load: an old page may not match the API.
        return FileResponse(page / "index.html", headers={"Cache-Control": "no-cache"})

    app.mount("/page", _Static(directory=page), name="page")
    return app


def _openai_pointer(openai_url: Callable[[], str | None], check: Check) -> APIRouter:
    """Return a route that refuses every call of ``/v1`` and names the service that answers it."""
    api = APIRouter(prefix="/v1", dependencies=[Depends(check)], include_in_schema=False)

    @api.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"])
    def moved(path: str) -> None:
        url = openai_url()
        hint = f"use {url}" if url else "call the agents service of the run; agents.enabled=true starts one"
        raise NotFound(f"/v1/{path}: the gateway does not serve the OpenAI-compatible API", hint=hint)

    return api


class _Static(StaticFiles):
    """Files of the page, revalidated on every request (a 304 response costs little for a page of this size)."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response
