"""The agents process: the OpenAI-compatible API and the sessions of agents on one port, and a separate admin port.

GET     /v1/models                     the run, and the policy versions in service
POST    /v1/chat/completions           answer a conversation
POST    /v1/responses                  the same, in items of the Responses API
POST    /v1/completions                continue a text or token ids
POST    /inference/v1/generate         continue token ids, for clients that render messages themselves
POST    /v1/sessions                   open a session with a prompt (rollout.program=agent)
GET     /v1/sessions                   list the sessions in progress
GET     /v1/sessions/{id}              show a session: trajectories, drift, state
POST    /v1/sessions/{id}/reward       post the reward: the trajectories are finished and scored
DELETE  /v1/sessions/{id}              give up a session without a reward: its prompt returns to the queue

A call that names a session (``session_address``) is recorded in it.
"""

import asyncio
import gc
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response

from rollmesh.agents.agent_session import AgentSession, EndedSession
from rollmesh.agents.agents_service import OpenAiService, openai_service
from rollmesh.agents.answering import Answering
from rollmesh.agents.connections import is_answered_here, unless_disconnected
from rollmesh.agents.openai_errors import OpenAiError, OpenAiErrorBody, OpenAiRoute, busy, invalid
from rollmesh.agents.openai_requests import (
    ChatRequest,
    CompletionRequest,
    GenerateRequest,
    RewardRequest,
    SessionRequest,
)
from rollmesh.agents.responses_answers import ResponseFormat
from rollmesh.agents.responses_requests import ResponsesRequest
from rollmesh.agents.session_address import (
    CLIENT_HEADER,
    SESSION_HEADER,
    SessionPaths,
    access_check,
    open_session,
    open_sub_agent,
)
from rollmesh.agents.session_rewards import check_repeated
from rollmesh.checkpoints.sealing import api_token
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import bind_host
from rollmesh.runtime.api_app import Check, api_app
from rollmesh.runtime.http_server import accepted_hosts, public_listener, public_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import RequestMetrics
from rollmesh.runtime.service_host import service_host
from rollmesh.scheduling import run_limits
from rollmesh.store.trajectory_store import open_service_store
from rollmesh.tasks.environments.environment_protocol import load_agent
from rollmesh.text import Tokenizer

PREFIX = "/v1"
SessionId = Annotated[str, Path(description="Session id.", min_length=1, max_length=100)]
_CALL = {
    "parameters": [
        {
            "name": name,
            "in": "header",
            "required": False,
            "schema": {"type": "string"},
            "description": f"{whose} session that records the call; also the base URL /sessions/ID/v1, or the API key.",
        }
        for name, whose in ((SESSION_HEADER, "Id of the"), (CLIENT_HEADER, "Id or own name of the"))
    ],
    "responses": {"200": {"content": {"application/json": {"schema": {}}, "text/event-stream": {}}}},
}
_ERRORS = {
    400: "The request is invalid: `error.param` names the field.",
    401: "The token is missing or invalid.",
    404: "The model or the session is unknown.",
    409: "Another call of the session, or its reward, is in progress.",
    410: "The session or the run has ended.",
    422: "The session already has a different reward.",
    429: "No prompt is available: retry after `Retry-After` seconds.",
    502: "The generators failed.",
    503: "The service is unavailable: retry after `Retry-After` seconds.",
}
_CALL_ERRORS = (409, 410, 502)
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
        port = config.agents.port and config.agents.port + index
        listener, reached = public_listener(config, address, port, "agents.port")
        host.stack.callback(listener.close)
        store = await open_service_store(host, shutdown, _RETRY_SECONDS, limits)
        service = await host.stack.enter_async_context(
            openai_service(config, index, store, tokenizer, host.metrics, host.health, shutdown, reached, host.security)
        )
        token = api_token(config)
        app = build_app(service, token, RequestMetrics(host.metrics), address)
        root = await host.stack.enter_async_context(public_server(app, listener, reached, host.security))
        root = root.rstrip("/")
        if target := config.rollout.agent.function:
            try:
                from rollmesh.agents.hosted_agent import hosted_agent
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"rollout.agent.function: needs the package {error.name}: pip install 'rollmesh[agents]'"
                ) from error
            function = load_agent(target, config.rollout.agent.function_options)
            await host.stack.enter_async_context(hosted_agent(service, app, function, token, root, shutdown))
        url = f"{root}{PREFIX}"
        host.publish(url=url)
        # Calls wait for a full collection: it looks at nothing that the imports left, and comes rarely.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        get_logger("agents").info("serving", url=url)
        host.health.set_ready(True)
        await shutdown.wait()


def build_app(service: OpenAiService, token: str, metrics: RequestMetrics, host: str) -> FastAPI:
    """Build the application of one run; every call requires ``token``."""
    check = access_check(token, service)
    app = api_app(
        "agents",
        "OpenAI-compatible API of a run, and sessions of outside agents.",
        PREFIX,
        [openai_router(service, check), generate_router(service, check)],
        metrics,
        hosts=accepted_hosts(service.config, host),
        most_bytes=service.config.gateway.max_request_bytes,
        error_schema="OpenAiErrorBody",
    )
    app.add_middleware(SessionPaths)
    return app


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of an operation's errors; 400, 401, 404 and 503 are common to all."""
    return {
        status: {"model": OpenAiErrorBody, "description": _ERRORS[status]} for status in (400, 401, 404, *statuses, 503)
    }


