"""Session that a request belongs to: named in the URL's path, in a header, or by the API key.

Agents that set only a base URL and a key use ``/sessions/ID/v1`` or the key ``sk-ID``. The key of a session is for its
calls alone; every other request carries the run's token.
"""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import unquote

from fastapi import Request, Security
from fastapi.security import HTTPAuthorizationCredentials
from starlette.types import ASGIApp, Receive, Scope, Send

from rollmesh.agents.agent_session import KEY_PREFIX
from rollmesh.agents.agents_service import OpenAiService
from rollmesh.agents.openai_errors import invalid
from rollmesh.agents.other_replicas import is_answered_here
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
