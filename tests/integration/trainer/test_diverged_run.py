"""A run whose gradients are not finite any more ends with an error that says so."""

from __future__ import annotations

from rollmesh.runtime.lifecycle import EXIT_CONFIG

from .trainer_run import Runs, TrainerRun


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
