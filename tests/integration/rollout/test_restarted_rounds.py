"""Rounds whose trajectories begin again, rest, or follow a rollback."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from rollmesh.store import TrajectoryStore
from rollmesh.types import Chunk, GenerationCall, OutcomeKind, RewardOutcome, Trajectory

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import all_groups, check_batch, members, start, whole_mesh
from .scripted import ScriptedGenerator, ScriptedReward, ScriptedTrainer, length_of, record_of

LATE = ("e0-0.", "e0-3.")
"""Members of the groups that do not end in the first two rounds."""


class LateOnTwo(ScriptedGenerator):
    """Stops after the first chunk of late groups until the call is interrupted."""

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        is_late = call.trajectory_id.startswith(LATE) and self.version < 2
        async for chunk in super().generate(call):
            yield chunk
            if is_late and chunk.finish_reason is None:
                await self.running[call.trajectory_id].wait()


async def test_rollpacker_trains_late_groups_on_policy_in_a_long_round(store: TrajectoryStore) -> None:
    plan = schedule("rollpacker", train_steps=4)
    assert (plan.spare_groups, plan.spare_members) == (1, 1)
    cluster, trainer = await start(store, plan, LateOnTwo("a", slots=64))
    async with running(store, cluster, ScriptedReward(), plan, chunk=2) as replica:
        for step in (1, 2, 3):
            check_batch(await trainer.train(step), plan)
        name = "rollmesh_rollout_groups_begun_again_total"
        assert (replica.value(name, kind="set_aside"), replica.value(name, kind="recalled")) == (2, 2)
        assert all_groups(trainer) == ["e0-1", "e0-2", "e0-4", "e0-5", "e0-0", "e0-3"]
        late = [t for group in trainer.batches[2].groups for t in group.trajectories]
        assert {segment.policy_version for t in late for segment in t.segments} == {2}
        assert {t.member_index for t in late} == {0, 1, 2, 3}, "the long round has no spare members"
        check_batch(await trainer.train(4), plan)
        async with asyncio.timeout(120):
            while await store.mesh.live_groups():
                await asyncio.sleep(0.05)
    counts = await store.mesh.counts()
    assert counts.dropped_tokens["set_aside"] > 0
    assert counts.drops == {"run_complete": 1}, "every other group was trained"


@dataclass
class HeldReward(ScriptedReward):
    """Holds the reward of the first answer of one trajectory until its second answer is scored."""

    holds: asyncio.Event = field(default_factory=asyncio.Event)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        (trajectory,) = trajectories
        if trajectory.trajectory_id != "e0-0.1":
            return await super().score(trajectories)
        if trajectory.policy_versions[0] == 0:
            await self.holds.wait()
            return [RewardOutcome(kind=OutcomeKind.SCORED, value=99.0)]
        self.holds.set()
        await self.old_lease_ends()
        return await super().score(trajectories)

    old_lease_ends: Callable[[], Awaitable[None]] = field(init=False)


async def test_a_reward_that_arrives_after_its_trajectory_began_again_is_not_recorded(store: TrajectoryStore) -> None:
    waves = {"wave_batches": 2, "window_groups": 4, "spare_groups": 0, "spare_members": 0}
    reward = HeldReward()
    async with whole_mesh(
        store,
        ScriptedGenerator("a", slots=64),
        plan=schedule("rollpacker", train_steps=2, on_stale="restart", **waves),
        reward=reward,
        chunk=2,
    ) as replica:

        async def old_lease_ends() -> None:
            async with asyncio.timeout(60):
                while not replica.value("rollmesh_rollout_trajectories_dropped_total", reason="taken_back"):
                    await asyncio.sleep(0.01)

        reward.old_lease_ends = old_lease_ends
        for step in (1, 2):
            check_batch(await replica.trainer.train(step), replica.plan)
    rewards = {
        t.trajectory_id: t.shaped_reward for b in replica.trainer.batches for g in b.groups for t in g.trajectories
    }
    assert rewards["e0-0.1"] == 1.0


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


@dataclass
class BranchingTrainer(ScriptedTrainer):
    """Can roll back; ``lagging`` generators do not hear of what it announces then."""

    rollbacks: int = 0
    lagging: list[str] = field(default_factory=list)

    async def announce(self, step):
        version = step + self.rollbacks
        await self.store.policies.announce(self.session, replace(record_of(step), policy_version=version))
        for generator in self.cluster.generators.values():
            if generator.name not in self.lagging:
                generator.load(version)
        await self.cluster.register()

    async def roll_back(self, step):
        self.rollbacks += 1
        await self.announce(step)
        await self.store.training.roll_back(self.session)


async def test_a_generator_that_lags_behind_a_rollback_starts_nothing(store):
    plan = schedule("copris", train_steps=4)
    assert plan.max_staleness >= 4, "by its staleness alone the abandoned version could still be trained on"
    generators = (ScriptedGenerator("follows", seconds_per_token=0.002), ScriptedGenerator("lags"))
    cluster, trainer = await start(store, plan, *generators, trainer_type=BranchingTrainer)
    async with running(store, cluster, ScriptedReward(), plan):
        for step in (1, 2):
            await trainer.train(step)
        trainer.lagging = ["lags"]
        await trainer.roll_back(2)
        calls = cluster.generators["lags"].calls
        for step in (3, 4):
            batch = await trainer.train(step)
            assert min(version for trajectory in members(batch) for version in trajectory.policy_versions) >= 3
        assert cluster.generators["lags"].calls - calls <= plan.pool_size
        await reached(lambda: _finished(store))
    assert (await store.mesh.counts()).drops["rolled_back"] > 0


async def _finished(store):
    return (await store.mesh.view()).is_complete
