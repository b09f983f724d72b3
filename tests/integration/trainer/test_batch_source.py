"""The moment between the claim of a batch and its file, and the prompt history in that file."""

from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import StepSettings
from rollmesh.errors import SessionLost
from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptRecord
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import run_limits
from rollmesh.store import Score
from rollmesh.trainer.service.batch_source import BatchSource, ReplaySource
from rollmesh.trainer.service.leading_rank import Retry
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Group, OutcomeKind, RewardOutcome

from ...kit.checkpoint_samples import step_settings, write_batch
from .trainer_run import GROUPS, MEMBERS, VOCABULARY, Runs, TrainerRun


async def test_a_claimed_batch_is_the_one_in_the_file_whose_digest_it_confirms(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was superseded may have written, and trained, the same groups with other tokens."""
    async with runs() as run:
        run.start()
        async with run.fed(1):
            pass
        run.kill()
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])

        batch_source = await _batch_source(run)
        found = await run.store.training.claim(batch_source._session.token, 1, 5.0)
        assert found is not None
        written = replace(found, groups=tuple(_with_other_tokens(group) for group in found.groups))
        read_cursor = run.store.leadership.cursor

        async def cursor() -> Cursor:
            write_batch(run.checkpoints, written, Cursor(), {0: 0}, _settings(1))
            return await read_cursor()

        # A trainer asks for the cursor when it has its batch and before it writes the file.
        monkeypatch.setattr(run.store.leadership, "cursor", cursor)
        claimed = await batch_source.next(1, 5.0)
        assert claimed is not None and claimed.stored.footer.settings == _settings(1)
        elsewhere = run.checkpoints.at(tmp_path / "elsewhere")
        assert write_batch(elsewhere, claimed.batch, Cursor()) == run.checkpoints.batch_footer(1).payload_sha256


async def test_a_trainer_that_is_superseded_after_its_claim_leaves_no_batch_file(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one may roll the run back: the claimed groups are dropped then, and a file would train them."""
    async with runs() as run:
        run.start()
        async with run.fed(1):
            pass
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])

        batch_source = await _batch_source(run)
        read_cursor = run.store.leadership.cursor

        async def cursor() -> Cursor:
            await run.store.training.open_session("newer", lineage=run.checkpoints.lineage())
            return await read_cursor()

        # A trainer asks for the cursor when it has its batch and before it writes the file.
        monkeypatch.setattr(run.store.leadership, "cursor", cursor)
        with pytest.raises(SessionLost):
            await batch_source.next(1, 5.0)
        assert run.checkpoints.batch_steps() == []


async def session_of(run: TrainerRun, trained_step: int) -> TrainingSession:
    """The session of a trainer that starts after this step, as far as its first call."""
    catalog, metrics = PolicyCatalog(run.checkpoints), TrainerMetrics(Metrics("trainer"))
    session = TrainingSession(run.store, run.checkpoints, catalog, metrics, Shutdown())
    await session.open("trainer", run_limits(run.config))
    await session.begin(trained_step)
    return session


async def _batch_source(run: TrainerRun) -> BatchSource:
    """That of a trainer which has begun its session, without replay."""
    session = await session_of(run, 0)
    catalog, retry = session._catalog, Retry(session._metrics, Health(), session._shutdown)
    replay = ReplaySource(None, run.checkpoints, catalog, Progress(), 0, 20)
    return BatchSource(session, run.checkpoints, catalog, retry, replay, _settings)


def _settings(train_step: int) -> StepSettings:
    return step_settings(1e-3 / train_step)


def _with_other_tokens(group: Group) -> Group:
    members = []
    for trajectory in group.trajectories:
        other = (replace(s, token_ids=(s.token_ids + 1) % VOCABULARY) for s in trajectory.segments)
        members.append(replace(trajectory, segments=tuple(other)))
    return replace(group, trajectories=tuple(members))


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
            await session_of(run, 3)
            assert await records(run) == before
