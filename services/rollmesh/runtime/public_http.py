"""HTTP servers for clients outside the mesh: the gateway and the agents service."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import AsyncIterator

from fastapi import FastAPI

from rollmesh.config import RunConfig
from rollmesh.runtime.addresses import WILDCARDS, host_port
from rollmesh.runtime.admin_http import http_server, listen
from rollmesh.runtime.port_security import PortSecurity, is_loopback
from rollmesh.runtime.request_guard import LOOPBACK_NAMES

_UNREAD_SECONDS = 60.0
_GRACE_SECONDS = 3


def accepted_hosts(config: RunConfig, host: str) -> list[str]:
    """Return the host names that requests to a server at ``host`` may use; an empty list accepts every name."""
    allowed = config.gateway.allowed_hosts
    return [*allowed, *LOOPBACK_NAMES] if allowed or is_loopback(host_port(host, 1)) else []


@contextlib.asynccontextmanager
async def public_server(
    app: FastAPI, config: RunConfig, host: str, port: int, field: str, security: PortSecurity
) -> AsyncIterator[str]:
    """Serve an application; yields its URL, which ends in a slash. ConfigError names ``field`` if the port is taken."""
    listener = listen_with_timeout(host, port, field)
    async with http_server(app, listener, security, grace_seconds=_GRACE_SECONDS) as bound:
        yield f"{security.scheme}://{host_port(_reachable(config, host), bound)}/"


def listen_with_timeout(host: str, port: int, field: str, *, unread_seconds: float = _UNREAD_SECONDS) -> socket.socket:
    """Return a listening socket whose connections close when a client reads nothing for ``unread_seconds``.

    A response in progress keeps its resources: a place among the event clients, or the trajectory of a session. A
    client that disappears or stops reading would keep them forever. Raises ConfigError like ``listen``.
    """
    listener = listen(host, port, field)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))
    return listener


def _reachable(config: RunConfig, host: str) -> str:
    """Return an address to connect to, also if the server is bound to all addresses."""
    if host not in WILDCARDS:
        return host
    return config.network.advertise_host or ("::1" if ":" in host else "127.0.0.1")
