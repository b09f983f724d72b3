"""Listening socket of the gateway."""

from __future__ import annotations

import socket

from rollmesh.runtime.admin_http import listen

_UNREAD_SECONDS = 60.0


def listen_with_timeout(host: str, port: int, field: str, *, unread_seconds: float = _UNREAD_SECONDS) -> socket.socket:
    """Return a listening socket whose connections close when a client reads nothing for ``unread_seconds``.

    A response in progress keeps its resources: a place among the event clients, or the trajectory of a session. A
    client that disappears or stops reading would keep them forever. Raises ConfigError like ``listen``.
    """
    listener = listen(host, port, field)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * unread_seconds))
    return listener
