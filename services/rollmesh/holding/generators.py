"""The generators this worker may call: who is there, how busy, whom to avoid."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rollmesh.holding.held import Held
from rollmesh.holding.routing import Need, choose_generator
from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord

FIRST_AVOID_SECONDS = 0.1
LONGEST_AVOID_SECONDS = 30.0
_REMEMBERED_GROUPS = 65_536


@dataclass(slots=True)
class _Avoided:
    until: float
    seconds: float


@dataclass(slots=True, eq=False)
class Seat:
    """One call on one generator, from the choice to the end of its stream."""

    record: GeneratorRecord
    held: Held
    need: Need
    """What the call needed of its generator when this one was chosen."""
    _generators: Generators
    aborted: bool = False
    """Whether the call was cut off from this side."""
    _deadline: asyncio.Timeout | None = field(default=None)

    def __enter__(self) -> Seat:
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


class Generators:
    """Records from the registry, this worker's own calls, and time-outs for generators that misbehaved."""

    def __init__(self, store: TrajectoryStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._records: dict[str, GeneratorRecord] = {}
        self._in_flight: dict[str, int] = {}
        self._seats: set[Seat] = set()
        self._avoided: dict[str, _Avoided] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        self._changed: asyncio.Future[None] | None = None
        self.waiting_count = 0
        """Trajectories that wait for a generator able to take them."""

    @property
    def records(self) -> Mapping[str, GeneratorRecord]:
        """Registered generators by instance."""
        return self._records

    @property
    def seats(self) -> frozenset[Seat]:
        """Calls under way."""
        return frozenset(self._seats)

    @property
    def serving_slots(self) -> int:
        """Slots of the generators that serve."""
        return sum(r.slot_count for r in self._records.values() if r.serving)

    def avoided_count(self) -> int:
        """Generators avoided right now."""
        now = self._clock()
        return sum(1 for a in self._avoided.values() if a.until > now)

    async def refresh(self) -> None:
        """Read the registry. Calls on a generator that has left it go on: it may be draining, with tokens to send."""
        found = {record.instance_id: record for record in await self._store.generators()}
        self._records = found
        self._avoided = {name: a for name, a in self._avoided.items() if name in found}
        self.wake()

    def wake(self) -> None:
        """Let everyone who waits for a generator look again."""
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None

    async def acquire(self, held: Held, pinned_version: int | None = None) -> Seat:
        """A seat for the next call of a trajectory, once a generator can take it; use it as a context manager.

        What the call needs is read at every try: the version floors may rise while it waits. Raises Parked or LetGo
        when the trajectory has to stop while it waits.
        """
        while True:
            held.check()
            need = Need(min_version=held.min_version, pinned_version=pinned_version, group_id=held.trajectory.group_id)
            record = self._choose(need)
            if record is not None:
                return Seat(record=record, held=held, need=need, _generators=self)
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            self.waiting_count += 1
            try:
                await asyncio.shield(self._changed)
            finally:
                self.waiting_count -= 1

    def occupy(self, seat: Seat) -> None:
        """Count a call; seats do so themselves."""
        self._seats.add(seat)
        name = seat.record.instance_id
        self._in_flight[name] = self._in_flight.get(name, 0) + 1
        group = seat.held.trajectory.group_id
        self._homes[group] = name
        self._homes.move_to_end(group)
        if len(self._homes) > _REMEMBERED_GROUPS:
            self._homes.popitem(last=False)

    def leave(self, seat: Seat) -> None:
        """The call is over."""
        self._seats.discard(seat)
        name = seat.record.instance_id
        self._in_flight[name] -= 1
        if not self._in_flight[name]:
            del self._in_flight[name]

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
        now = self._clock()
        avoided = {name for name, a in self._avoided.items() if a.until > now}
        return choose_generator(
            list(self._records.values()),
            self._in_flight,
            need,
            avoided=avoided,
            preferred=self._homes.get(need.group_id),
        )
