"""Acknowledgement of saved tokens to the generators.

A generator samples at most ``SaveLimits.unacknowledged_token_limit`` tokens beyond the acknowledged ones.
"""

from __future__ import annotations

import asyncio

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.types import GeneratorRecord
from rollmesh.wire.generation_client import GenerationClient

_LIMIT_SECONDS = 5.0


class Acknowledger:
    """Background sender of acknowledgements: one call at a time per generator, later ones wait and are sent together.

    A lost acknowledgement is not an error. The generator holds the call for a while and ends it as interrupted; the
    next call continues from the tokens in the queue.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._waiting: dict[str, dict[str, int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = get_logger("acknowledging")

    def saved(self, record: GeneratorRecord, trajectory_id: str, context_token_count: int) -> None:
        """Acknowledge the durable length of a trajectory, prompt included, to the generator that continues it."""
        name = record.instance_id
        self._waiting.setdefault(name, {})[trajectory_id] = context_token_count
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._send(record), name="acknowledge")

    async def _send(self, record: GeneratorRecord) -> None:
        name = record.instance_id
        try:
            while batch := self._waiting.pop(name, None):
                try:
                    async with asyncio.timeout(_LIMIT_SECONDS):
                        await self._client.acknowledge(record, batch)
                except (RollmeshError, TimeoutError) as error:
                    self._log.debug("acknowledgement_failed", generator=name, message=str(error))
        finally:
            del self._tasks[name]
