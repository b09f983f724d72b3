"""Registry of the live generators: written with every heartbeat, read again only after a change."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from typing import Any

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
        """Remove a generator's record immediately."""
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
            record = _generator(json.loads(data))
            self._records[record.instance_id] = record
            self._ends[record.instance_id] = now + left / 1000
        for instance_id in [name for name, end in self._ends.items() if end < now]:
            del self._records[instance_id], self._ends[instance_id]
        self._version = int(version)
        return int(alive)


def _generator(fields: dict[str, Any]) -> GeneratorRecord:
    return GeneratorRecord(**{**fields, "work": GeneratorWork(**fields["work"])})
