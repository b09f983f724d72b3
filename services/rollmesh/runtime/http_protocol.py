"""HTTP/1.1 protocol for uvicorn: a time limit for the head of a request, and TLS with optional client certificates.

h11 limits the size of a head (64 KiB). uvicorn limits neither the time of a head nor that of a connection that never
sends one.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollmesh.runtime.port_security import PortSecurity

HEAD_SECONDS = 30.0
_CLOSE_SECONDS = 1.0
VERIFIED = "rollmesh.verified_certificate"
"""Key of the ASGI scope; present when the client has a certificate of the mesh's authority."""


class HttpProtocol(H11Protocol):
    """HTTP/1.1 protocol that closes a connection whose next head is not complete after ``head_seconds``.

    The time starts with the connection, later with the first byte after an answer. uvicorn's ``timeout_keep_alive``
    limits an idle connection between two requests.
    """

    def __init__(self, *args: Any, head_seconds: float = HEAD_SECONDS, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_seconds = head_seconds
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

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

    def _start_timer(self) -> None:
        self._head_timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def use_tls(config: uvicorn.Config, security: PortSecurity) -> None:
    """Configure a uvicorn server for TLS with this process's certificate; does nothing without TLS in the run file.

    Client certificates are optional. ``VERIFIED`` in the scope marks clients with a certificate; a certificate of
    another authority is rejected.
    """
    if security.tls is None:
        return
    config.http = _VerifiedHttpProtocol
    config.load()
    config.ssl = security.tls.server_context()


class _VerifiedHttpProtocol(HttpProtocol):
    """HTTP/1.1 protocol that marks the requests of connections with a verified client certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        if connection is not None and connection.getpeercert():
            self.app = _Verified(self.app)

    def shutdown(self) -> None:
        """Abort an idle connection after a short delay.

        A client that polls receives the close_notify alert of TLS only at its next request, and the process would wait
        for it. The delay is for the end of an answer that is still in flight, which the transport does not count.
        """
        idle = self.cycle is None or self.cycle.response_complete
        super().shutdown()
        if idle:
            self.loop.call_later(_CLOSE_SECONDS, self.transport.abort)


class _Verified:
    """ASGI application that sets ``VERIFIED`` in the scope of every request."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, VERIFIED: True}, receive, send)
