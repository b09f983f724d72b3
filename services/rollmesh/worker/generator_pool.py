"""Generators that this worker may call: their records, their load and the ones to avoid; interruption of calls."""

import asyncio
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rollmesh.errors import NoGenerator, RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.store.generator_registry import GeneratorRegistry
from rollmesh.types import GeneratorRecord, VersionNeed
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.routing import Candidates, Placement, can_serve

FIRST_AVOID_SECONDS = 0.1
LONGEST_AVOID_SECONDS = 30.0
_REREAD_SECONDS = 2.0
"""Longest interval between two reads of an unchanged registry: a record may have expired."""


@dataclass(slots=True)
class _Avoided:
    until: float
    seconds: float


@dataclass(slots=True, eq=False)
class _Waiter:
    """A trajectory that waits for a generator able to take its next call."""

    active: ActiveTrajectory
    pinned_version: int | None
    woken: asyncio.Future[None]


@dataclass(slots=True, eq=False)
class GeneratorSlot:
    """Slot taken by one call on one generator, from the choice of the generator to the end of the stream."""

    record: GeneratorRecord
    active: ActiveTrajectory
    need: VersionNeed
    """Requirements of the call when the generator was chosen."""
    _generators: "GeneratorPool"
    aborted: bool = False
    """True once this worker has cut off the call."""
    context_tokens: int = 0
    """Tokens of the context that count as this call's load."""
    _deadline: asyncio.Timeout | None = field(default=None)

    def __enter__(self) -> "GeneratorSlot":
        self._generators.occupy(self)
        self.active.begin_call(self.record.instance_id)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generators.leave(self)

    def grow(self, tokens: int) -> None:
        """Count tokens that the call has sampled."""
        self.context_tokens += tokens
        self._generators.grow(self, tokens)

    def set_deadline(self, deadline: asyncio.Timeout | None) -> None:
        """Register the time-out of the next chunk; ``abort`` triggers it early."""
        self._deadline = deadline
        if deadline is not None and self.aborted:
            self.abort()

    def abort(self) -> None:
        """End the call now; tokens after the last chunk are lost."""
        self.aborted = True
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class GeneratorPool:
    """Records from the registry, this worker's own calls, and generators to avoid after an error."""

    def __init__(
        self,
        registry: GeneratorRegistry,
        clock: Callable[[], float] = time.monotonic,
        placement: Placement = Placement.CALLS,
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._candidates = Candidates(placement)
        self._version = 0
        self._read_at = -math.inf
        self.serving_slots = 0
        """Total slots of the serving generators."""
        self._slots: set[GeneratorSlot] = set()
        self._avoided: dict[str, _Avoided] = {}
        self._waiters: dict[_Waiter, None] = {}
        """Waiters in order of arrival."""
        self._wake_due = False

    @property
    def records(self) -> Mapping[str, GeneratorRecord]:
        """Registered generators by instance."""
        return self._candidates.records

    @property
    def waiting_count(self) -> int:
        """Number of trajectories that wait for a generator."""
        return len(self._waiters)

    @property
    def occupied_slots(self) -> frozenset[GeneratorSlot]:
        """Slots of the calls in progress."""
        return frozenset(self._slots)

    def unserved_version(self) -> int | None:
        """Return the newest version among the tokens of waiting trajectories if no generator serves it, else None.

        Such a trajectory can continue only once a generator loads that version or a newer one.
        """
        tokens = (w.active.newest_version for w in self._waiters if w.pinned_version is None)
        newest = max(tokens, default=-1)
        served = any(r.serving and r.policy_version >= newest for r in self.records.values())
        return None if newest < 0 or served else newest

    def avoided_count(self) -> int:
        """Return the number of generators avoided now."""
        return len(self._avoided_now())

    async def follow(self, version: int) -> None:
        """Read the registry if its version (``Desired.registry_version``) has changed or the last read is too old."""
        now = self._clock()
        if version and version == self._version and now < self._read_at + _REREAD_SECONDS:
            self.wake()
            return
        await self.refresh()
        self._version, self._read_at = version, now

    async def refresh(self) -> None:
        """Read the registry; calls on a generator that has left it continue, because it may be draining."""
        found = {record.instance_id: record for record in await self._registry.live()}
        self._candidates.update(found)
        self.serving_slots = sum(r.slot_count for r in found.values() if r.serving)
        self._avoided = {name: a for name, a in self._avoided.items() if name in found}
        self.wake()

    def wake(self) -> None:
        """Wake the waiters that must stop, and as many others as there are free slots for them."""
        self._wake_due = False
        if self._waiters:
            for waiter in [waiter for waiter in self._waiters if not waiter.active.wanted]:
                self._wake(waiter)
            self._wake_able()

    async def acquire(
        self, active: ActiveTrajectory, pinned_version: int | None = None, *, unserved_seconds: float | None = None
    ) -> GeneratorSlot:
        """Wait for a generator for the next call of a trajectory; returns a slot to use as a context manager.

        The requirements are read at every attempt, because the version floors may rise during the wait. Raises Parked
        or LetGo if the trajectory must stop, and NoGenerator after a wait of ``unserved_seconds`` at whose end no
        registered generator serves a version that the call may use; None waits without a limit.
        """
        while True:
            active.check()
            need = VersionNeed(min_version=active.min_version, pinned_version=pinned_version)
            record = self._candidates.choose(need, avoided=self._avoided_now(), cached=_cached(active))
            if record is not None:
                return GeneratorSlot(record=record, active=active, need=need, _generators=self)
            waiter = _Waiter(active, pinned_version, asyncio.get_running_loop().create_future())
            self._waiters[waiter] = None
            try:
                async with asyncio.timeout(unserved_seconds):
                    await waiter.woken
            except TimeoutError as error:
                if not any(can_serve(record, need) for record in self.records.values()):
                    raise NoGenerator(f"no generator serves the call for {unserved_seconds:g} s") from error
            finally:
                self._waiters.pop(waiter, None)

    def occupy(self, slot: GeneratorSlot) -> None:
        """Count a call; called by ``GeneratorSlot``."""
        self._slots.add(slot)
        name = slot.record.instance_id
        slot.context_tokens = slot.active.prompt_token_count + slot.active.token_count
        self._candidates.occupy(name, slot.context_tokens, _cached(slot.active))

    def grow(self, slot: GeneratorSlot, tokens: int) -> None:
        """Count sampled tokens; called by ``GeneratorSlot``."""
        self._candidates.grow(slot.record.instance_id, tokens)

    def leave(self, slot: GeneratorSlot) -> None:
        """Stop counting a call; called by ``GeneratorSlot``."""
        self._slots.discard(slot)
        self._candidates.leave(slot.record.instance_id, slot.context_tokens)
        if self._waiters and not self._wake_due:
            # Wake once for all calls that end together: a new version may end every call of the worker at once.
            self._wake_due = True
            asyncio.get_running_loop().call_soon(self.wake)

    def clear_avoidance(self, instance_id: str) -> None:
        """Stop avoiding a generator, after a valid chunk."""
        if self._avoided:
            self._avoided.pop(instance_id, None)

    def avoid(self, instance_id: str, at_least: float = FIRST_AVOID_SECONDS) -> float:
        """Avoid a generator for a while, doubled for each failure in a row; returns the seconds left."""
        before = self._avoided.get(instance_id)
        now = self._clock()
        if before is not None and before.until > now:
            return before.until - now
        seconds = at_least if before is None else min(LONGEST_AVOID_SECONDS, max(at_least, 2 * before.seconds))
        self._avoided[instance_id] = _Avoided(until=now + seconds, seconds=seconds)
        return seconds

    def _avoided_now(self) -> set[str]:
        if not self._avoided:
            return set()
        now = self._clock()
        return {name for name, a in self._avoided.items() if a.until > now}

    def _wake_able(self) -> None:
        """Wake the first waiters that a generator can take, at most one per free slot and kind of requirement."""
        avoided = self._avoided_now()
        left: dict[tuple[int, int | None], int] = {}
        able: list[_Waiter] = []
        for waiter in self._waiters:
            # The version floors may rise while a trajectory waits.
            kind = (waiter.active.min_version, waiter.pinned_version)
            if kind not in left:
                need = VersionNeed(min_version=kind[0], pinned_version=kind[1])
                able_now = self._candidates.choose(need, avoided=avoided) is not None
                left[kind] = max(1, self._candidates.free_slots(need, avoided)) if able_now else 0
            if left[kind] > 0:
                left[kind] -= 1
                able.append(waiter)
        for waiter in able:
            self._wake(waiter)

    def _wake(self, waiter: _Waiter) -> None:
        del self._waiters[waiter]
        if not waiter.woken.done():
            waiter.woken.set_result(None)


def _cached(active: ActiveTrajectory) -> tuple[str, str]:
    """Return the ids of what a call leaves in its generator's cache: a session's next turn continues its tokens."""
    return active.trajectory_id, active.trajectory.prompt.prompt_id


class Interrupter:
    """Interrupter of calls in progress; their streams end as ``interrupted`` with every sampled token."""

    def __init__(self, client: GenerationClient, generators: GeneratorPool, grace_seconds: float) -> None:
        self._client = client
        self._generators = generators
        self._grace_seconds = grace_seconds
        self._tasks = BackgroundTasks()
        self._log = get_logger("interrupts")

    def start(self, slots: Collection[GeneratorSlot]) -> None:
        """Interrupt these calls in the background; cut off those that must stop and run beyond the grace period."""
        if slots:
            self._tasks.start(self._interrupt(list(slots)), "interrupt")

    async def _interrupt(self, slots: list[GeneratorSlot]) -> None:
        calls: dict[str, tuple[GeneratorRecord, list[str]]] = {}
        for slot in slots:
            calls.setdefault(slot.record.instance_id, (slot.record, []))[1].append(slot.active.trajectory_id)
        await asyncio.gather(*(self._request(record, ids) for record, ids in calls.values()))
        await asyncio.sleep(self._grace_seconds)
        for slot in self._generators.occupied_slots.intersection(slots):
            if not slot.active.wanted:
                slot.abort()

    async def _request(self, record: GeneratorRecord, trajectory_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._client.interrupt(record, trajectory_ids)
        except (RollmeshError, TimeoutError) as error:
            self._log.warning("interrupt_failed", generator=record.instance_id, message=str(error))
