"""TLS for uvicorn servers: rotated certificates, and whether the client has shown one."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

from rollmesh.runtime.http_protocol import HttpProtocol
from rollmesh.runtime.port_security import PortSecurity

_FAREWELL_SECONDS = 1.0
VERIFIED = "rollmesh.verified_certificate"
"""Key of the ASGI scope: present when the client has shown a certificate of the mesh's authority."""


def use_tls(config: uvicorn.Config, security: PortSecurity) -> None:
    """Make a uvicorn server speak TLS with this process's certificate; does nothing when the mesh has none.

    A client need not show a certificate, but ``VERIFIED`` in the scope tells who did; one of another authority is
    refused.
    """
    if security.tls is None:
        return
    config.http = _TellsCertificates
    config.load()
    config.ssl = security.tls.server_context()


class _TellsCertificates(HttpProtocol):
    """HTTP/1.1 whose requests say whether their connection has a verified client certificate."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        if connection is not None and connection.getpeercert():
            self.app = _Verified(self.app)

    def shutdown(self) -> None:
        """End an idle connection soon: a client that looks now and then hears of the TLS farewell with its next look
        only, and until then the farewell would hold up the end of the process.

        Not at once: the end of an answer may still be on its way, where the transport does not count it.
        """
        idle = self.cycle is None or self.cycle.response_complete
        super().shutdown()
        if idle:
            self.loop.call_later(_FAREWELL_SECONDS, self.transport.abort)


class _Verified:
    """An application whose every request came with a verified certificate."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app({**scope, VERIFIED: True}, receive, send)
