"""HTTP/1.1 protocol for uvicorn with a time limit for the head of a request.

h11 limits the size of a head (64 KiB). uvicorn limits neither the time of a head nor that of a connection that never
sends one.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0


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
