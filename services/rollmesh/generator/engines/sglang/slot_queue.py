"""Running and waiting calls of the engine, and the state of each call."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollmesh.generator.engines.backlog import Backlog
from rollmesh.types import GenerationCall


@dataclass(slots=True, eq=False, kw_only=True)
class ServerCall:
    """State of a call from its arrival to its last chunk."""

    call: GenerationCall
    budget: int
    """Tokens that may still be sampled."""
    backlog: Backlog
    context: list[int]
    """All tokens before the next one."""
    running: bool = False
    """True while the call has a slot; it keeps the slot between its slices."""
    request_id: str = ""
    """Id of the request in progress, empty between two slices."""
    request: asyncio.Future[Any] | None = None
    """Future of the request in progress; cancelled if the server is lost."""
    slicing: bool = False
    """True while a slice has been sent and not been delivered."""
    met_load: bool = False
    """True if weights were loaded since the slice was sent."""
    pauses_before: int = 0
    """Pauses of the server that dropped caches, before the slice was sent."""
    interrupted: bool = False
    """True once the call must end with its current tokens."""
    cache_key: str = ""
    adapter_version: int = -1
    """Version of the adapter that the current slice names."""
    floor: int = -1
    """Policy version of the call's newest token."""
    kv_min: dict[int, int] = field(default_factory=dict)
    """Oldest version in the call's cache, by sampling version."""
    refused: set[int] = field(default_factory=set)
    """Versions of the current slice that were on trial and not put in service."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a waiting call must check its conditions again."""

    @property
    def begun(self) -> bool:
        """True once the call has a slot or new tokens."""
        return self.running or len(self.context) > len(self.call.context_ids)

    def kv_min_version(self, policy_version: int) -> int:
        """Return the oldest version in the cache while ``policy_version`` sampled."""
        return min(policy_version, self.kv_min.get(policy_version, policy_version))


class SlotQueue:
    """Queue in which at most ``slot_count`` calls have a slot; the rest wait in order of arrival. One asyncio loop."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.busy_seconds = 0.0
        """Time with at least one running call."""
        self.running_seconds = 0.0
        """Integral of running calls over time."""
        self.paused = False
        """True while decoding is stopped."""
        self._waiting: deque[ServerCall] = deque()
        self._running: dict[ServerCall, None] = {}
        self._since = time.monotonic()

    def __iter__(self) -> Iterator[ServerCall]:
        return iter((*self._running, *self._waiting))

    @property
    def running_count(self) -> int:
        """Calls with a slot."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Calls without a slot."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens in the contexts of the running calls."""
        return sum(len(server_call.context) for server_call in self._running)

    def enter(self, server_call: ServerCall) -> None:
        """Queue a call; held calls have less time from now on."""
        self._waiting.append(server_call)
        for other in self._running:
            if other.backlog.blocked:
                other.changed.set()

    def take(self, server_call: ServerCall) -> bool:
        """Give the call a slot if one is free and no call arrived before it."""
        if not self._waiting or self._waiting[0] is not server_call or len(self._running) >= self.slot_count:
            return False
        self.account()
        self._waiting.popleft()
        self._running[server_call] = None
        server_call.running = True
        self._wake_next()
        return True

    def leave(self, server_call: ServerCall) -> None:
        """Remove a call; the next call may take its slot."""
        self.account()
        if server_call.running:
            del self._running[server_call]
            server_call.running = False
        else:
            self._waiting.remove(server_call)
        self._wake_next()

    def wake_all(self) -> None:
        """Wake every call to check its conditions again."""
        for server_call in self:
            server_call.changed.set()

    def set_paused(self, paused: bool) -> None:
        """Record that decoding stops or continues."""
        self.account()
        self.paused = paused

    def account(self) -> None:
        """Add the time since the last change to the counters."""
        now = time.monotonic()
        if self._running and not self.paused:
            self.busy_seconds += now - self._since
            self.running_seconds += (now - self._since) * len(self._running)
        self._since = now

    def _wake_next(self) -> None:
        if self._waiting and len(self._running) < self.slot_count:
            self._waiting[0].changed.set()
