"""Finding a session by its id, and saying what became of one that is not there."""

from __future__ import annotations

from rollmesh.agents.agent_session import AgentSession, EndedSession, session_ended
from rollmesh.agents.agents_service import Agents, OpenAiService
from rollmesh.agents.openai_errors import OpenAiError, invalid, unavailable


def agents_of(service: OpenAiService) -> Agents:
    """The part of the service that only a run of outside agents has; OpenAiError in another run."""
    if service.agents is None:
        raise invalid(
            f"sessions: this run makes its rollouts itself (rollout.program={service.config.rollout.program}); set "
            "rollout.program=agent to train on what outside agents do",
            None,
            "no_sessions",
        )
    return service.agents


def active_session(service: OpenAiService, session_id: str) -> AgentSession:
    """Find a session that a call can continue; OpenAiError when it has ended or is unknown."""
    session = find_session(service, session_id)
    if isinstance(session, EndedSession):
        raise session_ended(session_id, session.ended)
    return session


def find_session(service: OpenAiService, session_id: str) -> AgentSession | EndedSession:
    """Find a session, ended ones included; OpenAiError when it is unknown."""
    agents = agents_of(service)
    session = agents.desk.find(session_id)
    if session is not None:
        return session
    if service.taking_over:
        raise unavailable(
            f"session {session_id}: not known here yet; this gateway has just started and is taking over the sessions "
            "of one that died: send the same call again",
            "session_not_known_yet",
            5.0,
        )
    raise OpenAiError(
        404,
        f"session {session_id}: not known; it was never opened here, ended long ago, or had no call yet when its "
        "gateway died; open another one: POST /v1/sessions",
        code="session_not_found",
    )
