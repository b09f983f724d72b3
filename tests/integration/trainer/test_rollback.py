"""Going back to an older policy on purpose, through a kill."""

from __future__ import annotations

import pytest

from rollmesh.errors import Conflict

from ...kit.ledger import read_ledger
from .trainer_run import Runs, release

pytestmark = pytest.mark.slow

STEPS = 6


@pytest.mark.parametrize("moment", ["", "states/*r1/COMMITTED", "policies/*r1", "policies/*r1/manifest.json"])
async def test_a_rollback_publishes_the_old_weights_once_and_drops_unclaimed_work(runs: Runs, moment: str) -> None:
    async with runs(trainer={"train_steps": STEPS}) as run:
        run.start()
        async with run.fed(3):
            await run.until_version(3)
            await run.feed(2)
            run.cuts = run.cuts[:3]
            with pytest.raises(Conflict, match="not been announced"):
                await run.store.rollbacks.request(99)
            await run.store.rollbacks.request(1)
            if moment:
                await run.until(moment, lambda: any(run.checkpoints.root.glob(moment)))
                run.kill()
                run.start()
            await run.until_rolled_back()
            assert (await run.store.mesh.counts()).drops["rolled_back"] == 4
            await run.feed(3)
            await run.until_finished()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [
            (0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 4), (6, 5), (7, 6)
        ]  # fmt: skip
        manifests = [run.checkpoints.open(r).manifest for r in records]
        assert [m.parent for m in manifests] == [None, 0, 1, 2, 1, 4, 5, 6]
        assert run.weights(records[4]) == run.weights(records[1])
        assert run.weights(records[5]) != run.weights(records[4])
        ledger = read_ledger(run.checkpoints)
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (STEPS, {}, {})


async def test_a_rollback_whose_state_cannot_be_saved_is_carried_out_by_the_next_trainer(runs: Runs) -> None:
    runs.hold("before the state of a rollback", 2, fails=True)
    async with runs() as run:
        run.start(fault="held")
        async with run.fed(2):
            await run.until_version(2)
            await run.store.rollbacks.request(1)
            assert await run.until_failed() == 1
            assert not await run.rolled_back()
            run.start()
            await run.until_rolled_back()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert run.weights(records[3]) == run.weights(records[1])


async def test_a_rollback_asked_of_a_finished_run_is_carried_out_when_it_is_next_started(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 2}) as run:
        await run.train(2)
        await run.store.rollbacks.request(1)
        run.start()
        await run.until_finished()
        assert await run.rolled_back()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert run.weights(records[3]) == run.weights(records[1])


async def test_the_version_of_a_pending_rollback_stays_while_newer_ones_are_announced(runs: Runs) -> None:
    kept = {"keep_last": 2}
    async with runs.held("before the announcement", 4, fed=4, checkpoints=kept) as run:
        before = await run.store.policies.announced()
        assert not (run.checkpoints.root / before[1].path).exists(), "version 2 is the next one to be pruned"
        weights = run.weights(before[2])
        await run.store.rollbacks.request(2)
        release(run)
        await run.until_rolled_back()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records[3:]] == [(3, 3), (4, 4), (5, 4)]
        assert run.checkpoints.open(records[5]).manifest.parent == 2
        assert run.weights(records[5]) == weights


async def test_a_rollback_to_a_missing_policy_is_refused_and_the_run_continues(runs: Runs) -> None:
    async with runs(checkpoints={"keep_last": 2}) as run:
        run.start()
        async with run.fed(3):
            await run.until_version(3)
            gone = run.checkpoints.root / (await run.store.policies.announced())[1].path
            # The version of a pending request is not pruned.
            await run.until("the pruning", lambda: not gone.exists(), pause=0.01)
            await run.store.rollbacks.request(1)
            await run.until("the refusal", run.rolled_back, pause=0.01)
            await run.feed(1)
            await run.until_finished()
        assert "rollback_refused" in run.log()
        assert [r.train_step for r in await run.store.policies.announced()] == [0, 1, 2, 3, 4]
