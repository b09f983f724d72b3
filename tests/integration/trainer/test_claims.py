"""The moment between the claim of a batch and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.errors import SessionLost
from rollmesh.mesh import Cursor
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling.limits import run_limits
from rollmesh.store import EmbeddedServer
from rollmesh.trainer.claims import BatchClaims
from rollmesh.trainer.metrics import TrainerMetrics
from rollmesh.trainer.patience import Patience
from rollmesh.trainer.session import TrainingSession
from rollmesh.trainer.shelf import PolicyShelf

from .trainer_run import opened_run, write_run_file


async def test_a_trainer_that_is_superseded_after_its_claim_leaves_no_batch_file(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer one may roll the run back: the claimed groups are dropped then, and a file would train them."""
    config = write_run_file(tmp_path / "run", tiny_model, server)
    async with opened_run(config) as run:
        run.start()
        async with run.fed(1):
            pass
        await run.store.cut(run.leader, 1, run.cuts[0])

        shutdown, metrics, shelf = Shutdown(), TrainerMetrics(Metrics("trainer")), PolicyShelf(run.checkpoints)
        older = TrainingSession(run.store, run.checkpoints, shelf, metrics, shutdown)
        await older.open("older", run_limits(config))
        await older.begin(0)
        claims = BatchClaims(older, run.checkpoints, shelf, Patience(metrics, Health(), shutdown), config.trainer)
        read_cursor = run.store.cursor

        async def cursor() -> Cursor:
            await run.store.open_trainer_session("newer", lineage=run.checkpoints.lineage())
            return await read_cursor()

        # A trainer asks for the cursor when it has its batch and before it writes the file.
        monkeypatch.setattr(run.store, "cursor", cursor)
        with pytest.raises(SessionLost):
            await claims.next(1, 5.0)
        assert run.checkpoints.batch_steps() == []
