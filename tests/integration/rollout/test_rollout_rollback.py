"""A rollback while the mesh runs: what comes after it is written by the new branch alone."""

from dataclasses import dataclass, field, replace

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import members, start
from .scripted import ScriptedGenerator, ScriptedReward, ScriptedTrainer, record_of


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
