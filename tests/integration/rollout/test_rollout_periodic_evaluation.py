"""Every k-th version is evaluated during training: one generator is pinned, the others load newer versions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from rollmesh.config.evaluation import EvalConfig
from rollmesh.rollout.evaluation.periodic import PeriodicEvaluations

from .replicas import limits, running, schedule
from .scripted import ScriptedCluster, ScriptedGenerator, ScriptedReward, ScriptedTrainer, record_of
from .waiting import until


@dataclass
class FollowingTrainer(ScriptedTrainer):
    """Announces only: generators find their policy themselves, as real ones do."""

    behind: list[tuple[int, int]] = field(default_factory=list)
    """(oldest, newest) version served, whenever they differed while a pin was set."""

    async def announce(self, step: int) -> None:
        await self.store.policies.announce(self.session, record_of(step))
        await self.follow()

    async def follow(self) -> None:
        for name, generator in self.cluster.generators.items():
            policy = (await self.store.policies.outlook(name)).effective
            if policy is not None and policy.policy_version != generator.version:
                generator.load(policy.policy_version)
        await self.cluster.register()
        served = [generator.version for generator in self.cluster.generators.values()]
        if min(served) < max(served) and await self.store.policies.pinned() is not None:
            self.behind.append((min(served), max(served)))

    async def keep_following(self) -> None:
        while True:
            await self.follow()
            await asyncio.sleep(0.05)


async def test_every_second_version_is_evaluated_during_training(store) -> None:
    plan = schedule("copris", train_steps=6)
    await store.limits.init_run(limits(plan))
    cluster = ScriptedCluster(store, [ScriptedGenerator(n, seconds_per_token=0.01, slots=16) for n in ("a", "b")])
    trainer = FollowingTrainer(store, cluster)
    await trainer.start()
    following = asyncio.create_task(trainer.keep_following())
    config = EvalConfig(every_versions=2, prompt_count=12, samples_per_prompt=2)
    async with running(store, cluster, ScriptedReward(), plan, evaluation=config) as run:
        for step in range(1, 7):
            await trainer.train(step)

        async def results():
            records = await store.evaluations.all()
            return records if len(records) == 3 and all(r.result for r in records) else None

        records = await until(results)
        tokens = run.value("rollmesh_rollout_evaluation_tokens_total")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert [r.request.evaluation_id for r in records] == ["version-2", "version-4", "version-6"]
    assert [(r.result.sample_count, r.result.discarded_count) for r in records] == [(24, 0)] * 3
    assert [r.result.mean for r in records] == pytest.approx([0.5] * 3)
    # The versions under evaluation stayed served while a newer one was served beside them.
    assert {oldest for oldest, _ in trainer.behind} & {2, 4}
    assert await store.policies.pinned() is None
    assert tokens == sum(round(r.result.details["mean_length"] * 24) for r in records)


async def test_a_new_leader_asks_for_what_is_due_and_not_again_for_what_was_asked(store) -> None:
    plan = schedule("copris", train_steps=5)
    await store.limits.init_run(limits(plan))
    cluster = ScriptedCluster(store, [ScriptedGenerator("a")])
    trainer = ScriptedTrainer(store, cluster)
    await trainer.start()
    async with running(store, cluster, ScriptedReward(), plan):
        for step in range(1, 6):
            await trainer.train(step)
    config = EvalConfig(every_versions=2, prompt_count=2)
    for _ in range(2):
        async with running(store, cluster, ScriptedReward(), plan, evaluation=config):

            async def results():
                await cluster.register()
                records = await store.evaluations.all()
                return records if records and all(r.claimed or r.result for r in records) else None

            records = await until(results)
        # Version 2 is two evaluations back: its weights may be gone, no evaluation needs it.
        assert [r.request.policy_version for r in records] == [4]


async def test_a_leader_whose_queue_was_lost_asks_for_no_version_that_may_be_pruned(store) -> None:
    config = EvalConfig(every_versions=3, prompt_count=2)
    # Version 3 is due; of versions 0 to 5 the two, or three, newest are kept.
    await PeriodicEvaluations(store.evaluations, config, keep_last=2).request_due(5)
    assert await store.evaluations.all() == []
    await PeriodicEvaluations(store.evaluations, config, keep_last=3).request_due(5)
    assert [r.request.policy_version for r in await store.evaluations.all()] == [3]


async def test_a_leader_of_an_empty_queue_asks_for_no_pruned_version_once_the_trainer_is_back(store) -> None:
    evaluations = PeriodicEvaluations(store.evaluations, EvalConfig(every_versions=3, prompt_count=2), keep_last=3)
    for newest in (-1, 8, 9):
        await evaluations.request_due(newest)
    assert [r.request.policy_version for r in await store.evaluations.all()] == [6, 9]
