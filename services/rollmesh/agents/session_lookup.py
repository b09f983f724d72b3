"""Lookup of sessions by id, with the reason if a session is missing."""

from __future__ import annotations

from rollmesh.agents.agent_session import AgentSession, EndedSession, session_ended
from rollmesh.agents.agents_service import Agents, OpenAiService
from rollmesh.agents.openai_errors import OpenAiError, invalid, unavailable


def agents_of(service: OpenAiService) -> Agents:
    """Return the part of the service for agent runs; OpenAiError in any other run."""
    if service.agents is None:
        raise invalid(
            f"sessions: this run makes its own rollouts (rollout.program={service.config.rollout.program}); set "
            "rollout.program=agent to train on the sessions of outside agents",
            None,
            "no_sessions",
        )
    return service.agents


def active_session(service: OpenAiService, session_id: str) -> AgentSession:
    """Return the session for a call to continue; OpenAiError if it has ended or is unknown."""
    session = find_session(service, session_id)
    if isinstance(session, EndedSession):
        raise session_ended(session_id, session.ended)
    return session


def find_session(service: OpenAiService, session_id: str) -> AgentSession | EndedSession:
    """Return a session, including ended ones; OpenAiError if it is unknown."""
    agents = agents_of(service)
    session = agents.session_manager.find(session_id)
    if session is not None:
        return session
    if service.taking_over:
        raise unavailable(
            f"session {session_id}: not known yet; the service has just started and may still take over the sessions "
            "of its crashed predecessor: send the same call again",
            "session_not_known_yet",
            5.0,
        )
    raise OpenAiError(
        404,
        f"session {session_id}: unknown; it was never opened here, ended long ago, or had no call yet when its "
        "service crashed; open a new session: POST /v1/sessions",
        code="session_not_found",
    )
