"""Parts that every service process has: metrics, health, port security, admin port and endpoint files.

With TLS or a token in the run file, every path of the admin port except the two probes requires a client certificate of
the mesh's authority or the bearer token. The probes stay open: a kubelet has neither, and they report only the
service's health.
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, Metric
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from starlette.middleware.base import RequestResponseEndpoint

from rollmesh.config import RunConfig
from rollmesh.runtime.addresses import advertised, bind_host, host_port
from rollmesh.runtime.endpoints import Endpoint, published_endpoint
from rollmesh.runtime.grpc import HealthReporter
from rollmesh.runtime.health import Health
from rollmesh.runtime.http_server import VERIFIED, http_server, listen
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.runtime.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceHost:
    """One service process, whose admin port is open."""

    config: RunConfig
    service: str
    index: int
    metrics: Metrics
    health: Health
    security: PortSecurity
    stack: AsyncExitStack
    """Resources of the process, closed in reverse order at its end, before the admin port."""
    admin: str
    """Address host:port of the admin port."""

    def publish(self, *, grpc: str = "", url: str = "", starting: bool = False) -> None:
        """Write the endpoint files of the process, until its end; ``starting`` while only the admin port answers."""
        endpoint = Endpoint(
            service=self.service,
            index=self.index,
            grpc=grpc,
            admin=self.admin,
            url=url,
            pod=self.config.network.instance or "",
            starting=starting,
        )
        self.stack.enter_context(published_endpoint(Path(self.config.folder), endpoint, self.config.name))

    async def serve_grpc(self, server: grpc.aio.Server, name: str) -> None:
        """Start the server of the gRPC service ``name`` and publish its address; at the end, calls in progress end."""
        reporter = HealthReporter(server, name)
        port = self.security.bind(server, host_port(bind_host(self.config), self.config.network.grpc_port))
        await server.start()
        self.stack.push_async_callback(server.stop, self.config.generator.drain_timeout_seconds)
        # Clients must not find the service any more when it refuses calls: the endpoint is removed first.
        self.stack.push_async_callback(reporter.set_serving, False)
        self.publish(grpc=advertised(self.config, port))
        await reporter.set_serving(True)


@asynccontextmanager
async def service_host(
    config: RunConfig, service: str, index: int, component: str | None = None
) -> AsyncIterator[ServiceHost]:
    """Open the admin port of a service process; ConfigError for an invalid address or certificate.

    ``component`` is the part of its metrics' names, by default the service.
    """
    metrics, health, security = Metrics(component or service), Health(), PortSecurity.from_config(config.security)
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            admin_server(metrics, health, bind_host(config), config.network.admin_port, security)
        )
        yield ServiceHost(
            config=config,
            service=service,
            index=index,
            metrics=metrics,
            health=health,
            security=security,
            stack=stack,
            admin=advertised(config, port),
        )
        health.set_ready(False, "shutting down")


PROBES = frozenset({"/healthz", "/readyz"})


@asynccontextmanager
async def admin_server(
    metrics: Metrics, health: Health, host: str, port: int = 0, security: PortSecurity = OPEN
) -> AsyncIterator[int]:
    """Serve the admin port inside the running loop; yields the bound port.

    Also registers the certificate metrics in ``metrics``, because every service opens an admin port.
    """
    metrics.registry.register(CertificateCollector(metrics.component, security.tls))
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
