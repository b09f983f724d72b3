"""Admin port of a service: ``/metrics``, ``/healthz``, ``/readyz``.

With TLS or a token in the run file, every path except the two probes requires a client certificate of the mesh's
authority or the bearer token. The probes stay open: a kubelet has neither, and they report only the service's health.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.middleware.base import RequestResponseEndpoint

from rollmesh.errors import ConfigError
from rollmesh.runtime.head_requests import HeadRequests
from rollmesh.runtime.health import Health
from rollmesh.runtime.http_protocol import HEAD_SECONDS, VERIFIED, HttpProtocol, use_tls
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.runtime.tls import TlsFiles

PROBES = frozenset({"/healthz", "/readyz"})
_IDLE_CONNECTION_SECONDS = 75
"""Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s, nginx 60 s). The client must close first;
otherwise a request may arrive on a connection that the server is closing."""


def admin_app(metrics: Metrics, health: Health, security: PortSecurity = OPEN) -> FastAPI:
    """Create the FastAPI application of the admin port."""
    app = FastAPI(title=f"rollmesh {metrics.component}", docs_url=None, redoc_url=None, openapi_url=None)

    @app.middleware("http")
    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        if request.url.path not in PROBES:
            authorization = request.headers.get("authorization", "")
            refusal = security.http_refusal(authorization, verified_certificate=VERIFIED in request.scope)
            if refusal:
                return JSONResponse({"detail": refusal}, 401, {"WWW-Authenticate": "Bearer"})
        return await answer(request)

    @app.get("/metrics")
    async def exposition() -> Response:
        return Response(metrics.exposition(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/healthz")
    async def liveness() -> JSONResponse:
        stalled = health.stalled()
        return JSONResponse({"live": not stalled, "stalled": stalled}, status_code=503 if stalled else 200)

    @app.get("/readyz")
    async def readiness() -> JSONResponse:
        ready, reason = health.ready()
        state = {"ready": ready, "reason": reason, "waits": health.waits.text()}
        return JSONResponse(state, status_code=200 if ready else 503)

    return app


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to ``run_service``."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


def listen(host: str, port: int, field: str) -> socket.socket:
    """Open a listening socket; raises ConfigError, which names the config ``field``, when the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # As the gRPC ports do: "::" means every address of the machine, also those of IPv4.
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, {field}={port}: {error}") from error


@contextlib.asynccontextmanager
async def http_server(
    app: FastAPI,
    listener: socket.socket,
    security: PortSecurity = OPEN,
    *,
    grace_seconds: int | None = None,
    head_seconds: float = HEAD_SECONDS,
) -> AsyncIterator[int]:
    """Serve an application inside the running loop; yields the bound port.

    At shutdown, requests in progress have ``grace_seconds`` to finish; None sets no limit. A client has
    ``head_seconds`` for the request line and the headers of each request.
    """
    with contextlib.closing(listener):
        config = uvicorn.Config(
            HeadRequests(app),
            http=partial(HttpProtocol, head_seconds=head_seconds),  # type: ignore[arg-type]  # a factory is enough
            log_config=None,  # log_capture.py handles its warnings
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=grace_seconds,
        )
        use_tls(config, security)
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def admin_server(
    metrics: Metrics, health: Health, host: str, port: int = 0, security: PortSecurity = OPEN
) -> AsyncIterator[int]:
    """Serve the admin port inside the running loop; yields the bound port.

    Also registers the certificate metrics in ``metrics``, because every service opens an admin port.
    """
    metrics.registry.register(CertificateCollector(metrics.component, security.tls))
    app = admin_app(metrics, health, security)
    async with http_server(app, listen(host, port, "network.admin_port"), security) as bound:
        yield bound


class CertificateCollector(Collector):
    """Validity of the certificate in use, read at every scrape.

    A rotation is therefore visible without an update, and invalid files leave the old times. Without TLS the metrics
    have no series, because 0 would mean an expired certificate.
    """

    def __init__(self, component: str, tls: TlsFiles | None) -> None:
        self._prefix = f"rollmesh_{component}_certificate"
        self._tls = tls

    def collect(self) -> Iterator[Metric]:
        material = None if self._tls is None else self._tls.material
        for name, end, value in (
            ("start", "Start", None if material is None else material.valid_from),
            ("expiry", "End", None if material is None else material.valid_until),
        ):
            text = f"{end} of the validity of the certificate in use; no series without TLS."
            yield GaugeMetricFamily(f"{self._prefix}_{name}_timestamp_seconds", text, value=value)
