"""Session of a request: named in the path, in a header, or by the API key; opened on request or by its first call.

Agents that set only a base URL and a key use ``/sessions/ID/v1`` or the key ``sk-ID``. The key of a session is for its
calls alone; every other request carries the run's token.
"""

import re
import time
from typing import Annotated
from urllib.parse import unquote

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials
from starlette.types import ASGIApp, Receive, Scope, Send

from rollmesh.agents.agent_session import KEY_PREFIX, AgentSession
from rollmesh.agents.agents_service import OpenAiService
from rollmesh.agents.connections import is_answered_here
from rollmesh.agents.openai_errors import OpenAiError, gone, invalid, too_many
from rollmesh.agents.openai_requests import WantedKind
from rollmesh.agents.session_manager import is_session_id
from rollmesh.runtime.api_app import TOKEN_SCHEME, Check, token_check
from rollmesh.runtime.request_guard import Unauthorized

SESSION_HEADER = "X-Rollmesh-Session"
CLIENT_HEADER = "X-Session-ID"
"""Header of environments that name each episode themselves, such as those of verifiers."""
_PATH = re.compile(rb"/sessions/([^/]{1,300})((?:/inference)?/v1(?:/.*)?)")
_LONGEST_NAME = 100


class SessionPaths:
    """ASGI middleware that serves ``/sessions/ID/PATH`` as ``/PATH`` (below /v1 and /inference/v1) with a header."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            sent = scope.get("raw_path") or scope["path"].encode()
            if (match := _PATH.fullmatch(sent)) is not None:
                name, path = unquote(match[1].decode("latin-1")), match[2]
                header = (SESSION_HEADER.lower().encode(), name.encode())
                scope["path"], scope["raw_path"] = unquote(path.decode("latin-1")), path
                scope["headers"] = [*scope["headers"], header]
        await self._app(scope, receive, send)


def named_session(request: Request, *, with_client_header: bool = True) -> str:
    """Return the id or the name of the request's session, or an empty text; OpenAiError if it names two."""
    headers = request.headers.getlist(SESSION_HEADER)
    named = list(dict.fromkeys(filter(None, [*headers, _key_session(request.headers.get("Authorization", ""))])))
    if not named and with_client_header:  # a client names its episodes in any case: what names ours counts first
        named = list(dict.fromkeys(filter(None, request.headers.getlist(CLIENT_HEADER))))
    if len(named) > 1:
        raise invalid(
            f"the request names the sessions {named[0]!r} and {named[1]!r} (URL path, {SESSION_HEADER}, "
            f"{CLIENT_HEADER}, API key); name one",
            None,
            "two_sessions",
        )
    name = named[0] if named else ""
    if len(name) > _LONGEST_NAME or not (name.isascii() and name.isprintable()):
        raise invalid(f"the session's name must be at most {_LONGEST_NAME} printable ASCII characters", None)
    return name


def access_check(token: str, service: OpenAiService) -> Check:
    """Return a dependency that accepts the run's token, and for one session its own key."""
    token_only = token_check(token)

    async def check(
        request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(TOKEN_SCHEME)]
    ) -> None:
        own = _key_session(request.headers.get("Authorization", ""))
        if not own:
            await token_only(given)
            return
        # 404 if unknown: a crash may have forgotten the session, and its agent opens another.
        await service.find_session(own, here=is_answered_here(request))
        if own != named_session(request):
            raise Unauthorized("the key is of another session", field="Authorization", hint="send the run's token")
        if request.url.path.startswith("/v1/sessions"):
            # An agent, or code that its model wrote, can read its own key: it must not reward itself with it.
            raise Unauthorized(
                "the key of a session is for its calls", field="Authorization", hint="send the run's token"
            )

    return check


def _key_session(authorization: str) -> str:
    scheme, _, key = authorization.partition(" ")
    is_key = scheme.lower() == "bearer" and key.startswith(f"{KEY_PREFIX}ses-")
    return key.removeprefix(KEY_PREFIX) if is_key else ""


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
