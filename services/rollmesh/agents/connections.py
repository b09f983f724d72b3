"""Connections of clients, whose answers end when the client leaves or the service stops, and of other replicas.

A session is in one process, to which the others forward its requests. The trajectory queue has the address of the
process that leases the trajectories of a session. A forwarded request is never forwarded again.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from rollmesh.agents.openai_answers import event_line
from rollmesh.agents.openai_errors import OpenAiError, not_known_yet
from rollmesh.runtime.endpoints import AdminClient
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store.queue_types import AgentPlace
from rollmesh.store.worker_sessions import Sessions

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


_FORWARDED_HEADER = "X-Rollmesh-Forwarded"
_UNREACHABLE = "rollmesh.owner_unreachable"
"""Key of the ASGI scope of a request whose session is at an address where no process answers."""
_FORWARD_TIME = httpx.Timeout(None, connect=5.0)
"""A call takes as long as its client waits; the connection ends when the other machine is gone."""
_LIST_TIME = httpx.Timeout(5.0)
_OF_CONNECTION = frozenset({"connection", "content-length", "date", "expect", "keep-alive", "te", "transfer-encoding"})
"""Headers of one connection or of one message, which are not forwarded."""


def is_answered_here(request: Request) -> bool:
    """Tell whether a request must not be forwarded: another replica has forwarded it, or its owner is unreachable."""
    return _FORWARDED_HEADER in request.headers or _UNREACHABLE in request.scope


class OtherReplicas:
    """Client of the other replicas."""

    def __init__(self, sessions: Sessions, address: str, client: AdminClient, drain: Drain) -> None:
        """``address``: host:port of this replica."""
        self.address = address
        self._sessions = sessions
        self._client = client
        self._drain = drain

    async def place_of(self, id_or_name: str) -> AgentPlace | None:
        """Return the replica that has a session, or had it last."""
        return await self._sessions.find_agent(id_or_name)

    async def forward(self, request: Request, address: str, session: str) -> Response | None:
        """Return the answer of another replica; None if no process is at its address."""
        try:
            answer = await unless_disconnected(request, self._send(request, address, _FORWARD_TIME), self._drain)
            if answer.headers.get("content-type", "").startswith("text/event-stream"):
                stream = _ForwardedStream(answer, session, self._drain)
                return EventStream(stream.events(), stream.aclose, headers=_kept(answer))
            try:
                content = await unless_disconnected(request, answer.aread(), self._drain)
            finally:
                await answer.aclose()
            return Response(content, answer.status_code, _kept(answer))
        except (httpx.ConnectError, httpx.ConnectTimeout):
            request.scope[_UNREACHABLE] = True
            return None
        except httpx.HTTPError as error:
            raise not_known_yet(session) from error

    async def list_sessions(self, request: Request) -> list[dict[str, Any]]:
        """Return the sessions of the other replicas; a replica that does not answer has none."""
        addresses = await self._sessions.agent_addresses() - {self.address}

        async def of(address: str) -> list[dict[str, Any]]:
            try:
                answer = await self._send(request, address, _LIST_TIME)
                try:
                    await answer.aread()
                finally:
                    await answer.aclose()
                sessions: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
                return sessions
            except httpx.HTTPError as error:
                get_logger("agents").warning("replica_not_listed", address=address, error=repr(error))
                return []

        return [session for part in await asyncio.gather(*map(of, addresses)) for session in part]

    async def _send(self, request: Request, address: str, timeout: httpx.Timeout) -> httpx.Response:
        scope = request.scope
        path = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        headers = [(name, value) for name, value in request.headers.raw if name.decode() not in _OF_CONNECTION]
        headers.append((_FORWARDED_HEADER.encode(), b"1"))
        content = await request.body() if request.method == "POST" else b""
        return await self._client.send(request.method, address, path.decode("ascii"), headers, content, timeout)


class _ForwardedStream:
    """Stream of another replica's events; its last event is an error if that replica dies or this one stops."""

    def __init__(self, answer: httpx.Response, session: str, drain: Drain) -> None:
        self._answer = answer
        self._session = session
        self._stopped = asyncio.ensure_future(drain())
        self._reading: asyncio.Future[bytes] | None = None

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield whole events.

        A cancellation ends the wait for a piece, and not the read: it comes several times, and httpx needs the time
        after the first one to close the connection. See ``aclose``.
        """
        pieces, rest = self._answer.aiter_raw(), b""
        while True:
            self._reading = asyncio.ensure_future(anext(pieces, b""))
            await asyncio.wait([self._reading, self._stopped], return_when=asyncio.FIRST_COMPLETED)
            if not self._reading.done():
                yield event_line(self._stopped.result().body)
                return
            try:
                piece = self._reading.result()
            except httpx.HTTPError:
                yield event_line(not_known_yet(self._session).body)
                return
            if not piece:
                return
            whole, end, rest = (rest + piece).rpartition(b"\n\n")
            if end:
                yield whole + end

    async def aclose(self) -> None:
        await cancel_and_wait(self._stopped, *([] if self._reading is None else [self._reading]))
        await self._answer.aclose()


def _kept(answer: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name not in _OF_CONNECTION}
