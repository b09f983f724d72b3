"""Parts that every service process has: metrics, health, port security, the admin port and the endpoint files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.runtime.addresses import advertised, bind_host
from rollmesh.runtime.admin_http import admin_server
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity


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
        names = {"service": self.service, "run": self.config.name, "pod": self.config.network.instance or ""}
        folder = Path(self.config.folder)
        self.stack.enter_context(
            published_endpoint(
                folder, **names, index=self.index, grpc=grpc, admin=self.admin, url=url, starting=starting
            )
        )


@asynccontextmanager
async def service_host(config: RunConfig, service: str, index: int) -> AsyncIterator[ServiceHost]:
    """Open the admin port of a service process; ConfigError for an invalid address or certificate."""
    metrics, health, security = Metrics(service), Health(), PortSecurity.from_config(config.security)
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
