"""Live events: one look is turned into bytes once, however many clients listen, and no client is waited for.

A client that reads too slowly finds that the events after its last one are gone, and gets a snapshot instead: nothing
is queued for anybody.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from rollmesh.gateway.api_errors import Busy
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.models import SnapshotEvent, TickEvent

_KEPT_TICKS = 16
_KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": still here\n\n"
_RETRY_MILLISECONDS = 2000


@dataclass
class _Tick:
    sequence: int
    event: TickEvent

    @cached_property
    def data(self) -> bytes:
        """As it is sent; made for the first client that wants it."""
        return _encode("tick", self.sequence, self.event)


class EventHub:
    """The newest looks, and the clients that follow them."""

    def __init__(
        self, snapshot: Callable[[], SnapshotEvent | None], most_clients: int, metrics: GatewayMetrics
    ) -> None:
        """``snapshot`` gives everything that is known now; None before the first look."""
        self._snapshot = snapshot
        self._most_clients = most_clients
        self._metrics = metrics
        self._ticks: deque[_Tick] = deque(maxlen=_KEPT_TICKS)
        self._sequence = 0
        self._snapshot_data: tuple[int, bytes] = (-1, b"")
        self._clients = 0
        self._closed = False
        self._news = asyncio.Event()

    @property
    def clients(self) -> int:
        """Clients that follow."""
        return self._clients

    def publish(self, event: TickEvent) -> None:
        """One more look: wakes every client."""
        self._sequence += 1
        self._ticks.append(_Tick(sequence=self._sequence, event=event))
        self._wake()

    def close(self) -> None:
        """End every client's stream."""
        self._closed = True
        self._wake()

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Events after an id, or a snapshot and what follows; Busy when too many clients follow already."""
        if self._clients >= self._most_clients:
            raise Busy(
                f"{self._clients} clients follow the events already",
                hint="close a page, or raise gateway.most_event_clients",
            )
        return self._stream(after)

    async def _stream(self, after: int | None) -> AsyncIterator[bytes]:
        self._clients += 1
        self._metrics.event_clients.set(self._clients)
        try:
            yield f"retry: {_RETRY_MILLISECONDS}\n\n".encode()
            sent = after
            while not self._closed:
                news = self._news
                if sent is None or not self._known_after(sent):
                    sent, data = self._newest_snapshot()
                    if sent is not None:
                        self._metrics.events.labels(kind="snapshot").inc()
                        yield data
                for tick in self._ticks_after(sent):
                    if not self._known_after(tick.sequence - 1):
                        break  # the last one took this client so long that the next ones are gone
                    sent = tick.sequence
                    self._metrics.events.labels(kind="tick").inc()
                    yield tick.data
                if sent in (None, self._sequence) and not await _happens(news):
                    yield _KEEP_ALIVE
        finally:
            self._clients -= 1
            self._metrics.event_clients.set(self._clients)

    def _ticks_after(self, sent: int | None) -> list[_Tick]:
        """What follows an event, without a gap; nothing when a part of it is gone."""
        if sent is None or not self._known_after(sent):
            return []
        return [tick for tick in self._ticks if tick.sequence > sent]

    def _known_after(self, sent: int) -> bool:
        """Whether every event after this one is still here; an id of another process is beyond all of them."""
        oldest = self._ticks[0].sequence if self._ticks else self._sequence + 1
        return oldest - 1 <= sent <= self._sequence

    def _newest_snapshot(self) -> tuple[int | None, bytes]:
        """Its id and bytes; no id while there is nothing to show."""
        if self._snapshot_data[0] != self._sequence:
            event = self._snapshot()
            if event is None:
                return None, b""
            self._snapshot_data = (self._sequence, _encode("snapshot", self._sequence, event))
        return self._snapshot_data

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def _happens(news: asyncio.Event) -> bool:
    try:
        async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
            await news.wait()
    except TimeoutError:
        return False
    return True


def _encode(kind: str, sequence: int, event: BaseModel) -> bytes:
    return f"event: {kind}\nid: {sequence}\ndata: {event.model_dump_json()}\n\n".encode()
