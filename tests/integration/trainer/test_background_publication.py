"""One publication in flight while the next step trains: in order, and safe wherever the trainer is killed."""

import asyncio
import signal

import pytest

from rollmesh.runtime.lifecycle import EXIT_UNFINISHED

from .test_kills import assert_every_batch_counts_once
from .trainer_run import Runs, release

pytestmark = pytest.mark.slow

STEPS = 5
IN_BACKGROUND = (
    "before the canary",
    "before the manifest",
    "before the announcement",
    "before the marker",
    "before the pruning",
)
MOMENTS = [(at, 2) for at in (*IN_BACKGROUND, "before the confirmation")]
"""Moments of a step with a state; after the next one, which has none, a trainer repeats the step."""


@pytest.fixture(scope="module")
def calm() -> dict[str, bytes]:
    """Last weights of an uninterrupted run, computed by the first test that needs them."""
    return {}


@pytest.mark.parametrize(("at", "step"), [*MOMENTS, ("before the manifest", 3), ("before the confirmation", 3)])
async def test_a_trainer_killed_with_a_publication_in_flight_publishes_the_same_weights_once(
    runs: Runs, calm: dict[str, bytes], at: str, step: int
) -> None:
    if not calm:
        calm["weights"] = await runs.calm_weights()
    async with runs.held(at, step) as run:
        if at in IN_BACKGROUND:
            await run.until("the next step to be trained", lambda: run.waits_to_publish(step), pause=0.01)
            state = await run.store.training.state()
            assert (state.trained_step, state.committed_step) == (step, 2), "nothing of the next step is reported"
            assert run.checkpoints.batch_steps()[-1] == step + 1
            assert (await run.versions())[-1] == step - (IN_BACKGROUND.index(at) < 3)
        seen = await run.seen()
        run.kill()
        run.start()
        await run.until_finished()
        await assert_every_batch_counts_once(run, seen)
        assert await run.last_weights() == calm["weights"]


async def test_the_next_version_waits_for_the_one_in_flight(runs: Runs) -> None:
    async with runs.held("before the manifest", 2) as run:
        await run.until("the next step to be trained", lambda: run.waits_to_publish(2), pause=0.01)
        assert await run.versions() == [0, 1]
        assert not list(run.checkpoints.root.glob("policies/00000003-*"))
        release(run)
        await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        announced = run.events("policy_announced")
        assert [line["policy_version"] for line in announced] == list(range(STEPS + 1))


async def test_a_copy_that_cannot_score_itself_is_scored_before_the_next_step(runs: Runs) -> None:
    """Of weights in another dtype, and with several ranks, the canary is scored by the model in training."""
    async with runs.held("before the canary", 2, model={"dtype": "bfloat16"}) as run:
        await asyncio.sleep(1.0)
        assert not run.waits_to_publish(2), "the next step has changed the weights"
        release(run)
        await run.until_finished()
        assert await run.versions() == [0, 1, 2, 3, 4, 5]


async def test_a_trainer_that_is_stopped_announces_what_it_has_trained(runs: Runs) -> None:
    async with runs.held("before the announcement", 2, fed=2) as run:
        process = run.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await run.until("the end to wait for the announcement", lambda: run.waits_to_publish(2), pause=0.01)
        assert await run.versions() == [0, 1]
        release(run)
        assert await run.until_failed() == EXIT_UNFINISHED
        assert await run.versions() == [0, 1, 2]


@pytest.mark.parametrize("at", ["before the canary", "before the manifest"])
async def test_a_trainer_that_must_end_at_once_leaves_a_whole_folder_or_none(runs: Runs, at: str) -> None:
    async with runs.held(at, 2, fed=2) as run:
        process = run.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await run.until("the end to wait for the announcement", lambda: run.waits_to_publish(2), pause=0.01)
        process.send_signal(signal.SIGTERM)
        await run.until("the cancellation", lambda: '"cancelled_after_grace"' in run.log(), pause=0.01)
        release(run)
        assert await asyncio.to_thread(process.wait, 120) == 1
        left = list(run.checkpoints.root.glob("policies/00000002-*"))
        assert await run.versions() == [0, 1]
        assert [record.train_step for record in run.checkpoints.complete_policies()][2:] == [2] * len(left)
        assert len(left) == (at == "before the manifest"), "nothing is written after a cancelled canary"
        run.start()
        await run.until_version(2)
        assert not left or run.checkpoints.root / (await run.store.policies.announced())[2].path == left[0]


async def test_a_rollback_waits_for_the_publication_in_flight(runs: Runs) -> None:
    async with runs.held("before the folder", 2, fed=2) as run:
        await run.store.rollbacks.request(1)
        await run.until("the rollback to wait", lambda: run.waits_to_publish(2), pause=0.01)
        release(run)

        await run.until_rolled_back()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2), (3, 2)]
        assert [run.checkpoints.open(r).manifest.parent for r in records] == [None, 0, 1, 1]


async def test_a_step_that_fails_ends_the_trainer_after_the_version_in_flight_is_announced(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEXT_STEP_FAILS", "1")
    async with runs.held("before the manifest", 2) as run:
        await run.until("the error to wait for the publication", lambda: run.waits_to_publish(2), pause=0.01)
        assert await run.versions() == [0, 1]
        release(run)
        process = run.process
        assert process is not None
        assert await asyncio.to_thread(process.wait, 120) == 1
        assert "the test lets this step fail" in run.log()
        assert await run.versions() == [0, 1, 2]


async def test_a_publication_that_fails_ends_a_trainer_that_waits_for_a_batch(runs: Runs) -> None:
    runs.hold("before the announcement", 2, fails=True)
    async with runs() as run:
        process = run.start(fault="held")
        async with run.fed(2):
            assert await asyncio.to_thread(process.wait, 120) == 1
            assert "the test lets this fail" in run.log()
            assert await run.versions() == [0, 1]
