"""A run that starts on scripted generators, and what its batches must look like."""

import numpy as np

from rollmesh.types import OutcomeKind

from .replicas import limits
from .scripted import ScriptedCluster, ScriptedTrainer, answer_of


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


async def start(store, plan, *generators, **overrides):
    await store.limits.init_run(limits(plan, **overrides))
    cluster = ScriptedCluster(store, generators)
    trainer = ScriptedTrainer(store, cluster)
    await trainer.start()
    return cluster, trainer
