"""Live events, encoded once for all clients, with no queue per client; and the metrics of the gateway.

A client that reads too slowly misses events and receives a new snapshot instead.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import cached_property

from pydantic import BaseModel

from rollmesh.gateway.models.live import SnapshotEvent, TickEvent
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.request_guard import Busy

_KEPT_TICKS = 16
_KEEP_ALIVE_SECONDS = 15.0
_KEEP_ALIVE = b": still here\n\n"
_RETRY_MILLISECONDS = 2000


ACTIONS = ("pause", "resume", "pin", "unpin", "rollback", "replay", "delete_letter", "scale")


class GatewayMetrics:
    """Metrics of events, polls and actions; ``RequestMetrics`` has those of the requests."""

    def __init__(self, metrics: Metrics) -> None:
        self.event_clients = metrics.gauge("rollmesh_gateway_event_clients", "Clients connected to the live events.")
        self.events = metrics.counter(
            "rollmesh_gateway_events_total", "Live events sent, by kind.", {"kind": ("snapshot", "tick")}
        )
        self.look_seconds = metrics.histogram("rollmesh_gateway_look_seconds", "Duration of a poll of the mesh.")
        self.look_failures = metrics.counter("rollmesh_gateway_look_failures_total", "Polls of the mesh that failed.")
        self.last_look = metrics.gauge(
            "rollmesh_gateway_last_look_timestamp_seconds", "Unix time of the last successful poll of the mesh."
        )
        self.left_out = metrics.gauge(
            "rollmesh_gateway_left_out_trajectories", "Trajectories in progress that do not fit in the timeline."
        )
        self.actions = metrics.counter("rollmesh_gateway_actions_total", "Actions taken, by kind.", {"action": ACTIONS})


@dataclass
class _Tick:
    sequence: int
    event: TickEvent

    @cached_property
    def data(self) -> bytes:
        """Encoded event, computed for the first client that sends it."""
        return _encode("tick", self.sequence, self.event)


class EventHub:
    """Newest events and the clients that follow them."""

    def __init__(
        self, snapshot: Callable[[], SnapshotEvent | None], most_clients: int, metrics: GatewayMetrics
    ) -> None:
        """``snapshot`` returns the complete state, or None before the first poll."""
        self._snapshot = snapshot
        self._most_clients = most_clients
        self._metrics = metrics
        self._ticks: deque[_Tick] = deque(maxlen=_KEPT_TICKS)
        # Ids of an earlier process are below those of this one, so its clients do not continue on another timeline.
        self._sequence = time.time_ns() // 1_000_000
        self._snapshot_data: tuple[int, bytes] = (-1, b"")
        self._clients = 0
        self._closed = False
        self._end: EndEvent | None = None
        self._published = asyncio.Event()

    @property
    def clients(self) -> int:
        """Number of connected clients."""
        return self._clients

    def publish(self, event: TickEvent) -> None:
        """Publish an event and wake every client."""
        self._sequence += 1
        self._ticks.append(_Tick(sequence=self._sequence, event=event))
        self._wake()

    def close(self, end: EndEvent | None = None) -> None:
        """End every client's stream, with ``end`` as its last event."""
        self._closed, self._end = True, end
        self._wake()

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream the events after an id, or a snapshot and the events after it; Busy with too many clients."""
        if self._clients >= self._most_clients:
            raise Busy(
                f"{self._clients} clients already follow the events",
                hint="close a page, or raise gateway.most_event_clients",
            )
        return self._stream(after)

    async def _stream(self, after: int | None) -> AsyncIterator[bytes]:
        self._clients += 1
        self._metrics.event_clients.set(self._clients)
        try:
            yield f"retry: {_RETRY_MILLISECONDS}\n\n".encode()
            # Without a tick, a client that comes back would wait for its first event without end.
            sent = after if self._ticks else None
            while True:
                published = self._published
                if sent is None or not self._has_all_after(sent):
                    sent, data = self._newest_snapshot()
                    if sent is not None:
                        self._metrics.events.labels(kind="snapshot").inc()
                        yield data
                for tick in [tick for tick in self._ticks if sent is not None and tick.sequence > sent]:
                    if tick.sequence - 1 != sent or not self._has_all_after(tick.sequence - 1):
                        break  # sending took so long that the next events are no longer kept
                    sent = tick.sequence
                    self._metrics.events.labels(kind="tick").inc()
                    yield tick.data
                if sent not in (None, self._sequence):
                    continue
                if self._closed:  # asked last: the events before the end are sent first
                    break
                try:
                    async with asyncio.timeout(_KEEP_ALIVE_SECONDS):
                        await published.wait()
                except TimeoutError:
                    yield _KEEP_ALIVE
            if self._end is not None:
                yield _encode("end", self._sequence, self._end)
        finally:
            self._clients -= 1
            self._metrics.event_clients.set(self._clients)

    def _has_all_after(self, sent: int) -> bool:
        """Tell whether every event after this one is still kept; False for an id of an earlier process."""
        oldest = self._ticks[0].sequence if self._ticks else self._sequence + 1
        return oldest - 1 <= sent <= self._sequence

    def _newest_snapshot(self) -> tuple[int | None, bytes]:
        """Return the id and bytes of the newest snapshot; no id before the first poll."""
        if self._snapshot_data[0] != self._sequence:
            event = self._snapshot()
            if event is None:
                return None, b""
            self._snapshot_data = (self._sequence, _encode("snapshot", self._sequence, event))
        return self._snapshot_data

    def _wake(self) -> None:
        self._published.set()
        self._published = asyncio.Event()


def _encode(kind: str, sequence: int, event: BaseModel) -> bytes:
    return f"event: {kind}\nid: {sequence}\ndata: {event.model_dump_json()}\n\n".encode()
