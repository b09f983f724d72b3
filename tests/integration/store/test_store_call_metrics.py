"""Metrics of a service's calls to the store."""

from __future__ import annotations

import asyncio

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import SessionLost
from rollmesh.mesh import RunLimits
from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import Metrics
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.store.store_metrics import StoreCallMetrics

LIMITS = RunLimits(
    group_size=2,
    groups_per_batch=2,
    max_staleness=1,
    max_attempts=2,
    session_ttl_seconds=5.0,
    filter_zero_variance=False,
    mask_old_segments=False,
    train_steps=3,
)


def shown(metrics: Metrics, name: str) -> float:
    return metrics.registry.get_sample_value(f"rollmesh_reward_store_call_{name}") or 0.0


async def test_calls_are_timed_and_tries_without_an_answer_counted(own_server: EmbeddedServer) -> None:
    metrics = Metrics("reward")
    store = await TrajectoryStore.connect(
        StoreConfig(), run="timed", url=own_server.url, retry_seconds=60.0, observer=StoreCallMetrics(metrics, Waits())
    )
    async with store:
        await store.limits.init_run(LIMITS)
        await store.mesh.view()
        before = shown(metrics, "seconds_count")
        await store.mesh.view()
        assert shown(metrics, "seconds_count") == before + 1
        # A wait for news is no slow answer, and a refusal is an answer.
        assert await store.policies.wait(-1, 0.05) is None
        assert shown(metrics, "seconds_count") == before + 1
        with pytest.raises(SessionLost):
            await store.leadership.cut("no leader's token", 1, ["e0-0"])
        assert shown(metrics, "failures_total") == 0
        own_server.kill()
        unanswered = asyncio.create_task(store.mesh.view())
        # Each try counts by itself, while the call goes on.
        while shown(metrics, "failures_total") < 2:
            assert not unanswered.done()
            await asyncio.sleep(0.01)
        unanswered.cancel()
        await asyncio.wait({unanswered})
        assert shown(metrics, "seconds_count") == before + 1
