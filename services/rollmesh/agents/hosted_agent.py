"""Agent that a user wrote as one function, ``async def rollout(client, row) -> reward``, run inside the service.

The function gets an OpenAI client whose calls are those of its session. One task works on each prompt that the queue
gives; the pool bounds their number.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from fastapi import FastAPI
from openai import APIError, APIStatusError, AsyncOpenAI
from pydantic import ValidationError

from rollmesh.agents.agent_session import AgentSession
from rollmesh.agents.agents_service import Loops, OpenAiService
from rollmesh.agents.connections import unless
from rollmesh.agents.openai_errors import OpenAiError, as_openai
from rollmesh.agents.openai_requests import RewardRequest
from rollmesh.agents.session_address import open_session
from rollmesh.errors import RollmeshError, StoreUnavailable
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import BackgroundTasks, cancelled_awaits_as_errors
from rollmesh.tasks.environments.environment_protocol import AgentFunction
from rollmesh.user_code import described
from rollmesh.worker.agent_mark import root_of

_PROMPT_SECONDS = 10.0
"""Longest wait for one prompt; without one the next wait begins."""
_POLL_SECONDS = 0.5
_RETRIES = 20
"""Retries of a call that the service refuses for now (a pause, a busy pool)."""
_LONGEST_ERROR = 2000


@asynccontextmanager
async def hosted_agent(
    service: OpenAiService, app: FastAPI, function: AgentFunction, token: str, url: str, shutdown: Shutdown
) -> AsyncIterator[None]:
    """Run the function on every prompt until ``shutdown``; calls do not leave the process.

    ``url``: the service's own, for calls of other processes.
    """
    transport = httpx2.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx2.AsyncClient(transport=transport, timeout=None) as http:
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key=token, http_client=http, max_retries=_RETRIES, timeout=None)
        loops = Loops(shutdown)
        loops.start(_HostedAgent(service, client, function, url).run(shutdown), "hosted-agent")
        yield
        await loops.ended()


class _HostedAgent:
    def __init__(self, service: OpenAiService, client: AsyncOpenAI, function: AgentFunction, url: str) -> None:
        self._service = service
        self._client = client
        self._function = function
        self._url = url
        self._attempts = BackgroundTasks()
        self._log = get_logger("agents")

    async def run(self, shutdown: Shutdown) -> None:
        manager = self._service.agent_parts.session_manager
        own: set[str] = set()
        try:
            while not shutdown.is_set():
                sessions = manager.sessions
                own.intersection_update(root_of(session.session_id) for session in sessions)
                for session in sessions:
                    # The function that began a session of an earlier process is gone.
                    if root_of(session.session_id) not in own and not session.newest.mark.ended:
                        manager.end(session, "given_up")
                try:
                    session = await unless(open_session(self._service, _PROMPT_SECONDS), self._service.drain())
                except (OpenAiError, StoreUnavailable):  # run_complete, too: an ended run may still be evaluated
                    await wait_or_shutdown(shutdown, _POLL_SECONDS)
                    continue
                own.add(session.session_id)
                self._attempts.start(self._attempt(session), session.session_id)
        finally:
            await self._attempts.cancel()

    async def _attempt(self, session: AgentSession) -> None:
        """Run the function and post its reward; an error of its own is the reward's."""
        config = self._service.config
        row = {
            **session.describe(config.name, with_task=True),
            "base_url": f"{self._url}/sessions/{session.session_id}/v1",
            "temperature": config.rollout.temperature,
            "top_p": config.rollout.top_p,
        }
        work = asyncio.ensure_future(self._reward(session, row))
        try:
            while not work.done() and not session.ended:
                await asyncio.wait([work], timeout=_POLL_SECONDS)
            if session.ended:  # lost, or silent for longer than rollout.agent.idle_timeout_seconds
                return
            request = work.result()
            if request is not None:
                await self._post(session, request)
        except OpenAiError as error:
            self._log.warning("hosted_agent_reward", session=session.session_id, message=str(error))
            if error.code == "nothing_sampled":
                self._service.agent_parts.session_manager.end(session, "given_up")
        finally:
            work.cancel()

    async def _post(self, session: AgentSession, request: RewardRequest) -> None:
        """Post a reward, again while a call that the function left, a pause or an outage of the queue is in its way."""
        while True:
            try:
                return await self._service.agent_parts.rewards.post(session, request)
            except RollmeshError as error:
                if (typed := as_openai(error)).retry_after is None:
                    raise typed from error
            await asyncio.sleep(_POLL_SECONDS)

    async def _reward(self, session: AgentSession, row: Mapping[str, Any]) -> RewardRequest | None:
        """Return the reward of the function; None if its session was gone."""
        try:
            with cancelled_awaits_as_errors():
                value = await self._function(self._client.with_options(api_key=row["api_key"]), row)
            return RewardRequest.model_validate(value if isinstance(value, Mapping) else {"reward": value})
        except APIStatusError as error:
            if error.status_code == 410:
                return None
            return self._failed(session, error)
        except ValidationError:
            return self._failed(
                session,
                ValueError(f"returned {value!r}, which is neither a finite number nor a body of the reward call"),
            )
        except (Exception, SystemExit) as error:
            return self._failed(session, error)

    def _failed(self, session: AgentSession, error: BaseException) -> RewardRequest:
        message = str(error) if isinstance(error, APIError) else described(error)
        self._log.warning("hosted_agent_failed", session=session.session_id, message=message)
        return RewardRequest(error=message[:_LONGEST_ERROR])