def openai_router(service: OpenAiService, check: Check) -> APIRouter:
    """Return the routes of models, chat, completions and sessions; every call requires the token."""
    api = APIRouter(
        prefix=PREFIX, tags=["openai"], dependencies=[Depends(check)], route_class=OpenAiRoute, responses=_errors()
    )
    answering = Answering(service)
    longest = service.config.generator.max_context_tokens

    @api.get("/models")
    async def models() -> dict[str, Any]:
        """List the run and every policy version that a generator serves."""
        serving, newest = await service.policies()
        run = service.config.name
        names = [run, *(f"{run}@{version}" for version in sorted(serving))]
        state = {
            "newest_policy_version": None if newest is None else newest.policy_version,
            "generators_by_version": {str(version): count for version, count in sorted(serving.items())},
        }
        return {"object": "list", "data": [_model(name, longest) for name in names], "rollmesh": state}

    @api.get("/models/{model}")
    async def model(model: str) -> dict[str, Any]:
        """Show one model."""
        serving, _ = await service.policies()
        run = service.config.name
        if model not in (run, *(f"{run}@{version}" for version in serving)):
            raise OpenAiError(404, f"model: {model!r} is not served here", param="model", code="model_not_found")
        return _model(model, longest)

    @api.post("/chat/completions", openapi_extra=_CALL, responses=_errors(*_CALL_ERRORS))
    async def chat(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation, rendered with the model's own chat template."""
        return await answering.answer(request, body, "chat")

    @api.post("/responses", openapi_extra=_CALL, responses=_errors(*_CALL_ERRORS))
    async def responses(request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation of items, with items: thoughts, messages and calls of functions."""
        chat = await asyncio.to_thread(body.as_chat)
        return await answering.answer(request, chat, "responses", partial(ResponseFormat, request=body))

    @api.post("/completions", openapi_extra=_CALL, responses=_errors(*_CALL_ERRORS))
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue a text or token ids."""
        return await answering.answer(request, body, "completions")

    _add_sessions(api, service)
    return api


def generate_router(service: OpenAiService, check: Check) -> APIRouter:
    """Return the route of token ids in and out, where clients that render messages themselves look for it."""
    api = APIRouter(tags=["openai"], dependencies=[Depends(check)], route_class=OpenAiRoute, responses=_errors())
    answering = Answering(service)
    ends = set(service.formats.tokenizer.eos_token_ids)

    @api.post("/inference/v1/generate", openapi_extra=_CALL, responses=_errors(*_CALL_ERRORS))
    async def generate(request: Request, body: GenerateRequest) -> Response:
        """Continue token ids; the answer has the ids and the log-probabilities of its tokens, and no text."""
        if unknown := sorted({*(body.sampling_params.stop_token_ids or ())} - ends):
            raise invalid(
                f"sampling_params.stop_token_ids: {unknown[:5]} end no answer of this model; its end tokens are "
                f"{sorted(ends)} (generation_config.json of the model folder)",
                "sampling_params.stop_token_ids",
            )
        return await answering.answer(request, body.as_completion(), "generate")

    return api


def _add_sessions(api: APIRouter, service: OpenAiService) -> None:
    run = service.config.name

    @api.post("/sessions", status_code=201, responses=_errors(410, 429))
    async def new_session(request: Request, body: SessionRequest | None = None) -> dict[str, Any]:
        """Open a session with a prompt; waits while the run is paused or its pool is full."""
        body = body or SessionRequest()
        opening = (
            open_session(service, body.wait_seconds, kind=body.kind)
            if body.parent is None
            else open_sub_agent(service, body.parent, here=is_answered_here(request))
        )
        return (await unless_disconnected(request, opening, service.drain)).describe(run, with_task=True)

    @api.get("/sessions")
    async def sessions(request: Request) -> dict[str, Any]:
        """List the sessions in progress of all replicas, without their tasks; the oldest one first."""
        agents = service.agent_parts
        active = [session.describe(run, with_task=False) for session in agents.session_manager.sessions]
        if not is_answered_here(request):
            active += await agents.others.list_sessions(request)
        return {"object": "list", "data": sorted(active, key=lambda session: session["created"])}

    @api.get("/sessions/{session_id}")
    async def session(request: Request, session_id: SessionId) -> dict[str, Any]:
        """Show a session; an ended session is shown without its task."""
        found = await service.find_session(session_id, here=is_answered_here(request))
        return found.describe(run) if isinstance(found, EndedSession) else found.describe(run, with_task=True)

    @api.post("/sessions/{session_id}/reward", responses=_errors(409, 410, 422))
    async def reward(request: Request, session_id: SessionId, body: RewardRequest) -> dict[str, Any]:
        """Finish and score the session's trajectories; posting the same reward again changes nothing."""
        found = await service.find_session(session_id, here=is_answered_here(request))
        if isinstance(found, EndedSession):
            check_repeated(found, body)
            return found.describe(run)
        # A disconnected client does not cancel this: a partly recorded reward is useless, and a repeated post is safe.
        await service.agent_parts.rewards.post(found, body)
        return found.describe(run, with_task=False)

    @api.delete("/sessions/{session_id}", status_code=204, responses=_errors(409))
    async def give_up(request: Request, session_id: SessionId) -> Response:
        """Give up a session without a reward; its tokens are dropped and its prompt returns to the queue."""
        found = await service.find_session(session_id, here=is_answered_here(request))
        if isinstance(found, AgentSession):
            if any(trajectory.mark.is_posted for member in found.team for trajectory in member.trajectories):
                raise busy(
                    f"session {session_id}: its reward is stored, so it can no longer be given up; to finish it, post "
                    "the same reward again",
                    "reward_stored",
                )
            service.agent_parts.session_manager.end(found, "given_up")
        return Response(status_code=204)


def _model(name: str, longest: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rollmesh", "max_model_len": longest}
