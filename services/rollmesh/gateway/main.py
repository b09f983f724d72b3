"""The gateway process: page and REST API on one port, and a separate admin port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from fastapi import FastAPI

from rollmesh.checkpoints.api_token import api_token
from rollmesh.config import RunConfig
from rollmesh.gateway.app import create_app
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.backend import RunActions, RunReads
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.viewer import Viewer, open_tokenizer
from rollmesh.runtime.addresses import advertised, bind_host
from rollmesh.runtime.admin_http import admin_server
from rollmesh.runtime.endpoints import published_endpoint, read_endpoints
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.public_http import accepted_hosts, public_server
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.token_check import no_check, token_check
from rollmesh.store import TrajectoryStore
from rollmesh.store.store_metrics import StoreCallMetrics

_RETRY_SECONDS = 5.0
"""Time until a request reports that Redis is unreachable."""


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Serve the page and the API until ``shutdown``.

    Raises ConfigError if a port is taken or the token cannot be stored, and StoreUnavailable if Redis does not answer
    at startup.
    """
    security = PortSecurity.from_config(config.security)
    registry, health = Metrics("gateway"), Health()
    metrics = GatewayMetrics(registry)
    host = config.gateway.host or bind_host(config)
    async with AsyncExitStack() as stack:
        admin_port = await stack.enter_async_context(
            admin_server(registry, health, bind_host(config), config.network.admin_port, security)
        )
        store = await stack.enter_async_context(
            await TrajectoryStore.connect(
                config.store, config.name, retry_seconds=_RETRY_SECONDS, observer=StoreCallMetrics(registry)
            )
        )
        poller = MeshPoller(store, config, metrics, health)
        app = build_app(config, store, poller, metrics, RequestMetrics(registry, "page"), host)
        url = await stack.enter_async_context(
            public_server(app, config, host, config.gateway.port, "gateway.port", security)
        )
        stack.enter_context(
            published_endpoint(
                Path(config.folder),
                service="gateway",
                index=index,
                grpc="",
                admin=advertised(config, admin_port),
                run=config.name,
                url=url,
            )
        )
        get_logger("gateway").info("serving", url=url)
        await poller.run(shutdown)
        health.set_ready(False, "shutting down")


def build_app(
    config: RunConfig,
    store: TrajectoryStore,
    poller: MeshPoller,
    metrics: GatewayMetrics,
    requests: RequestMetrics,
    host: str,
) -> FastAPI:
    """Build the application of one run; the token guards actions, and reads if gateway.token_for_reads is set."""
    tokenizer, check = open_tokenizer(config), token_check(api_token(config))
    return create_app(
        RunReads(config, store, poller, Viewer(store, Archive(config), tokenizer), text=tokenizer is not None),
        RunActions(config, store, metrics),
        read_check=check if config.gateway.token_for_reads else no_check,
        action_check=check,
        openai_url=lambda: next((each.url for each in read_endpoints(Path(config.folder), "agents")), None),
        metrics=requests,
        hosts=accepted_hosts(config, host),
        most_bytes=config.gateway.max_request_bytes,
    )
