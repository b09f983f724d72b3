"""Live generators, written with every heartbeat and read again after a change, and their leases to load a policy."""

import asyncio
import dataclasses
import json
import time
from dataclasses import dataclass

from rollmesh.store.limits import QueuePart
from rollmesh.store.redis_connection import Connection
from rollmesh.types import GeneratorRecord, GeneratorWork


class GeneratorRegistry:
    """The registry of generators, with a local copy.

    The copy stores the registry version that it has read, and fetches only the records written since.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = asyncio.Lock()
        self._version = 0
        self._records: dict[str, GeneratorRecord] = {}
        self._ends: dict[str, float] = {}
        """Expiry of each record by the monotonic clock, by instance id."""

    async def register(self, record: GeneratorRecord, ttl: float) -> None:
        """Write or renew a generator's record; it expires ``ttl`` seconds after the last write."""
        await self._connection.run(
            "register_generator", record.instance_id, json.dumps(dataclasses.asdict(record)), int(1000 * ttl)
        )

    async def deregister(self, instance_id: str) -> None:
        await self._connection.run("deregister_generator", instance_id)

    async def live(self) -> list[GeneratorRecord]:
        """Return the live generators, serving or not; an unchanged record is the same object as before."""
        async with self._lock:
            if await self._read() != len(self._records):
                # A generator has left, or Redis came back with an earlier state.
                self._version = 0
                await self._read()
            return list(self._records.values())

    async def _read(self) -> int:
        """Read the records written since the last read and drop expired ones; returns the number that Redis has."""
        version, alive, is_complete, *rows = await self._connection.run("generators", self._version)
        now = time.monotonic()
        if is_complete:
            self._records, self._ends = {}, {}
        for left, data in zip(rows[::2], rows[1::2], strict=True):
            fields = json.loads(data)
            record = GeneratorRecord(**{**fields, "work": GeneratorWork(**fields["work"])})
            self._records[record.instance_id] = record
            self._ends[record.instance_id] = now + left / 1000
        for instance_id in [name for name, end in self._ends.items() if end < now]:
            del self._records[instance_id], self._ends[instance_id]
        self._version = int(version)
        return int(alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReloadHolder:
    """One lease that stands in the way of another."""

    token: str
    seconds_left: float
    """Seconds until the lease ends unless its generator renews it."""


class ReloadLeases(QueuePart):
    """The leases of one run; each is a random token that ends with its time to live."""

    async def begin(self, token: str, *, at_once: int, ttl: float, above_limit: bool = False) -> list[ReloadHolder]:
        """Take a lease for ``ttl`` seconds or renew it; returns up to 16 holders while ``at_once`` others hold one.

        A lease taken ``above_limit`` counts for the others. A repeated call of the same token renews its lease.
        """
        held, *rows = await self._connection.run(
            "begin_reload", token, at_once, int(1000 * ttl), "1" if above_limit else "0"
        )
        if held:
            return []
        return [
            ReloadHolder(token=name.decode(), seconds_left=int(left) / 1000)
            for name, left in zip(rows[::2], rows[1::2], strict=True)
        ]

    async def end(self, token: str) -> bool:
        """End a lease; returns False when it had ended already."""
        return bool(await self._connection.run("end_reload", token))
