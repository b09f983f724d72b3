"""Opening of sessions: on request, and by the first call of an agent that names its own."""

from __future__ import annotations

import time

from rollmesh.agents.agent_session import AgentSession
from rollmesh.agents.agents_service import OpenAiService
from rollmesh.agents.openai_errors import OpenAiError, gone, invalid, too_many
from rollmesh.agents.openai_requests import WantedKind
from rollmesh.agents.session_manager import is_session_id

_POLL_SECONDS = 1.0
"""Seconds between two checks for the end of the run while an agent waits for a prompt."""
_FIRST_CALL_SECONDS = 30.0
"""Seconds that the first call of a session waits for a prompt."""


async def session_of_call(service: OpenAiService, name: str, *, here: bool) -> AgentSession:
    """Return the session that a call continues or, where the run allows it, opens; OpenAiError if it cannot.

    ``here``: no other replica is asked.
    """
    try:
        return await service.active_session(name, here=here)
    except OpenAiError as error:
        if not service.config.rollout.agent.open_on_first_call or is_session_id(name) or error.status != 404:
            raise
    # The agent has a task of its own: the rows of an evaluation are none for it.
    return await open_session(service, _FIRST_CALL_SECONDS, name, here=here, kind="training")


async def open_session(
    service: OpenAiService, wait_seconds: float, name: str = "", *, here: bool = False, kind: WantedKind = "any"
) -> AgentSession:
    """Wait for a prompt and return its session; OpenAiError if there is none in time or the run has ended."""
    session_manager = service.agent_parts.session_manager
    deadline = time.monotonic() + wait_seconds
    with session_manager.waiting.opening(name):
        while True:
            if name:
                await service.check_place(name, here=here)
                if isinstance(known := session_manager.find(name), AgentSession):
                    return known  # another call has opened it, or its trajectory was taken over
            seconds = max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))
            session = await session_manager.waiting.session(seconds, name, kind)
            if session is not None:
                return session
            if await service.complete():
                raise gone("the run needs no more rollouts", "run_complete")
            if time.monotonic() >= deadline:
                raise too_many(f"no prompt within {wait_seconds:g} s: {await _why_none(service)}", "no_prompt")


async def open_sub_agent(service: OpenAiService, parent: str, *, here: bool) -> AgentSession:
    """Open a session that shares the reward of another one; OpenAiError if the run does not allow it.

    ``here``: no other replica is asked.
    """
    recorded, credit = service.agent_parts.recorded, service.config.trainer.algorithm.credit
    if credit != "shared":
        raise invalid(
            f"parent: this run has no shared rewards (trainer.algorithm.credit={credit}); set credit=shared",
            "parent",
            "no_shared_rewards",
        )
    return await recorded.open_sub_agent(await service.active_session(parent, here=here))


async def _why_none(service: OpenAiService) -> str:
    view = await service.store.mesh.view(groups=False)
    desired = view.desired
    if desired.paused:
        return desired.reason or "the run is paused"
    serving, _ = await service.policies()
    if not serving:
        return "no generator serves a policy yet"
    if not desired.pool_size:
        return "no rollout worker leads the run yet"
    if view.leased >= view.leasable:
        return (
            f"the pool is full: sessions hold {view.leased} of {view.leasable} trajectories: the pool of "
            f"{desired.pool_size}, and beyond it {view.beyond_pool} of the {view.waiting} that are between two calls "
            f"(rollout.most_waiting={desired.most_waiting})"
        )
    if view.pending:
        return "a prompt came in this moment"
    return f"no prompt is admitted; the run waits for {desired.waiting_for or 'its rollout worker'}"
