"""The moment between the claim of a batch and its file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import StepSettings
from rollmesh.errors import SessionLost
from rollmesh.mesh import Cursor
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import run_limits
from rollmesh.trainer.service.batch_source import BatchSource, ReplaySource
from rollmesh.trainer.service.leading_rank import Retry
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Group, Segment

from ...kit.checkpoint_samples import step_settings, write_batch
from .trainer_run import VOCABULARY, Runs, TrainerRun


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


async def _batch_source(run: TrainerRun) -> BatchSource:
    """That of a trainer which has begun its session, without replay."""
    shutdown, metrics, catalog = Shutdown(), TrainerMetrics(Metrics("trainer")), PolicyCatalog(run.checkpoints)
    session = TrainingSession(run.store, run.checkpoints, catalog, metrics, shutdown)
    await session.open("trainer", run_limits(run.config))
    await session.begin(0)
    replay = ReplaySource(None, run.checkpoints, catalog, Progress(), 0, 20)
    return BatchSource(session, run.checkpoints, catalog, Retry(metrics, Health(), shutdown), replay, _settings)


def _settings(train_step: int) -> StepSettings:
    return step_settings(1e-3 / train_step)


def _with_other_tokens(group: Group) -> Group:
    def other(segment: Segment) -> Segment:
        return replace(segment, token_ids=(segment.token_ids + 1) % VOCABULARY)

    members = (replace(t, segments=tuple(other(s) for s in t.segments)) for t in group.trajectories)
    return replace(group, trajectories=tuple(members))
