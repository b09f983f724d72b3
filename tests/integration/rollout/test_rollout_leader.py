"""What a leader does when Redis comes back as an earlier state."""

from __future__ import annotations

import asyncio

from rollmesh.config.services import EvalConfig
from rollmesh.rollout.leader import Leader
from rollmesh.rollout.metrics import RolloutMetrics
from rollmesh.rollout.periodic import PeriodicEvaluations
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics

from .replicas import limits, schedule
from .scripted import ScriptedCluster, ScriptedGenerator, ScriptedPrompts, ScriptedTrainer
from .waiting import until


async def test_a_desired_state_that_redis_has_forgotten_is_written_again(store) -> None:
    """The lead survives in the restored state, so nothing else would make the leader write."""
    plan = schedule("copris")
    await store.init_run(limits(plan))
    trainer = ScriptedTrainer(store, ScriptedCluster(store, [ScriptedGenerator("a")]))
    await trainer.start()
    leader = Leader(
        store,
        plan,
        ScriptedPrompts,
        PeriodicEvaluations(store, EvalConfig()),
        candidate="only",
        renew_seconds=0.5,
        metrics=RolloutMetrics(Metrics("rollout")),
        health=Health(),
    )
    shutdown = asyncio.Event()
    leading = asyncio.create_task(leader.run(shutdown))

    async def working() -> bool:
        desired = await store.desired()
        return desired.pool_size == plan.pool_size and not desired.paused

    await until(working)
    keys, command = store.connection.keys, store.connection.command
    await command("HSET", keys.single("desired"), "paused", 1, "reason", "from before")
    await command("HSET", keys.single("meta"), "run_id", "another")
    assert not await working()
    await until(working)
    shutdown.set()
    await leading
