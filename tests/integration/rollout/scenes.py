"""A run that starts on scripted generators, and what its batches must look like."""

import asyncio
from contextlib import asynccontextmanager, suppress

import numpy as np

from rollmesh.errors import StoreUnavailable
from rollmesh.types import OutcomeKind

from .replicas import limits, running, schedule
from .scripted import ScriptedCluster, ScriptedReward, ScriptedTrainer, answer_of


def check_batch(batch, plan, longest=40):
    assert len(batch.groups) == plan.groups_per_batch
    for group in batch.groups:
        assert len(group.trajectories) == plan.group_size
        for trajectory in group.trajectories:
            answer = answer_of(trajectory.trajectory_id, longest)
            assert trajectory.response_ids.tolist() == answer
            logprobs = np.concatenate([s.behavior_logprobs for s in trajectory.segments])
            assert logprobs.tolist() == [-float(t) for t in answer]
            versions = [s.policy_version for s in trajectory.segments]
            assert versions == sorted(versions)
            assert batch.train_step - 1 - versions[0] <= plan.max_staleness
            assert trajectory.outcome.kind is OutcomeKind.SCORED


def all_groups(trainer):
    return [group.group_id for batch in trainer.batches for group in batch.groups]


async def start(store, plan, *generators, trainer_type=ScriptedTrainer, **overrides):
    await store.limits.init_run(limits(plan, **overrides))
    cluster = ScriptedCluster(store, generators)
    trainer = trainer_type(store, cluster)
    await trainer.start()
    return cluster, trainer


async def keep_registered(cluster):
    """Renew the records of the generators, as they do themselves."""
    while True:
        with suppress(StoreUnavailable):
            await cluster.register()
        await asyncio.sleep(0.1)


@asynccontextmanager
async def whole_mesh(store, *generators, steps=1, plan=None, reward=None, max_attempts=3, **options):
    """A replica at work on a run of so many synchronous steps, or of ``plan``; it has the cluster and the trainer."""
    plan = plan or schedule("sync", train_steps=steps)
    cluster, trainer = await start(store, plan, *generators, max_attempts=max_attempts)
    registering = asyncio.create_task(keep_registered(cluster))
    try:
        async with running(store, cluster, reward or ScriptedReward(), plan, **options) as run:
            run.plan, run.cluster, run.trainer = plan, cluster, trainer
            yield run
    finally:
        registering.cancel()


def members(batch):
    return [trajectory for group in batch.groups for trajectory in group.trajectories]


def check_sampled_once(run):
    """Check that every token that was sampled is in a batch."""
    tokens = sum(len(t.response_ids) for batch in run.trainer.batches for t in members(batch))
    sampled = sum(run.value("rollmesh_rollout_sampled_tokens_total", age=str(age)) for age in range(3))
    assert sampled == tokens
