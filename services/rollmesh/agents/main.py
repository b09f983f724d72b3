"""The agents process: the OpenAI-compatible API on one port, and a separate admin port."""

from __future__ import annotations

from fastapi import FastAPI

from rollmesh.agents.agents_service import OpenAiService, openai_service
from rollmesh.agents.openai_routes import PREFIX, openai_router
from rollmesh.checkpoints.api_token import api_token
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.runtime.addresses import bind_host
from rollmesh.runtime.api_app import api_app, token_check
from rollmesh.runtime.http_server import accepted_hosts, public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.service_host import service_host
from rollmesh.scheduling import run_limits
from rollmesh.store.trajectory_store import open_service_store
from rollmesh.text import Tokenizer

_RETRY_SECONDS = 5.0
"""Time until a request reports that Redis is unreachable."""


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Serve the API until ``shutdown``; the trajectories of sessions are saved and released before it returns.

    Raises ConfigError if a port is taken or the token cannot be stored, DataError if the tokenizer cannot be read, and
    StoreUnavailable if Redis does not answer at startup.
    """
    address = config.agents.host or config.gateway.host or bind_host(config)
    async with service_host(config, "agents", index) as host:
        host.publish(starting=True)
        tokenizer = Tokenizer(resolve_model(config.model.path))
        limits = run_limits(config) if config.rollout.program == "agent" else None
        store = await open_service_store(host, shutdown, _RETRY_SECONDS, limits)
        service = await host.stack.enter_async_context(
            openai_service(config, index, store, tokenizer, host.metrics, host.health, shutdown, host.security)
        )
        app = build_app(service, api_token(config), RequestMetrics(host.metrics), address)
        root = await host.stack.enter_async_context(
            public_server(app, config, address, config.agents.port, "agents.port", host.security)
        )
        url = f"{root.rstrip('/')}{PREFIX}"
        host.publish(url=url)
        get_logger("agents").info("serving", url=url)
        host.health.set_ready(True)
        await shutdown.wait()


def build_app(service: OpenAiService, token: str, metrics: RequestMetrics, host: str) -> FastAPI:
    """Build the application of one run; every call requires ``token``."""
    return api_app(
        "agents",
        "OpenAI-compatible API of a run, and sessions of outside agents.",
        PREFIX,
        [openai_router(service, token_check(token))],
        metrics,
        hosts=accepted_hosts(service.config, host),
        most_bytes=service.config.gateway.max_request_bytes,
        error_schema="OpenAiErrorBody",
    )
