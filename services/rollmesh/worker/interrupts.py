"""Interruption of calls without loss of tokens; a call that still runs after a grace period is cut off."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.types import GeneratorRecord
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot


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
