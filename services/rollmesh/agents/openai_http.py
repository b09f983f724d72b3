"""HTTP layer of the API: errors in OpenAI's format, event streams and client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rollmesh.agents.drain import Drain
from rollmesh.agents.openai_errors import OpenAiError, invalid, shortened, unavailable
from rollmesh.errors import Conflict, DataError, RollmeshError, StoreError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import ApiError
from rollmesh.runtime.tasks import cancel_and_wait

T = TypeVar("T")

CLIENT_CLOSED = 499
"""Status of a call whose client has disconnected; it appears only in the log."""


_OTHER_TYPE = ("string_type", "int_type", "int_parsing", "list_type")
"""Errors of the branches of a union that the value does not belong to."""


class OpenAiRoute(APIRoute):
    """Route that returns every error in OpenAI's format, including authentication and validation errors."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def guarded(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:
                known = as_openai(error)
                return JSONResponse(known.body, status_code=known.status, headers=known.headers)

        return guarded


def as_openai(error: Exception) -> OpenAiError:
    """Convert any error to an OpenAiError."""
    if isinstance(error, OpenAiError):
        return error
    if isinstance(error, RequestValidationError):
        return _wrong_field(error)
    if isinstance(error, ApiError):
        kind = "authentication_error" if error.status == 401 else "invalid_request_error"
        code = "invalid_api_key" if error.status == 401 else None
        hint = f"; {error.hint}" if error.hint else ""
        return OpenAiError(error.status, f"{error}{hint}", kind=kind, param=error.field, code=code)
    if isinstance(error, HTTPException):
        return OpenAiError(error.status_code, str(error.detail))
    if isinstance(error, DataError):
        return invalid(str(error), None)
    if isinstance(error, Conflict):
        return OpenAiError(409, str(error))
    if isinstance(error, StoreError):
        return unavailable(f"the trajectory queue is unreachable: {error}", "store_unavailable")
    if isinstance(error, RollmeshError):
        return OpenAiError(502, f"the generators failed: {error}", kind="server_error", code="generation_failed")
    get_logger("openai").error("request_failed", error=repr(error), exc_info=error)
    return OpenAiError(500, "internal error of the agents service; its log has the traceback", kind="server_error")


def _wrong_field(error: RequestValidationError) -> OpenAiError:
    problems = error.errors()
    field = problems[0]["loc"][:2]
    # For a field with several possible types, the branch that the value has the type of matches it best, then the one
    # with the longest path.
    same_field = (p for p in problems if p["loc"][:2] == field)
    problem = max(same_field, key=lambda p: (p["type"] not in _OTHER_TYPE, len(p["loc"])))
    name = ".".join(str(part) for part in problem["loc"] if part != "body" and not _is_branch(part))
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return invalid(f"{name}: unknown parameter", name, "unknown_parameter")
    if problem["type"] == "json_invalid":
        return invalid(f"the body is not valid JSON: {problem.get('ctx', {}).get('error', message)}", None)
    if problem["type"] == "missing":
        return invalid(f"{name}: required field is missing", name, "missing_required_parameter")
    if not name:
        name = message.partition(":")[0] if ":" in message else ""
        return invalid(message, name or None, "unsupported_parameter" if "not supported" in message else None)
    seen = "" if isinstance(problem.get("input"), dict | list) else f" (got {shortened(repr(problem.get('input')))})"
    return invalid(f"{name}: {message}{seen}", name)


def _is_branch(part: int | str) -> bool:
    """Tell whether a part of an error path names a branch of a union instead of a field."""
    return isinstance(part, str) and (part in ("str", "int") or not part.isidentifier())


async def unless_disconnected(request: Request, work: Awaitable[T], drain: Drain) -> T:
    """Return the result of ``work``; a client disconnect or a shutdown of the service cancels it (OpenAiError)."""
    task = asyncio.ensure_future(work)
    disconnected, draining = asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(drain.wait())
    try:
        await asyncio.wait([task, disconnected, draining], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise draining.result() if draining.done() else OpenAiError(CLIENT_CLOSED, "the client closed the connection")
    finally:
        await cancel_and_wait(task, disconnected, draining)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


class EventStream(StreamingResponse):
    """Server-sent events; ``end`` runs exactly once, for every way the stream ends."""

    def __init__(
        self, events: AsyncIterator[bytes], end: Callable[[], Awaitable[None]], *, headers: Mapping[str, str]
    ) -> None:
        # Proxies must not buffer the events.
        own = {"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=own)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._end()
