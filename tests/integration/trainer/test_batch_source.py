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
from rollmesh.store import EmbeddedServer
from rollmesh.trainer.service.batch_source import BatchSource, ReplaySource
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.trainer_waits import Retry
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Group, Segment

from ...kit.checkpoint_samples import step_settings, write_batch
from .trainer_run import VOCABULARY, TrainerRun, opened_run, write_run_file


async def test_a_claimed_batch_is_the_one_in_the_file_whose_digest_it_confirms(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was superseded may have written, and trained, the same groups with other tokens."""
    config = write_run_file(tmp_path / "run", tiny_model, server)
    async with opened_run(config) as run:
        run.start()
        async with run.fed(1):
            pass
        run.kill()
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])

        shutdown, metrics, catalog = Shutdown(), TrainerMetrics(Metrics("trainer")), PolicyCatalog(run.checkpoints)
        session = TrainingSession(run.store, run.checkpoints, catalog, metrics, shutdown)
        await session.open("trainer", run_limits(config))
        await session.begin(0)
        retry, replay = Retry(metrics, Health(), shutdown), _no_replay(run, catalog)
        batch_source = BatchSource(session, run.checkpoints, catalog, retry, replay, _settings)
        found = await run.store.training.claim(session.token, 1, 5.0)
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
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one may roll the run back: the claimed groups are dropped then, and a file would train them."""
    config = write_run_file(tmp_path / "run", tiny_model, server)
    async with opened_run(config) as run:
        run.start()
        async with run.fed(1):
            pass
        await run.store.leadership.cut(run.leader, 1, run.cuts[0])

        shutdown, metrics, catalog = Shutdown(), TrainerMetrics(Metrics("trainer")), PolicyCatalog(run.checkpoints)
        older = TrainingSession(run.store, run.checkpoints, catalog, metrics, shutdown)
        await older.open("older", run_limits(config))
        await older.begin(0)
        retry, replay = Retry(metrics, Health(), shutdown), _no_replay(run, catalog)
        batch_source = BatchSource(older, run.checkpoints, catalog, retry, replay, _settings)
        read_cursor = run.store.leadership.cursor

        async def cursor() -> Cursor:
            await run.store.training.open_session("newer", lineage=run.checkpoints.lineage())
            return await read_cursor()

        # A trainer asks for the cursor when it has its batch and before it writes the file.
        monkeypatch.setattr(run.store.leadership, "cursor", cursor)
        with pytest.raises(SessionLost):
            await batch_source.next(1, 5.0)
        assert run.checkpoints.batch_steps() == []


def _no_replay(run: TrainerRun, catalog: PolicyCatalog) -> ReplaySource:
    return ReplaySource(None, run.checkpoints, catalog, Progress(), 0, 20)


def _settings(train_step: int) -> StepSettings:
    return step_settings(1e-3 / train_step)


def _with_other_tokens(group: Group) -> Group:
    def other(segment: Segment) -> Segment:
        return replace(segment, token_ids=(segment.token_ids + 1) % VOCABULARY)

    members = (replace(t, segments=tuple(other(s) for s in t.segments)) for t in group.trajectories)
    return replace(group, trajectories=tuple(members))
