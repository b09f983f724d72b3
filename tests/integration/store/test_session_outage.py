"""A worker's session while Redis is unreachable: the heartbeat loop waits and reports itself alive."""

from __future__ import annotations

import asyncio

from rollmesh.config.store import StoreConfig
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.store import EmbeddedServer, ReRegistered, TrajectoryStore
from rollmesh.worker.worker_session import WorkerSession

from .store_mesh import Mesh


async def test_an_outage_in_the_middle_of_a_recovery_does_not_stop_the_heartbeat_watch(
    own_server: EmbeddedServer,
) -> None:
    beats, away = asyncio.Semaphore(0), asyncio.Event()
    async with await TrajectoryStore.connect(
        StoreConfig(), run="outage", url=own_server.url, retry_seconds=0.05
    ) as store:
        await Mesh.start(store)
        session = WorkerSession(store.sessions, "worker", 0.05, RolloutMetrics(Metrics("rollout")))
        await session.open()
        reregister = store.sessions.reregister

        async def reregister_and_lose_redis(*arguments: object) -> list[ReRegistered]:
            if not away.is_set():
                await asyncio.to_thread(own_server.kill)
                away.set()
            return await reregister(*arguments)  # type: ignore[arg-type]

        store.sessions.reregister = reregister_and_lose_redis  # type: ignore[method-assign]
        lost = session.current
        await store.sessions.close(lost)
        heartbeat = asyncio.create_task(session.keep_alive(beats.release))
        try:
            await asyncio.wait_for(away.wait(), 60)
            while not beats.locked():
                await beats.acquire()
            for _ in range(3):
                await asyncio.wait_for(beats.acquire(), 30)
            assert session.current == lost, "it is still recovering"
            await asyncio.to_thread(own_server.start)
            async with asyncio.timeout(60):
                while session.current == lost:
                    await beats.acquire()
        finally:
            heartbeat.cancel()
            await asyncio.gather(heartbeat, return_exceptions=True)
            await session.close()
