"""The generators this worker may call: who is there, how busy, whom to avoid."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.routing import Candidates, Need

FIRST_AVOID_SECONDS = 0.1
LONGEST_AVOID_SECONDS = 30.0
_REMEMBERED_GROUPS = 65_536
_REREAD_SECONDS = 2.0
"""How often records are read although the registry has not changed: one may have expired."""


def _need_of(held: ActiveTrajectory, pinned_version: int | None) -> Need:
    return Need(min_version=held.min_version, pinned_version=pinned_version, group_id=held.trajectory.group_id)


@dataclass(slots=True)
class _Avoided:
    until: float
    seconds: float


@dataclass(slots=True, eq=False)
class _Waiter:
    """A trajectory that waits for a generator able to take its next call."""

    held: ActiveTrajectory
    pinned_version: int | None
    woken: asyncio.Future[None]

    @property
    def need(self) -> Need:
        """What the call needs now: the version floors may have risen since it began to wait."""
        return _need_of(self.held, self.pinned_version)


@dataclass(slots=True, eq=False)
class GeneratorSlot:
    """One call on one generator, from the choice to the end of its stream."""

    record: GeneratorRecord
    held: ActiveTrajectory
    need: Need
    """What the call needed of its generator when this one was chosen."""
    _generators: GeneratorPool
    aborted: bool = False
    """Whether the call was cut off from this side."""
    _deadline: asyncio.Timeout | None = field(default=None)

    def __enter__(self) -> GeneratorSlot:
        self._generators.occupy(self)
        self.held.generator = self.record.instance_id
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._generators.leave(self)

    def waiting_until(self, deadline: asyncio.Timeout | None) -> None:
        """Register the time-out that guards the next chunk; ``abort`` fires it early."""
        self._deadline = deadline
        if deadline is not None and self.aborted:
            self.abort()

    def abort(self) -> None:
        """End the call now: tokens after the last chunk are given up."""
        self.aborted = True
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())


class GeneratorPool:
    """Records from the registry, this worker's own calls, and time-outs for generators that misbehaved."""

    def __init__(self, store: TrajectoryStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._candidates = Candidates()
        self._version = 0
        self._read_at = -math.inf
        self._serving_slots = 0
        self._seats: set[GeneratorSlot] = set()
        self._avoided: dict[str, _Avoided] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._waiters: dict[_Waiter, None] = {}
        """In the order in which they came."""
        self._wake_due = False

    @property
    def records(self) -> Mapping[str, GeneratorRecord]:
        """Registered generators by instance."""
        return self._candidates.records

    @property
    def waiting_count(self) -> int:
        """Trajectories that wait for a generator able to take them."""
        return len(self._waiters)

    @property
    def seats(self) -> frozenset[GeneratorSlot]:
        """Calls under way."""
        return frozenset(self._seats)

    @property
    def serving_slots(self) -> int:
        """Slots of the generators that serve."""
        return self._serving_slots

    def avoided_count(self) -> int:
        """Generators avoided right now."""
        now = self._clock()
        return sum(1 for a in self._avoided.values() if a.until > now)

    async def follow(self, version: int) -> None:
        """Read the registry if its version (``Desired.registry_version``) is another one than at the last read."""
        now = self._clock()
        if version and version == self._version and now < self._read_at + _REREAD_SECONDS:
            self.wake()
            return
        await self.refresh()
        self._version, self._read_at = version, now

    async def refresh(self) -> None:
        """Read the registry. Calls on a generator that has left it go on: it may be draining, with tokens to send."""
        found = {record.instance_id: record for record in await self._store.generators()}
        self._candidates.update(found)
        self._serving_slots = sum(r.slot_count for r in found.values() if r.serving)
        self._avoided = {name: a for name, a in self._avoided.items() if name in found}
        self.wake()

    def wake(self) -> None:
        """Wake the waiters that have to stop, and as many others as generators that can take them have free slots."""
        self._wake_due = False
        if not self._waiters:
            return
        for waiter in [waiter for waiter in self._waiters if not waiter.held.wanted]:
            self._wake(waiter)
        avoided = self._avoided_now()
        self._wake_able(lambda need: max(1, self._candidates.free_slots(need, avoided)))

    async def acquire(self, held: ActiveTrajectory, pinned_version: int | None = None) -> GeneratorSlot:
        """A seat for the next call of a trajectory, once a generator can take it; use it as a context manager.

        What the call needs is read at every try: the version floors may rise while it waits. Raises Parked or LetGo
        when the trajectory has to stop while it waits.
        """
        while True:
            held.check()
            need = _need_of(held, pinned_version)
            record = self._choose(need)
            if record is not None:
                return GeneratorSlot(record=record, held=held, need=need, _generators=self)
            waiter = _Waiter(held, pinned_version, asyncio.get_running_loop().create_future())
            self._waiters[waiter] = None
            try:
                await waiter.woken
            finally:
                self._waiters.pop(waiter, None)

    def occupy(self, seat: GeneratorSlot) -> None:
        """Count a call; seats do so themselves."""
        self._seats.add(seat)
        name = seat.record.instance_id
        self._candidates.occupy(name)
        group = seat.held.trajectory.group_id
        self._homes[group] = name
        self._homes.move_to_end(group)
        if len(self._homes) > _REMEMBERED_GROUPS:
            self._homes.popitem(last=False)

    def leave(self, seat: GeneratorSlot) -> None:
        """The call is over."""
        self._seats.discard(seat)
        self._candidates.leave(seat.record.instance_id)
        if self._waiters and not self._wake_due:
            # Once for all calls that end together: a new version may end every call of the worker at once.
            self._wake_due = True
            asyncio.get_running_loop().call_soon(self.wake)

    def answered_well(self, instance_id: str) -> None:
        """A good chunk came: earlier trouble is forgiven."""
        if self._avoided:
            self._avoided.pop(instance_id, None)

    def avoid(self, instance_id: str, at_least: float = FIRST_AVOID_SECONDS) -> float:
        """Send nothing to a generator for a while, twice as long each time in a row; returns the seconds."""
        before = self._avoided.get(instance_id)
        now = self._clock()
        if before is not None and before.until > now:
            return before.until - now
        seconds = at_least if before is None else min(LONGEST_AVOID_SECONDS, max(at_least, 2 * before.seconds))
        self._avoided[instance_id] = _Avoided(until=now + seconds, seconds=seconds)
        return seconds

    def _choose(self, need: Need) -> GeneratorRecord | None:
        return self._candidates.choose(need, avoided=self._avoided_now(), preferred=self._homes.get(need.group_id))

    def _avoided_now(self) -> set[str]:
        if not self._avoided:
            return set()
        now = self._clock()
        return {name for name, a in self._avoided.items() if a.until > now}

    def _wake_able(self, most: Callable[[Need], int]) -> None:
        """Wake the first waiters that a generator can take; ``most`` says how many with such a need there may be."""
        left: dict[tuple[int, int | None], int] = {}
        able: list[_Waiter] = []
        for waiter in self._waiters:
            kind = (waiter.held.min_version, waiter.pinned_version)
            if kind not in left:
                need = waiter.need
                left[kind] = most(need) if self._choose(need) is not None else 0
            if left[kind] > 0:
                left[kind] -= 1
                able.append(waiter)
        for waiter in able:
            self._wake(waiter)

    def _wake(self, waiter: _Waiter) -> None:
        del self._waiters[waiter]
        if not waiter.woken.done():
            waiter.woken.set_result(None)
