"""The calls inside the engine: who waits for a slot, who has one, and what each of them holds."""

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
    """Tokens that it may still get."""
    backlog: Backlog
    context: list[int]
    """Everything that its next token follows."""
    running: bool = False
    """Whether it has a slot; it keeps it between its slices."""
    request_id: str = ""
    """Request under way, empty between two slices."""
    request: asyncio.Future[Any] | None = None
    """The same as a task: cancelled when no answer can come any more."""
    slicing: bool = False
    """A slice has been sent and not been delivered."""
    met_load: bool = False
    """A load happened since the slice was sent."""
    interrupted: bool = False
    """It ends with the tokens that it has."""
    cache_key: str = ""
    floor: int = -1
    """Policy version of its newest token."""
    kv_min: dict[int, int] = field(default_factory=dict)
    """Oldest version in its cache, by the version that samples."""
    refused: set[int] = field(default_factory=set)
    """Versions of its slice that were on trial and not put in service."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when what it waits for may have happened."""

    @property
    def begun(self) -> bool:
        """Whether it has a slot or tokens."""
        return self.running or len(self.context) > len(self.call.context_ids)

    def kv_min_version(self, policy_version: int) -> int:
        """Oldest version in the cache while ``policy_version`` sampled."""
        return min(policy_version, self.kv_min.get(policy_version, policy_version))


class SlotQueue:
    """At most ``slot_count`` calls have a slot; the others wait in order of arrival. One asyncio loop."""

    def __init__(self, slot_count: int) -> None:
        self.slot_count = slot_count
        self.busy_seconds = 0.0
        """Time with at least one running call."""
        self.running_seconds = 0.0
        """Integral of running calls over time."""
        self.standing_still = False
        """Nothing is decoded, whoever has a slot."""
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
        """Calls without one."""
        return len(self._waiting)

    @property
    def context_tokens(self) -> int:
        """Tokens of the running calls' contexts."""
        return sum(len(seat.context) for seat in self._running)

    def enter(self, seat: ServerCall) -> None:
        """Queue a call; from now on, those that are held for their callers have less time."""
        self._waiting.append(seat)
        for other in self._running:
            if other.backlog.blocked:
                other.changed.set()

    def take(self, seat: ServerCall) -> bool:
        """Give the call a slot if one is free and nobody came before it."""
        if not self._waiting or self._waiting[0] is not seat or len(self._running) >= self.slot_count:
            return False
        self.account()
        self._waiting.popleft()
        self._running[seat] = None
        seat.running = True
        self._call_next()
        return True

    def leave(self, seat: ServerCall) -> None:
        """Forget a call; the next one may take its slot."""
        self.account()
        if seat.running:
            del self._running[seat]
            seat.running = False
        else:
            self._waiting.remove(seat)
        self._call_next()

    def wake_all(self) -> None:
        """Let every call look again at what it waits for."""
        for seat in self:
            seat.changed.set()

    def stand_still(self, still: bool) -> None:
        """Decoding stops or goes on."""
        self.account()
        self.standing_still = still

    def account(self) -> None:
        """Add up the time since the last change."""
        now = time.monotonic()
        if self._running and not self.standing_still:
            self.busy_seconds += now - self._since
            self.running_seconds += (now - self._since) * len(self._running)
        self._since = now

    def _call_next(self) -> None:
        if self._waiting and len(self._running) < self.slot_count:
            self._waiting[0].changed.set()
