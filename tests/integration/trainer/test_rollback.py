"""What a run continues with on purpose: older policies, other settings; what is pruned; and when it is over."""

from typing import Any

import pytest

from rollmesh.errors import Conflict
from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.trainer.learner.policy_state import learning_rate

from ...kit.ledger import read_ledger
from ...kit.records import generator_record
from .trainer_run import GROUPS, Runs, TrainerRun, release

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


DECAYING: dict[str, Any] = {"lr_schedule": "cosine"}


def kl(reference: int) -> dict[str, Any]:
    return {"algorithm": {"kl_coefficient": 0.1, "kl_reference_version": reference}}


async def test_a_continued_run_takes_new_settings_from_its_first_new_batch_on(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 6, **DECAYING, **kl(0)}, checkpoints={"state_every_steps": 10}) as run:
        run.start()
        async with run.fed(8):
            await run.until_version(3, pause=0.001)
            run.kill()
            written = run.checkpoints.batch_steps()[-1]
            assert run.checkpoints.latest_committed() is None, "all steps will be trained again"
            now = runs.file(
                trainer={"train_steps": 8, "minibatches": GROUPS, **DECAYING, **kl(2)},
                checkpoints={"state_every_steps": 10, "keep_last": 2},
            )
            run.start()
            await run.until_finished()
        lines = run.lines()
        assert [line["replayed"] for line in lines] == [step <= written for step in range(1, 9)]
        sections = [(run.config if step <= written else now).trainer for step in range(1, 9)]
        rates = [learning_rate(section, step, section.train_steps) for step, section in enumerate(sections, 1)]
        assert [line["learning_rate"] for line in lines] == rates
        assert [line["updates"] for line in lines] == [1 if step <= written else GROUPS for step in range(1, 9)]
        assert '"minibatches": "1 -> 2"' in run.log()
        # The first step is trained by the weights of version 0, the third by those of version 2.
        assert lines[0]["policy"]["kl_reference"] == pytest.approx(0, abs=1e-9)
        assert lines[2]["policy"]["kl_reference"] > 0
        assert lines[7]["policy"]["kl_reference"] > 0
        kept = [path.name.partition("-")[0] for path in sorted(run.checkpoints.root.glob("policies/*"))]
        assert kept == ["00000000", "00000002", "00000007", "00000008"], "the reference is not pruned"


async def test_a_kl_reference_that_does_not_exist_is_refused_before_anything_is_trained(runs: Runs) -> None:
    async with runs(trainer={"train_steps": 1, **kl(2)}) as run:
        assert run.start().wait(120) == EXIT_CONFIG
        assert "trainer.algorithm.kl_reference_version=2: this policy version is not published yet" in run.log()
        assert run.checkpoints.batch_steps() == []
        runs.file(trainer={"train_steps": 1, **kl(0)})
        await run.train(1)


async def test_a_kl_reference_that_is_pruned_is_refused_with_what_is_kept(runs: Runs) -> None:
    options = {"checkpoints": {"keep_last": 2}}
    async with runs(trainer={"train_steps": 3, **kl(0)}, **options) as run:
        await run.train(3)
        runs.file(trainer={"train_steps": 4, **kl(1)}, **options)
        assert run.start().wait(120) == EXIT_CONFIG
        assert "trainer.algorithm.kl_reference_version=1: " in run.log()
        assert "the kept versions are version 0, the newest versions (checkpoints.keep_last)" in run.log()


async def test_versions_that_a_generator_serves_or_loads_stay_however_many_follow(runs: Runs) -> None:
    slow = generator_record("slow", policy_version=1, loading_version=3)
    async with runs(trainer={"train_steps": 6}, checkpoints={"keep_last": 2}) as run:
        await run.store.generators.register(slow, ttl=600)
        await run.train(6)
        kept = [path.name.partition("-")[0] for path in sorted(run.checkpoints.root.glob("policies/*"))]
        assert kept == [f"{step:08d}" for step in (0, 1, 3, 5, 6)]


async def test_a_diverged_run_ends_with_a_typed_error_each_time_it_is_started(runs: Runs) -> None:
    """The first update makes weights of 1e8, whose squares overflow on any CPU; no gradient after it is finite."""
    async with runs(trainer={"train_steps": 3, "learning_rate": 1e8}) as run:
        run.start()
        async with run.fed(9):
            assert await run.until_failed() == EXIT_CONFIG
            assert "TrainingDiverged" in run.log()
            assert "gradients of the last 2 updates are not finite (trainer.nonfinite_updates_limit=2)" in run.log()
            assert _updates(run) == [1, 0, 0]
            assert run.checkpoints.batch_steps() == [1, 2, 3]

            # It was the last step: started again, the run has diverged still.
            run.start()
            assert await run.until_failed() == EXIT_CONFIG
            assert _updates(run) == [1, 0, 0]

            # With more of them, the next update decides.
            runs.file(trainer={"train_steps": 9, "learning_rate": 1e-3})
            run.start()
            assert await run.until_failed() == EXIT_CONFIG
            assert _updates(run) == [1, 0, 0, 0]
            assert "the last 3 updates" in run.log()


async def test_weights_whose_logprobs_are_not_finite_end_the_run_before_they_are_published(runs: Runs) -> None:
    async with runs(trainer={"learning_rate": 1e30}) as run:
        run.start()
        async with run.fed(4):
            assert await run.until_failed() == EXIT_CONFIG
        assert "TrainingDiverged" in run.log()
        assert "train step 1: the log-probabilities of the policy are not finite" in run.log()
        latest = await run.store.policies.latest()
        assert latest is not None and latest.policy_version == 0


def _updates(run: TrainerRun) -> list[int]:
    lines = run.lines()
    assert all(line["updates"] + line["skipped_updates"] == 1 for line in lines)
    return [line["updates"] for line in lines]
