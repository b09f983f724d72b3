"""Trajectories that rest after a segment: a stage in which all of them rest goes on."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.store import TrajectoryStore

from .replicas import running, schedule
from .scenes import check_batch, members, start
from .scripted import ScriptedGenerator, ScriptedReward, length_of

SEGMENT = 8


async def test_every_call_ends_with_its_segment_and_a_stage_in_which_all_rest_goes_on(store: TrajectoryStore) -> None:
    plan = replace(schedule("ulorl", train_steps=2), segment_tokens=SEGMENT)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", slots=64))
    async with running(store, cluster, ScriptedReward(), plan, chunk=2) as replica:
        first = await trainer.train(1)
        check_batch(first, plan)
        for trajectory in members(first):
            begun = {len(context) for context in cluster.contexts[trajectory.trajectory_id]}
            assert begun == set(range(0, length_of(trajectory.trajectory_id, 40), SEGMENT))
        check_batch(await trainer.train(2), plan)
        assert replica.value("rollmesh_rollout_trajectories_parked_total", reason="rested") > 0
