"""Policies that remain when the trainer prunes after each step."""

from __future__ import annotations

from ...kit.records import generator_record
from .trainer_run import Runs


async def test_versions_that_a_generator_serves_or_loads_stay_however_many_follow(runs: Runs) -> None:
    slow = generator_record("slow", policy_version=1, loading_version=3)
    async with runs(trainer={"train_steps": 6}, checkpoints={"keep_last": 2}) as run:
        await run.store.generators.register(slow, ttl=600)
        await run.train(6)
        kept = [path.name.partition("-")[0] for path in sorted(run.checkpoints.root.glob("policies/*"))]
        assert kept == [f"{step:08d}" for step in (0, 1, 3, 5, 6)]
