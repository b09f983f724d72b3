"""The gateway's listening socket."""

from __future__ import annotations

import socket

from rollmesh.runtime.admin_http import listen

_DEAF_SECONDS = 60.0


def listen_to_hearers(host: str, port: int, field: str, *, deaf_seconds: float = _DEAF_SECONDS) -> socket.socket:
    """A listening socket whose connections end when a client takes nothing for ``deaf_seconds``.

    An answer under way holds its place until it is told: one of the event clients, or the trajectory of a session.
    A client that has gone without a word, or never reads, would hold it for good. Raises ConfigError as ``listen``.
    """
    listener = listen(host, port, field)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; accepted connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * deaf_seconds))
    return listener
