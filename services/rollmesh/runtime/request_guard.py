"""Errors of an HTTP API, and the middleware before its routes: host names, body sizes, headers, request metrics."""

import asyncio
import contextlib
import json
import time
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollmesh.errors import RollmeshError
from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics


class ApiError(RollmeshError):
    """Error with an HTTP status; ``field`` and ``hint`` go into the response."""

    status = 500

    def __init__(self, message: str, *, field: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.hint = hint


class BadRequest(ApiError):
    """A parameter or the body is invalid."""

    status = 400


class Unauthorized(ApiError):
    """The token is missing or invalid."""

    status = 401


class NotFound(ApiError):
    """The requested object does not exist in the run."""

    status = 404


class Busy(ApiError):
    """Too many clients, or the data is not available yet; a later retry may succeed."""

    status = 503


def error_body(path: str, status: int, error: str, field: str | None, hint: str | None) -> dict[str, Any]:
    """Return the JSON of an error: an ``ErrorBody``, or OpenAI's format for paths below ``/v1``."""
    if not path.startswith("/v1/"):
        return {"error": error, "field": field, "hint": hint}
    message = f"{error}; {hint}" if hint else error
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": field, "code": None}}


STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_BODY_SECONDS = 30.0
_LINGER_SECONDS = 2.0
_MOST_ARRIVING = 8
"""Number of maximum-size bodies that may arrive at once: this memory is used before the token is checked."""
_MOST_WASTED = 2
"""Number of maximum-size bodies that are read and discarded after a body was too long."""
_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)


class _TooLarge(ApiError):
    status = 413


class _TooSlow(ApiError):
    status = 408


class RequestMetrics:
    """Metrics of the requests of one service."""

    def __init__(self, metrics: Metrics, route: str = "other") -> None:
        """Create the series of ``route`` with 0, so that a rate counts its first error."""
        component = metrics.component
        self.requests = metrics.counter(
            f"rollmesh_{component}_requests_total",
            "Requests by route and status class.",
            {"route": (route,), "status": STATUS_CLASSES},
        )
        self.request_seconds = metrics.histogram(
            f"rollmesh_{component}_request_seconds",
            "Time from a request to the start of its response.",
            LATENCY_BUCKETS,
        )
        self.refused_tokens = metrics.counter(
            f"rollmesh_{component}_refused_tokens_total", "Requests with a missing or invalid token."
        )


class RequestGuard:
    """ASGI middleware; the application receives a complete body or no request at all."""

    def __init__(self, app: ASGIApp, *, hosts: Sequence[str], most_bytes: int, metrics: RequestMetrics) -> None:
        """``hosts`` are the accepted names ("*.a.org" for all below one); an empty list accepts every name."""
        self._app = app
        self._hosts = tuple(host.lower() for host in hosts)
        self._most_bytes = most_bytes
        self._metrics = metrics
        self._arriving = 0
        """Bytes of incomplete bodies."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start_time = time.monotonic()
        seen = 0

        async def counted(message: Message) -> None:
            nonlocal seen
            if message["type"] == "http.response.start":
                seen = message["status"]
                if seen == 401:
                    self._metrics.refused_tokens.inc()
                headers = list(message.get("headers", ()))
                own = {name for name, _ in headers}
                message["headers"] = headers + [header for header in _HEADERS if header[0] not in own]
                self._metrics.request_seconds.observe(time.monotonic() - start_time)
            await send(message)

        try:
            try:
                body = await self._checked_body(Headers(scope=scope), receive)
            except ApiError as error:
                await _answer(error, scope["path"], counted)
            else:
                await self._app(scope, _replay(body, receive), counted)
        finally:
            # The template of the route limits the number of label values.
            found = scope.get("route")
            route = getattr(found, "path_format", None) or getattr(found, "path", None)
            if not isinstance(route, str):
                route = "page" if scope["path"] == "/" or scope["path"].startswith("/page/") else "other"
            # Status 0: the client disconnected, or the application failed, before the response began.
            self._metrics.requests.labels(route=route, status=f"{(seen or 500) // 100}xx").inc()

    async def _checked_body(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body; raises ApiError for a request that must not reach a route."""
        host = headers.get("host", "").lower()
        if self._hosts and not any(_matches(host, allowed) for allowed in self._hosts):
            hint = "use a loopback address, or add the name to gateway.allowed_hosts"
            raise BadRequest(f"unknown host name {host!r}", field="Host", hint=hint)
        if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
            return b""
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                return await self._read_body(receive)
        except TimeoutError as error:
            raise _TooSlow("the body did not arrive in time", field="body", hint="send the body faster") from error
        except ApiError:
            # Read for a while longer: a client whose upload is cut off does not see the response.
            left, more = _MOST_WASTED * self._most_bytes, True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LINGER_SECONDS):
                    while left > 0 and more:
                        message = await receive()
                        left -= len(message.get("body", b""))
                        more = message.get("more_body", False)
            raise

    async def _read_body(self, receive: Receive) -> bytes:
        body = bytearray()
        try:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return bytes(body)
                part = message.get("body", b"")
                body += part
                self._arriving += len(part)
                if len(body) > self._most_bytes:
                    hint = "send less, or raise gateway.max_request_bytes"
                    raise _TooLarge(f"the body exceeds {self._most_bytes} bytes", field="body", hint=hint)
                if self._arriving > _MOST_ARRIVING * self._most_bytes:
                    raise Busy("too many bodies are arriving at once", field="body", hint="retry in a moment")
                if not message.get("more_body", False):
                    return bytes(body)
        finally:
            self._arriving -= len(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a channel that delivers the body once and then forwards messages (the client's disconnect)."""
    sent = False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def _answer(error: ApiError, path: str, send: Send) -> None:
    body = json.dumps(error_body(path, error.status, str(error), error.field, error.hint)).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _matches(host: str, allowed: str) -> bool:
    """Tell whether a Host header names this host, with or without a port."""
    bare, colon, port = host.rpartition(":")
    names = {host, bare} if colon and port.isdecimal() else {host}
    if allowed.startswith("*."):
        return any(name.endswith(allowed[1:]) for name in names)
    return allowed == "*" or allowed in names
