"""Loops of one rollout process, from the first heartbeat to the last release."""

from __future__ import annotations

import asyncio

from rollmesh.rollout.evaluation.evaluator import Evaluator
from rollmesh.rollout.leader import MeshLeader
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.worker.worker import Worker
from rollmesh.worker.worker_session import WorkerSession

_HEARTBEAT_DEADLINE_SECONDS = 120.0


class Replica:
    """Session, worker, leader and evaluator of one process."""

    def __init__(
        self, session: WorkerSession, worker: Worker, leader: MeshLeader, evaluator: Evaluator, health: Health
    ) -> None:
        self._session = session
        self._worker = worker
        self._leader = leader
        self._evaluator = evaluator
        self._health = health

    async def run(self, shutdown: Shutdown) -> None:
        """Run all loops until shutdown; the failure of one ends the replica after a drain."""
        await self._session.open()
        self._health.watch("heartbeat", _HEARTBEAT_DEADLINE_SECONDS)
        heartbeat = asyncio.create_task(
            self._session.keep_alive(lambda: self._health.beat("heartbeat")), name="heartbeat"
        )
        evaluating = asyncio.create_task(self._evaluator.run(), name="evaluator")
        loops = [
            asyncio.create_task(self._worker.run(shutdown), name="worker"),
            asyncio.create_task(self._leader.run(shutdown), name="leader"),
        ]
        try:
            await asyncio.wait([heartbeat, evaluating, *loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            shutdown.set()
            evaluating.cancel()
            ended = await asyncio.gather(*loops, evaluating, return_exceptions=True)
            ended += await cancel_and_wait(heartbeat)
            self._health.unwatch("heartbeat")
            await self._session.close()
        raise_first_error(ended)
        get_logger("rollout").info("stopped")
