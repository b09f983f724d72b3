"""TLS for uvicorn servers: certificate rotation and verification of optional client certificates."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

from rollmesh.runtime.http_protocol import HttpProtocol
from rollmesh.runtime.port_security import PortSecurity

_CLOSE_SECONDS = 1.0
VERIFIED = "rollmesh.verified_certificate"
"""Key of the ASGI scope; present when the client has a certificate of the mesh's authority."""


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
