"""Connections of clients: their answers end when the client leaves, or when the service stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.runtime.tasks import cancel_and_wait

T = TypeVar("T")

Drain = Callable[[], Awaitable[OpenAiError]]
"""Wait for the service's shutdown, and get the error that ends each call in progress."""
CLIENT_CLOSED = 499
"""Status of a call whose client has disconnected; it appears only in the log."""


async def unless_disconnected(request: Request, work: Awaitable[T], drain: Drain) -> T:
    """Return the result of ``work``; a client disconnect or a shutdown of the service cancels it (OpenAiError)."""
    return await unless(work, drain(), _disconnected(request))


async def unless(work: Awaitable[T], *ends: Awaitable[OpenAiError]) -> T:
    """Return the result of ``work``; the first of ``ends`` that comes before it cancels it and is raised."""
    task, others = asyncio.ensure_future(work), [asyncio.ensure_future(end) for end in ends]
    try:
        await asyncio.wait([task, *others], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise next(other.result() for other in others if other.done())
    finally:
        for other in others:
            other.cancel()
        if not task.done():
            await cancel_and_wait(task)


async def _disconnected(request: Request) -> OpenAiError:
    while (await request.receive())["type"] != "http.disconnect":
        continue
    return OpenAiError(CLIENT_CLOSED, "the client closed the connection")


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
