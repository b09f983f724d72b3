"""Ending calls early without losing their tokens: generators are asked to, and cut off only if they do not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.types import GeneratorRecord
from rollmesh.worker.client_protocols import GenerationPort
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot


class Interrupter:
    """Interrupts calls under way; their streams end as ``interrupted`` with every token that was sampled."""

    def __init__(self, client: GenerationPort, generators: GeneratorPool, grace_seconds: float) -> None:
        self._client = client
        self._generators = generators
        self._grace_seconds = grace_seconds
        self._tasks: set[asyncio.Task[None]] = set()
        self._log = get_logger("interrupts")

    def start(self, seats: Collection[GeneratorSlot]) -> None:
        """Interrupt these calls in the background; one that still runs after the grace period is cut off."""
        if seats:
            task = asyncio.create_task(self._interrupt(list(seats)), name="interrupt")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _interrupt(self, seats: list[GeneratorSlot]) -> None:
        calls: dict[str, tuple[GeneratorRecord, list[str]]] = {}
        for seat in seats:
            calls.setdefault(seat.record.instance_id, (seat.record, []))[1].append(seat.held.trajectory_id)
        await asyncio.gather(*(self._ask(record, ids) for record, ids in calls.values()))
        await asyncio.sleep(self._grace_seconds)
        for seat in self._generators.seats.intersection(seats):
            if not seat.held.wanted:
                seat.abort()

    async def _ask(self, record: GeneratorRecord, trajectory_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._client.interrupt(record, trajectory_ids)
        except (RollmeshError, TimeoutError) as error:
            self._log.warning("interrupt_failed", generator=record.instance_id, message=str(error))
