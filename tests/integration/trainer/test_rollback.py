"""Going back to an older policy on purpose, through a kill."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.errors import Conflict
from rollmesh.store import EmbeddedServer
from rollmesh.types import PolicyRecord

from ...kit.ledger import read_ledger
from .test_background_publication import held_run, release
from .trainer_run import TrainerRun, opened_run, write_run_file

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.mark.parametrize("moment", ["", "states/*r1/COMMITTED", "policies/*r1", "policies/*r1/manifest.json"])
async def test_a_rollback_publishes_the_old_weights_once_and_drops_unclaimed_work(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, moment: str
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server, trainer={"train_steps": STEPS})
    async with opened_run(config) as run:
        run.start()
        async with run.fed(3):
            await run.until("version 3", lambda: _announced(run, 3), pause=0.01)
            await run.feed(2)
            run.cuts = run.cuts[:3]
            with pytest.raises(Conflict, match="not been announced"):
                await run.store.rollbacks.request(99)
            await run.store.rollbacks.request(1)
            if moment:
                await run.until(moment, lambda: any(run.checkpoints.root.glob(moment)))
                run.kill()
                run.start()
            await run.until("the end of the rollback", lambda: _rolled_back(run), pause=0.01)
            assert (await run.store.mesh.counts()).drops["rolled_back"] == 4
            await run.feed(3)
            await run.until_finished()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [
            (0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 6)
        ]  # fmt: skip
        manifests = [run.checkpoints.open(r).manifest for r in records]
        assert [m.parent for m in manifests] == [None, 0, 1, 2, 1, 4, 5, 6]
        assert _weights(run, records[4]) == _weights(run, records[1])
        assert _weights(run, records[5]) != _weights(run, records[4])
        ledger = read_ledger(run.checkpoints)
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (STEPS, {}, {})


async def test_a_rollback_whose_state_cannot_be_saved_is_carried_out_by_the_next_trainer(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server)
    monkeypatch.setenv("HELD_AT", "before the state of a rollback")
    monkeypatch.setenv("HELD_STEP", "2")
    monkeypatch.setenv("HELD_FAILS", "1")
    async with opened_run(config) as run:
        run.start(script="held_process")
        async with run.fed(2):
            await run.until("version 2", lambda: _announced(run, 2), pause=0.01)
            await run.store.rollbacks.request(1)
            assert await run.until_failed() == 1
            assert not await _rolled_back(run)
            run.start()
            await run.until("the end of the rollback", lambda: _rolled_back(run), pause=0.01)
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert _weights(run, records[3]) == _weights(run, records[1])


async def test_a_rollback_asked_of_a_finished_run_is_carried_out_when_it_is_next_started(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server, trainer={"train_steps": 2})
    async with opened_run(config) as run:
        run.start()
        async with run.fed(2):
            await run.until_finished()
        await run.store.rollbacks.request(1)
        run.start()
        await run.until_finished()
        assert await _rolled_back(run)
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert _weights(run, records[3]) == _weights(run, records[1])


async def test_the_version_of_a_pending_rollback_stays_while_newer_ones_are_announced(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {"keep_last": 2}
    async with held_run(
        tmp_path / "run", tiny_model, server, monkeypatch, at="before the announcement", step=4, fed=4, checkpoints=kept
    ) as run:
        before = await run.store.policies.announced()
        assert not (run.checkpoints.root / before[1].path).exists(), "version 2 is the next one to be pruned"
        weights = _weights(run, before[2])
        await run.store.rollbacks.request(2)
        release(run)
        await run.until("the end of the rollback", lambda: _rolled_back(run), pause=0.01)
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records[3:]] == [(3, 3), (4, 4), (5, 4)]
        assert run.checkpoints.open(records[5]).manifest.parent == 2
        assert _weights(run, records[5]) == weights


async def test_a_rollback_to_a_missing_policy_is_refused_and_the_run_continues(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server, checkpoints={"keep_last": 2})
    async with opened_run(config) as run:
        run.start()
        async with run.fed(4):
            await run.until("version 4", lambda: _announced(run, 4), pause=0.01)
        gone = (await run.store.policies.announced())[1]
        assert not (run.checkpoints.root / gone.path).exists()
    config = write_run_file(tmp_path / "again", tiny_model, server, checkpoints={"keep_last": 2})
    async with opened_run(config) as run:
        run.start()
        async with run.fed(3):
            await run.until("version 3", lambda: _announced(run, 3), pause=0.01)
            gone = run.checkpoints.root / (await run.store.policies.announced())[1].path
            # The version of a pending request is not pruned.
            await run.until("the pruning", lambda: not gone.exists(), pause=0.01)
            await run.store.rollbacks.request(1)
            await run.until("the refusal", lambda: _rolled_back(run), pause=0.01)
            await run.feed(1)
            await run.until_finished()
        assert "rollback_refused" in run.log()
        assert [r.train_step for r in await run.store.policies.announced()] == [0, 1, 2, 3, 4]


def _weights(run: TrainerRun, record: PolicyRecord) -> bytes:
    return (run.checkpoints.open(record).folder / "model.safetensors").read_bytes()


async def _announced(run: TrainerRun, version: int) -> bool:
    latest = await run.store.policies.latest()
    return latest is not None and latest.policy_version >= version


async def _rolled_back(run: TrainerRun) -> bool:
    return await run.store.rollbacks.pending() is None
