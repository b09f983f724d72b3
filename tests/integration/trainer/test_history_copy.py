"""Each outcome of the prompt history is in one batch file, from which an empty Redis gets it back."""

from __future__ import annotations

from rollmesh.prompt_history import PromptRecord
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import run_limits
from rollmesh.store import Score
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import OutcomeKind, RewardOutcome

from .trainer_run import GROUPS, MEMBERS, Runs, TrainerRun

FILTERED = f"e0-{GROUPS}"
"""A group without a right answer, after those of the first batch."""


async def records(run: TrainerRun) -> dict[str, PromptRecord]:
    return await run.store.prompt_records.read([f"e0-{index}" for index in range(3 * GROUPS + 1)])


def shaped_score(trajectory_id: str) -> Score:
    """Every second member is right; every reward is 1.25 less than the outcome, so that none is positive."""
    group_id, _, member = trajectory_id.rpartition(".")
    value = 0.0 if group_id == FILTERED else float(int(member) % 2)
    outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=value)
    return Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=value - 1.25)


async def filter_a_group(run: TrainerRun) -> None:
    """Admit a group that no batch gets: its rewards are equal."""
    before = run.cuts
    run.cuts = []
    await run.feed(1, groups_per_step=1)
    run.cuts = before


async def open_trainer(run: TrainerRun) -> None:
    """A trainer that starts after the last step, as far as its first call."""
    metrics, catalog = TrainerMetrics(Metrics("trainer")), PolicyCatalog(run.checkpoints)
    session = TrainingSession(run.store, run.checkpoints, catalog, metrics, Shutdown())
    await session.open("late", run_limits(run.config))
    await session.begin(3)


async def test_every_group_is_in_one_batch_file_and_an_empty_redis_gets_the_history_back(runs: Runs) -> None:
    async with runs(
        schedule={"start_order": "longest_expected", "filter_zero_variance": True}, trainer={"train_steps": 3}
    ) as run:

        async def trained_once() -> bool:
            return (await run.store.training.state()).trained_step == 1

        run.score_of = shaped_score
        run.start()
        async with run.fed(1):
            await run.until("the first step", trained_once, pause=0.01)
            await filter_a_group(run)
            await run.feed(2)
            await run.until_finished()
        before = await records(run)
        assert len(before) == 3 * GROUPS + 1
        assert {(r.groups, r.members) for r in before.values()} == {(1, MEMBERS)}
        assert {name for name, record in before.items() if not record.solved} == {FILTERED}
        copied = [[o.group_id for o in run.checkpoints.batch_footer(step).outcomes] for step in (1, 2, 3)]
        assert sorted(copied[0]) == sorted(f"e0-{index}" for index in range(GROUPS))
        assert sorted(group_id for ids in copied for group_id in ids) == sorted(before)

        await run.store.connection.command("FLUSHALL")
        for _ in range(2):
            await open_trainer(run)
            assert await records(run) == before
