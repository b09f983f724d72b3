"""Middleware that makes paths plain, because clients append them to a base URL that may end in a slash."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")


class PlainPaths:
    """ASGI middleware that serves ``//v1/models`` and ``/v1/models/`` as ``/v1/models``."""

    def __init__(self, app: ASGIApp, *, prefix: str) -> None:
        """Set up the middleware; it drops trailing slashes only below ``prefix``."""
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            # The path as sent: an encoded slash belongs to a parameter.
            sent = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
            plain = plain_path(sent, self._prefix)
            if plain != sent:
                scope["path"], scope["raw_path"] = unquote(plain), plain.encode("latin-1")
        await self._app(scope, receive, send)


def plain_path(path: str, prefix: str) -> str:
    """Return a path without doubled slashes, and below ``prefix`` without one at the end."""
    plain = _SLASHES.sub("/", path)
    return plain.rstrip("/") if plain.startswith(f"{prefix}/") else plain
