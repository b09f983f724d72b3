"""The batch files of a real trainer restore the prompt history of a Redis that came back empty."""

from __future__ import annotations

from pathlib import Path

from rollmesh.prompt_history import PromptRecord
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import run_limits
from rollmesh.store import EmbeddedServer
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.training_session import TrainingSession

from .trainer_run import GROUPS, MEMBERS, TrainerRun, opened_run, write_run_file


async def records(run: TrainerRun) -> dict[str, PromptRecord]:
    return await run.store.prompt_records.read([f"e0-{index}" for index in range(3 * GROUPS)])


async def open_trainer(run: TrainerRun) -> None:
    """A trainer that starts after the last step, as far as its first call."""
    metrics, catalog = TrainerMetrics(Metrics("trainer")), PolicyCatalog(run.checkpoints)
    session = TrainingSession(run.store, run.checkpoints, catalog, metrics, Shutdown())
    await session.open("late", run_limits(run.config))
    await session.begin(3)


async def test_every_group_is_in_one_batch_file_and_an_empty_redis_gets_the_history_back(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(
        tmp_path / "run",
        tiny_model,
        server,
        schedule={"start_order": "longest_expected"},
        trainer={"train_steps": 3},
    )
    async with opened_run(config) as run:

        async def trained_once() -> bool:
            return (await run.store.training.state()).trained_step == 1

        run.start()
        async with run.fed(1):
            await run.until("the first step", trained_once, pause=0.01)
            await run.feed(2)
            await run.until_finished()
        before = await records(run)
        assert len(before) == 3 * GROUPS
        assert {(r.groups, r.members) for r in before.values()} == {(1, MEMBERS)}
        copied = [[o.group_id for o in run.checkpoints.batch_footer(step).outcomes] for step in (1, 2, 3)]
        assert sorted(copied[0]) == sorted(f"e0-{index}" for index in range(GROUPS))
        assert sorted(group_id for ids in copied for group_id in ids) == sorted(before)

        await run.store.connection.command("FLUSHALL")
        for _ in range(2):
            await open_trainer(run)
            assert await records(run) == before
