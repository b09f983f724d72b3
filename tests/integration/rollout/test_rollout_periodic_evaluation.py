"""Every k-th version is evaluated during training: one generator is pinned, the others load newer versions."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from rollmesh.config.rollout import EvalConfig
from rollmesh.rollout.leader_parts import PeriodicEvaluations
from rollmesh.store.queue_types import EvalRequest
from rollmesh.types import Chunk, GenerationCall

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import start
from .scripted import ScriptedGenerator, ScriptedReward, ScriptedTrainer, record_of


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
            outlook = await self.store.policies.outlook(name)
            policy = outlook.pinned or outlook.newest
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


@dataclass
class BarrierTrainer(FollowingTrainer):
    """Does something at every barrier, once the mesh is paused, before it announces the next policy."""

    at_barrier: Callable[[], Awaitable[None]] | None = None

    async def announce(self, step: int) -> None:
        async def paused() -> bool:
            return (await self.store.leadership.desired()).paused

        if step > 0 and self.at_barrier is not None:
            await reached(paused)
            await self.at_barrier()
        await super().announce(step)


@dataclass
class HeldGenerator(ScriptedGenerator):
    """Answers the calls of evaluations once ``answers`` is set."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)
    loaded: list[int] = field(default_factory=list)
    held: int = 0
    """Calls of evaluations that wait."""

    def load(self, version: int) -> None:
        self.loaded.append(version)
        super().load(version)

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        if call.trajectory_id.startswith("eval-"):
            self.held += 1
            await self.answers.wait()
            self.held -= 1
        async for chunk in super().generate(call):
            yield chunk


async def test_every_second_version_is_evaluated_during_training(store) -> None:
    plan = schedule("copris", train_steps=6)
    generators = [ScriptedGenerator(name, seconds_per_token=0.01, slots=16) for name in ("a", "b")]
    cluster, trainer = await start(store, plan, *generators, trainer_type=FollowingTrainer)
    following = asyncio.create_task(trainer.keep_following())
    config = EvalConfig(every_versions=2, prompt_count=12, samples_per_prompt=2)
    async with running(store, cluster, ScriptedReward(), plan, evaluation=config) as run:
        for step in range(1, 7):
            await trainer.train(step)

        async def results():
            records = await store.evaluations.all()
            return records if len(records) == 3 and all(r.result for r in records) else None

        records = await reached(results)
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


async def test_a_barrier_leaves_the_other_generators_their_newer_version_during_an_evaluation(store) -> None:
    plan = schedule("copris_paper", train_steps=9)
    generators = [HeldGenerator(name, slots=16) for name in ("a", "b")]
    cluster, trainer = await start(store, plan, *generators, trainer_type=BarrierTrainer)
    meta = store.connection.keys.single("meta")

    async def renewed() -> bool:
        return await store.connection.command("HGET", meta, "pin_instance") != b"another"

    async def pin_renewed() -> None:
        if await store.policies.pinned() is not None:
            await store.connection.command("HSET", meta, "pin_instance", "another")
            await reached(renewed)
            await trainer.follow()

    async def is_pinned() -> bool:
        return await store.policies.pinned() is not None

    async def result():
        await trainer.follow()
        records = await store.evaluations.all()
        return records[0].result if records else None

    trainer.at_barrier = pin_renewed
    config = EvalConfig(every_versions=3, prompt_count=6, samples_per_prompt=2)
    async with running(store, cluster, ScriptedReward(), plan, evaluation=config):
        for step in (1, 2, 3):
            await trainer.train(step)
        await reached(is_pinned)
        for step in (4, 5):
            await trainer.train(step)
        for generator in generators:
            generator.answers.set()
        done = await reached(result)
    assert (done.sample_count, done.discarded_count) == (12, 0)
    assert [generator.loaded for generator in generators] == [sorted(g.loaded) for g in generators]
    assert (3, 5) in trainer.behind


async def test_an_evaluation_that_begins_at_a_barrier_takes_half_of_one_generator(store) -> None:
    plan = schedule("copris_paper", train_steps=3)
    generators = [HeldGenerator(name, slots=8) for name in ("a", "b")]
    cluster, trainer = await start(store, plan, *generators, trainer_type=BarrierTrainer)

    def held_calls() -> int:
        return sum(generator.held for generator in generators)

    async def evaluation_begins() -> None:
        await store.evaluations.request(
            EvalRequest(evaluation_id="v0", policy_version=0, prompt_count=6, samples_per_prompt=2)
        )
        await reached(lambda: held_calls() >= 4)
        assert len([name for name in ("a", "b") if await store.policies.pinned(name) is not None]) == 1
        assert held_calls() == 4

    async def result():
        await trainer.follow()
        return (await store.evaluations.all())[0].result

    trainer.at_barrier = evaluation_begins
    async with running(store, cluster, ScriptedReward(), plan):
        await trainer.train(1)
        for generator in generators:
            generator.answers.set()
        done = await reached(result)
    assert (done.sample_count, done.discarded_count) == (12, 0)


async def test_a_new_leader_asks_for_what_is_due_and_not_again_for_what_was_asked(store) -> None:
    plan = schedule("copris", train_steps=5)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a"))
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

            records = await reached(results)
        # Version 2 is two evaluations back: its weights may be gone, no evaluation needs it.
        assert [r.request.policy_version for r in records] == [4]


async def test_a_leader_of_an_empty_queue_asks_for_no_pruned_version_once_the_trainer_is_back(store) -> None:
    evaluations = PeriodicEvaluations(store.evaluations, EvalConfig(every_versions=3, prompt_count=2), keep_last=3)
    for newest in (-1, 8, 9):
        await evaluations.request_due(newest)
    assert [r.request.policy_version for r in await store.evaluations.all()] == [6, 9]
