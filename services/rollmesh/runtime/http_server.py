"""HTTP servers: limits of time, TLS with optional client certificates, and answers to HEAD."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import WILDCARDS, host_port
from rollmesh.runtime.port_security import OPEN, PortSecurity, is_loopback
from rollmesh.runtime.request_guard import LOOPBACK_NAMES

HEAD_SECONDS = 30.0
_CLOSE_SECONDS = 1.0
_IDLE_CONNECTION_SECONDS = 75
"""Longer than clients keep an idle connection (httpx 5 s, aiohttp 15 s, nginx 60 s). The client must close first;
otherwise a request may arrive on a connection that the server is closing."""
_UNREAD_SECONDS = 60.0
_GRACE_SECONDS = 3
VERIFIED = "rollmesh.verified_certificate"
"""Key of the ASGI scope; present when the client has a certificate of the mesh's authority."""


def public_listener(config: RunConfig, host: str, port: int, field: str) -> tuple[socket.socket, str]:
    """Return a listening socket, and the host:port where clients reach it; raises ConfigError like ``listen``."""
    listener = listen_with_timeout(host, port, field)
    if host in WILDCARDS:  # clients need an address to connect to
        host = config.network.advertise_host or ("::1" if ":" in host else "127.0.0.1")
    return listener, host_port(host, int(listener.getsockname()[1]))


@contextlib.asynccontextmanager
async def public_server(
    app: FastAPI, listener: socket.socket, reached: str, security: PortSecurity
) -> AsyncIterator[str]:
    """Serve an application at the socket of ``public_listener``; yields its URL, which ends in a slash."""
    async with http_server(app, listener, security, grace_seconds=_GRACE_SECONDS):
        yield f"{security.scheme}://{reached}/"


@contextlib.asynccontextmanager
async def http_server(
    app: FastAPI,
    listener: socket.socket,
    security: PortSecurity = OPEN,
    *,
    grace_seconds: int | None = None,
    head_seconds: float = HEAD_SECONDS,
) -> AsyncIterator[int]:
    """Serve an application inside the running loop; yields the bound port.

    With TLS, clients may have a certificate, which must be of the mesh's authority; ``VERIFIED`` marks them. A client
    has ``head_seconds`` for the request line and the headers of each request. At shutdown, requests in progress have
    ``grace_seconds`` to finish; None sets no limit.
    """
    with contextlib.closing(listener):
        config = uvicorn.Config(
            HeadRequests(app),
            http=partial(HttpProtocol, head_seconds=head_seconds),  # type: ignore[arg-type]  # a factory is enough
            log_config=None,  # capture_foreign_logs handles its warnings
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=_IDLE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=grace_seconds,
        )
        if security.tls is not None:
            config.load()
            config.ssl = security.tls.server_context()
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]), name="http")
        try:
            yield int(listener.getsockname()[1])
        finally:
            server.should_exit = True
            await task


def accepted_hosts(config: RunConfig, host: str) -> list[str]:
    """Return the host names that requests to a server at ``host`` may use; an empty list accepts every name."""
    allowed = config.gateway.allowed_hosts
    return [*allowed, *LOOPBACK_NAMES] if allowed or is_loopback(host_port(host, 1)) else []


def listen_with_timeout(host: str, port: int, field: str, *, unread_seconds: float = _UNREAD_SECONDS) -> socket.socket:
    """Return a listening socket whose connections close when a client reads nothing for ``unread_seconds``.

    A response in progress keeps its resources: a place among the event clients, or the trajectory of a session. A
    client that disappears or stops reading would keep them forever. Raises ConfigError like ``listen``.
    """
    listener = listen(host, port, field)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))
    return listener


def listen(host: str, port: int, field: str) -> socket.socket:
    """Open a listening socket; raises ConfigError, which names the config ``field``, when the port cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # As the gRPC ports do: "::" means every address of the machine, also those of IPv4.
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        return socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen at {host}, {field}={port}: {error}") from error


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to ``run_service``."""

    @contextlib.contextmanager
    def capture_signals(self):  # type: ignore[no-untyped-def]
        yield


class HttpProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes a connection whose next head is not complete after ``head_seconds``.

    h11 limits the size of a head (64 KiB); uvicorn limits neither its time nor that of a connection that never sends
    one. The time starts with the connection, later with the first byte after an answer. uvicorn's
    ``timeout_keep_alive`` limits an idle connection between two requests.
    """

    def __init__(self, *args: Any, head_seconds: float = HEAD_SECONDS, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        self._tls = transport.get_extra_info("ssl_object")
        if self._tls is not None and self._tls.getpeercert():
            self.app = _verified(self.app)

    def data_received(self, data: bytes) -> None:
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._stop_timer()
        elif before is not None and before.response_complete and self._head_timer is None:
            self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Abort an idle TLS connection after a short delay.

        A client that polls receives the close_notify alert of TLS only at its next request, and the process would wait
        for it. The delay is for the end of an answer that is still in flight, which the transport does not count.
        """
        idle = self.cycle is None or self.cycle.response_complete
        super().shutdown()
        if idle and self._tls is not None:
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def _verified(app: Any) -> ASGIApp:
    return lambda scope, receive, send: app({**scope, VERIFIED: True}, receive, send)


class HeadRequests:
    """Application that answers HEAD for another one, which only knows GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection; an endless body, as of an event stream, ends after its head."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        answered = False

        async def receive_until_answered() -> Message:
            return {"type": "http.disconnect"} if answered else await receive()

        async def send_head(message: Message) -> None:
            nonlocal answered
            if not answered and message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b""})
                answered = True

        await self._app({**scope, "method": "GET"}, receive_until_answered, send_head)
