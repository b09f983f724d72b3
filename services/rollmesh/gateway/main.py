"""The gateway process: page and REST API on one port, and a separate admin port."""

from __future__ import annotations

from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.gateway.app import build_app
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.runtime.addresses import bind_host
from rollmesh.runtime.endpoints import AdminClient, ServiceStates
from rollmesh.runtime.http_server import public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.locks import started_by_launcher
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.service_host import service_host
from rollmesh.store.trajectory_store import open_service_store

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
            public_server(app, config, address, config.gateway.port, "gateway.port", host.security)
        )
        host.publish(url=url)
        get_logger("gateway").info("serving", url=url)
        await poller.run(shutdown, launched=started_by_launcher(Path(config.folder)))
