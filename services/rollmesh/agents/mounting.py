"""Setup of the OpenAI-compatible API in a gateway process."""

from __future__ import annotations

from contextlib import AsyncExitStack

from fastapi import APIRouter, Depends

from rollmesh.agents.agents_service import openai_service
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.agents.openai_http import OpenAiRoute
from rollmesh.agents.openai_routes import openai_router
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.gateway.token_check import Check
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.store import TrajectoryStore
from rollmesh.text import Tokenizer


async def mount_openai(
    stack: AsyncExitStack,
    config: RunConfig,
    index: int,
    store: TrajectoryStore,
    tokenizer: Tokenizer | None,
    registry: Metrics,
    health: Health,
    shutdown: Shutdown,
    security: PortSecurity,
    check: Check,
) -> APIRouter:
    """Return the routes of ``/v1``; ``stack`` closes the service behind them.

    Without a tokenizer the routes answer with an error that names the missing files. Raises ConfigError if the run
    needs the routes (rollout.program=agent).
    """
    if tokenizer is not None:
        service = openai_service(config, index, store, tokenizer, registry, health, shutdown, security)
        return openai_router(await stack.enter_async_context(service), check)
    missing = (
        f"the tokenizer of model.path={config.model.path} cannot be read in the gateway; give it the model folder "
        "(tokenizer.json, tokenizer_config.json, config.json are enough)"
    )
    if config.rollout.program == "agent":
        raise ConfigError(f"rollout.program=agent: {missing}")
    return _absent(missing, check)


def _absent(missing: str, check: Check) -> APIRouter:
    api = APIRouter(prefix="/v1", dependencies=[Depends(check)], route_class=OpenAiRoute, include_in_schema=False)

    @api.api_route("/{path:path}", methods=["GET", "POST", "DELETE"])
    async def missing_tokenizer(path: str) -> None:
        raise OpenAiError(501, f"/v1/{path}: {missing}", kind="server_error", code="no_tokenizer")

    return api
