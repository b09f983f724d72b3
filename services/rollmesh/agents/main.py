"""The agents process: the OpenAI-compatible API on one port, and a separate admin port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from fastapi import FastAPI

from rollmesh.agents.agents_service import OpenAiService, openai_service
from rollmesh.agents.openai_routes import PREFIX, openai_router
from rollmesh.checkpoints.api_token import api_token
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.runtime.addresses import advertised, bind_host
from rollmesh.runtime.admin_http import admin_server
from rollmesh.runtime.api_app import api_app
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.public_http import accepted_hosts, public_server
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.token_check import token_check
from rollmesh.store import TrajectoryStore
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.text import Tokenizer

_RETRY_SECONDS = 5.0
"""Time until a request reports that Redis is unreachable."""


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Serve the API until ``shutdown``; the trajectories of sessions are saved and released before it returns.

    Raises ConfigError if a port is taken or the token cannot be stored, DataError if the tokenizer cannot be read, and
    StoreUnavailable if Redis does not answer at startup.
    """
    security = PortSecurity.from_config(config.security)
    registry, health = Metrics("agents"), Health()
    host = config.agents.host or config.gateway.host or bind_host(config)
    async with AsyncExitStack() as stack:
        admin_port = await stack.enter_async_context(
            admin_server(registry, health, bind_host(config), config.network.admin_port, security)
        )
        tokenizer = Tokenizer(resolve_model(config.model.path))
        store = await stack.enter_async_context(
            await TrajectoryStore.connect(
                config.store, config.name, retry_seconds=_RETRY_SECONDS, observer=StoreCallMetrics(registry)
            )
        )
        service = await stack.enter_async_context(
            openai_service(config, index, store, tokenizer, registry, health, shutdown, security)
        )
        app = build_app(service, api_token(config), RequestMetrics(registry), host)
        root = await stack.enter_async_context(
            public_server(app, config, host, config.agents.port, "agents.port", security)
        )
        url = f"{root.rstrip('/')}{PREFIX}"
        stack.enter_context(
            published_endpoint(
                Path(config.folder),
                service="agents",
                index=index,
                grpc="",
                admin=advertised(config, admin_port),
                run=config.name,
                url=url,
            )
        )
        get_logger("agents").info("serving", url=url)
        health.set_ready(True)
        await shutdown.wait()
        health.set_ready(False, "shutting down")


def build_app(service: OpenAiService, token: str, metrics: RequestMetrics, host: str) -> FastAPI:
    """Build the application of one run; every call requires ``token``."""
    return api_app(
        "agents",
        "OpenAI-compatible API of a run, and sessions of external agents.",
        PREFIX,
        [openai_router(service, token_check(token))],
        metrics,
        hosts=accepted_hosts(service.config, host),
        most_bytes=service.config.gateway.max_request_bytes,
        error_schema="OpenAiErrorBody",
    )
