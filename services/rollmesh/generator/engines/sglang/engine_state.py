"""State of the engine: policy versions, reasons to hold decoding, counters, and the running and waiting calls."""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.generator.engines.engine_protocol import EngineCounters, EngineLost, EngineStatus, SpeculationCounters
from rollmesh.generator.engines.policy_folders import PolicyFolder
from rollmesh.generator.engines.sglang.slices import Slice
from rollmesh.types import GenerationCall


@dataclass(slots=True)
class EngineState:
    """State of one engine; changed in one asyncio loop."""

    queue: "SlotQueue"
    folder: PolicyFolder | None = None
    """The first policy; later policies have the same architecture. None until the engine has started."""
    in_service: int = -1
    """Policy version in service: its tokens may be delivered."""
    on_trial: int | None = None
    """Version in the server that is not in service yet."""
    paused: bool = False
    loading: bool = False
    draining: bool = False
    """True while a load waits for the calls that have started; other calls do not start."""
    closed: bool = False
    failure: EngineLost | None = None
    load_count: int = 0
    cache_space: str = field(default_factory=lambda: secrets.token_hex(4))
    """Prefix of this process's cache keys: an earlier process may have used the same server."""
    server_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the operations that pause and continue the server."""

    def serving(self) -> PolicyFolder:
        """Return the first policy's folder; raise unless the engine serves."""
        if self.folder is None:
            raise EngineError("the engine has not been started")
        if self.closed:
            raise GenerationRefused("the engine has stopped")
        if self.failure is not None:
            raise self.failure
        return self.folder

    def mark_lost(self, error: EngineLost) -> None:
        """Fail every running and later call, because the server is lost."""
        if self.failure is None and not self.closed:
            self.failure = error
            for server_call in self.queue:
                if server_call.request is not None:
                    server_call.request.cancel()
            self.queue.wake_all()


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
        self.counters = EngineCounters()
        self.speculation: SpeculationCounters | None = None
        """None while the server has no drafts."""
        self.paused = False
        """True while decoding is stopped."""
        self.waiting: deque[ServerCall] = deque()
        self._running: dict[ServerCall, None] = {}
        self._since = time.monotonic()

    def __iter__(self) -> Iterator[ServerCall]:
        return iter((*self._running, *self.waiting))

    def enter(self, server_call: ServerCall) -> None:
        """Queue a call; held calls have less time from now on."""
        self.waiting.append(server_call)
        for other in self._running:
            if other.backlog.blocked:
                other.changed.set()

    def take(self, server_call: ServerCall) -> bool:
        """Give the call a slot if one is free and no call arrived before it."""
        if not self.waiting or self.waiting[0] is not server_call or len(self._running) >= self.slot_count:
            return False
        self.account()
        self.waiting.popleft()
        self._running[server_call] = None
        server_call.running = True
        self._wake_next()
        return True

    def leave(self, server_call: ServerCall) -> None:
        self.account()
        if server_call.running:
            del self._running[server_call]
            server_call.running = False
        else:
            self.waiting.remove(server_call)
        self._wake_next()

    def wake_all(self) -> None:
        for server_call in self:
            server_call.changed.set()

    def set_paused(self, paused: bool) -> None:
        self.account()
        self.paused = paused

    def account(self) -> None:
        """Add the time since the last change to the counters."""
        now = time.monotonic()
        if self._running and not self.paused:
            self.counters.busy_seconds_total += now - self._since
            self.counters.running_slot_seconds_total += (now - self._since) * len(self._running)
        self._since = now

    def count_drafts(self, piece: Slice) -> None:
        """Add the drafts of a slice; a server reports none until it has verified some."""
        if piece.verify_count:
            before = self.speculation or SpeculationCounters()
            self.speculation = before.with_steps(
                len(self._running), piece.verify_count, piece.drafted_count, piece.accepted_count
            )

    def status(self) -> EngineStatus:
        self.account()
        return EngineStatus(
            running_count=len(self._running),
            waiting_count=len(self.waiting),
            slot_count=self.slot_count,
            kv_tokens_used=sum(len(server_call.context) for server_call in self._running),
            speculation=self.speculation,
            **asdict(self.counters),
        )

    def _wake_next(self) -> None:
        if self.waiting and len(self._running) < self.slot_count:
            self.waiting[0].changed.set()
