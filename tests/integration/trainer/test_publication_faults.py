"""Faults while a publication is in flight: another trainer, an empty Redis, a rollback."""

import asyncio
import shutil

import pytest

from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.store import EmbeddedServer

from ...kit.ledger import read_ledger
from .test_kills import assert_every_batch_counts_once
from .test_parts import SCHEDULE
from .trainer_run import GROUPS, Runs, TrainerRun, release

pytestmark = pytest.mark.slow


def accumulated_in(run: TrainerRun, step: int) -> bool:
    """All groups of the batch of this step are in parts."""
    events = run.events("part_accumulated")
    return any((event["train_step"], event["groups"]) == (step, GROUPS) for event in events)


async def test_a_trainer_that_takes_over_publishes_the_version_in_flight_once(runs: Runs) -> None:
    expected = await runs.calm_weights()
    async with runs.held("before the announcement", 2) as run:
        older = run.process
        assert older is not None
        run.start()
        await run.until_finished()
        seen = await run.seen()
        release(run)
        assert await asyncio.to_thread(older.wait, 120) == 1
        assert "two trainers on one run" in run.log()
        await assert_every_batch_counts_once(run, seen, one_at_a_time=False)
        assert await run.last_weights() == expected


@pytest.mark.parametrize(("at", "killed"), [("before the announcement", False), ("before the marker", True)])
async def test_a_redis_that_comes_back_empty_learns_the_version_in_flight(
    runs: Runs, server: EmbeddedServer, at: str, killed: bool
) -> None:
    async with runs.held(at, 2, fed=2) as run:
        seen = await run.seen()
        if killed:
            run.kill()
        server.kill()
        shutil.rmtree(server.folder / "appendonlydir")
        server.start()
        if killed:
            run.start()
        else:
            # The session before was opened with a re-assertion too.
            await run.until("the re-assertion", lambda: run.log().count('"training_reasserted"') >= 2, pause=0.05)
            release(run)

        async def announced() -> bool:
            return await run.versions() == [0, 1, 2]

        await run.until("the version in flight", announced, pause=0.01)
        for record in await run.store.policies.announced():
            assert seen.get(record.policy_version, record) == record
            run.checkpoints.open(record)
        assert len(list(run.checkpoints.root.glob("policies/00000002-*/manifest.json"))) == 1


@pytest.mark.parametrize("killed", [False, True])
async def test_snapshot_logprobs_are_of_the_named_version_while_the_next_one_is_in_flight(
    runs: Runs, killed: bool
) -> None:
    trainer = {"train_steps": 3, "algorithm": {"old_logprobs": "snapshot"}}
    async with runs.held("before the pruning", 2, fed=2, trainer=trainer) as run:
        run.sampled_by = 1
        await run.feed(1)
        await run.until("the next step to be trained", lambda: run.waits_to_publish(2), pause=0.01)
        if killed:
            run.kill()
            run.start()
        else:
            release(run)
        await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        policy = run.lines()[2]["policy"]
        assert policy["old_logprob_fallbacks"] == {}
        assert policy["ratio"]["mean"] != 1.0, "the old logprobs are of version 1, the new ones of version 2"


@pytest.mark.parametrize("killed", [False, True])
async def test_parts_of_the_next_batch_are_accumulated_while_a_version_is_in_flight(runs: Runs, killed: bool) -> None:
    # A schedule with parts requires a state of every step.
    sections = {"schedule": SCHEDULE, "trainer": {"train_steps": 2}, "checkpoints": {"state_every_steps": 1}}
    async with runs("whole", schedule=SCHEDULE | {"part_groups": 0}, trainer={"train_steps": 2}) as run:
        await run.train(2)
        theirs = run.lines()
    async with runs.held("before the manifest", 1, fed=1, **sections) as run:
        await run.feed(1)
        cut = run.cuts.pop()
        await run.until("the parts", lambda: accumulated_in(run, 2), pause=0.02)
        assert await run.versions() == [0]
        run.cuts.append(cut)
        await run.until("the next step to be trained", lambda: run.waits_to_publish(1), pause=0.01)
        if killed:
            run.kill()
            run.start()
        else:
            release(run)
        await run.until_finished()
        await assert_every_batch_counts_once(run, {})
        ours = run.lines()
    assert killed or ours[1]["groups_before_cut"] == GROUPS
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in ours] == pytest.approx([line[name] for line in theirs], rel=1e-5, abs=1e-7)


async def test_a_version_after_a_rollback_names_the_restored_one_although_the_trainer_was_killed(runs: Runs) -> None:
    async with runs.held("before the manifest", 2, fed=2) as run:
        await run.store.rollbacks.request(0)
        await run.until("the rollback to wait", lambda: run.waits_to_publish(2), pause=0.01)
        run.kill()
        run.start()

        await run.until_rolled_back()
        records = await run.store.policies.announced()
        assert [(r.policy_version, r.train_step) for r in records] == [(0, 0), (1, 1), (2, 2)]
        opened = [run.checkpoints.open(r) for r in records]
        assert [policy.manifest.parent for policy in opened] == [None, 0, 0]
        first, _, last = ((policy.folder / "model.safetensors").read_bytes() for policy in opened)
        assert last == first


async def test_a_rollback_is_carried_out_although_the_step_after_a_diverged_policy_was_confirmed(runs: Runs) -> None:
    trainer = {"train_steps": 5, "learning_rate": 1e30}
    held = runs.held("before the canary", 1, fed=2, trainer=trainer)
    async with held as run:
        await run.until("the next step to be trained", lambda: run.waits_to_publish(1), pause=0.01)
        release(run)
        for _ in range(2):
            assert await run.until_failed() == EXIT_CONFIG
            assert "train step 1: the log-probabilities of the policy are not finite" in run.log()
            assert run.checkpoints.batch_steps() == [1, 2]
            run.start()
        assert await run.until_failed() == EXIT_CONFIG

        await run.store.rollbacks.request(0)
        run.start()

        await run.until_rolled_back()
        first, last = await run.store.policies.announced()
        assert (last.policy_version, last.train_step) == (1, 2), "the confirmed step is replayed, and no more"
        assert (await run.store.leadership.desired()).start_at_version == 1, "version 0 is of the abandoned branch"
        weights = [run.weights(r) for r in (first, last)]
        assert weights[0] == weights[1]
        ledger = read_ledger(run.checkpoints)
        assert ledger.groups == {1: run.cuts[0], 2: run.cuts[1]}
        assert (ledger.committed_step, ledger.damaged, ledger.trained_twice) == (2, {}, {})
