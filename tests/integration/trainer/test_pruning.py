"""Policies that remain when the trainer prunes after each step."""

from __future__ import annotations

from pathlib import Path

from rollmesh.store import EmbeddedServer

from ...kit.records import generator_record
from .trainer_run import opened_run, write_run_file


async def test_versions_that_a_generator_serves_or_loads_stay_however_many_follow(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(
        tmp_path / "run", tiny_model, server, trainer={"train_steps": 6}, checkpoints={"keep_last": 2}
    )
    slow = generator_record("slow", policy_version=1, loading_version=3)
    async with opened_run(config) as run:
        await run.store.generators.register(slow, ttl=600)
        run.start()
        async with run.fed(6):
            await run.until_finished()
        kept = [path.name.partition("-")[0] for path in sorted(run.checkpoints.root.glob("policies/*"))]
        assert kept == [f"{step:08d}" for step in (0, 1, 3, 5, 6)]
