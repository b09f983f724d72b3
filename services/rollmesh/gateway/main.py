"""The gateway process: page and REST API on one port, and a separate admin port."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from fastapi import APIRouter, FastAPI

from rollmesh.agents.mounting import mount_openai
from rollmesh.config import RunConfig
from rollmesh.gateway.action_token import gateway_token
from rollmesh.gateway.app import create_app
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.backend import RunActions, RunReads
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.guard import LOOPBACK_NAMES
from rollmesh.gateway.listening import listen_with_timeout
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.token_check import Check, no_check, token_check
from rollmesh.gateway.viewer import Viewer, open_tokenizer
from rollmesh.runtime.addresses import WILDCARDS, advertised, bind_host, host_port
from rollmesh.runtime.admin_http import admin_server, http_server
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity, is_loopback
from rollmesh.store import TrajectoryStore
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.text import Tokenizer

_GRACE_SECONDS = 3
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
        tokenizer, check = open_tokenizer(config), token_check(gateway_token(config))
        openai = await mount_openai(stack, config, index, store, tokenizer, registry, health, shutdown, security, check)
        app = build_app(config, store, poller, metrics, host, tokenizer, check, [openai])
        listener = listen_with_timeout(host, config.gateway.port, "gateway.port")
        port = await stack.enter_async_context(http_server(app, listener, security, grace_seconds=_GRACE_SECONDS))
        url = f"{security.scheme}://{host_port(_reachable(config, host), port)}/"
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
    host: str,
    tokenizer: Tokenizer | None,
    check: Check,
    routers: Sequence[APIRouter],
) -> FastAPI:
    """Build the application of one run; ``check`` guards actions, and reads if gateway.token_for_reads is set."""
    section = config.gateway
    loopback = is_loopback(host_port(host, 1))
    return create_app(
        RunReads(config, store, poller, Viewer(store, Archive(config), tokenizer), text=tokenizer is not None),
        RunActions(config, store, metrics),
        read_check=check if section.token_for_reads else no_check,
        action_check=check,
        metrics=metrics,
        hosts=[*section.allowed_hosts, *LOOPBACK_NAMES] if section.allowed_hosts or loopback else [],
        most_bytes=section.max_request_bytes,
        routers=routers,
    )


def _reachable(config: RunConfig, host: str) -> str:
    """Return an address to connect to, also if the gateway is bound to all addresses."""
    if host not in WILDCARDS:
        return host
    return config.network.advertise_host or ("::1" if ":" in host else "127.0.0.1")
