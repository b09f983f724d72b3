"""Multi-turn rollouts on a real queue whose environments hang, fail or cannot be closed."""

import asyncio
import time

import numpy as np
import pytest

from rollmesh.mesh import Cursor, Desired
from rollmesh.store.queue_types import EvalRequest, Finish, NewGroup
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import FinishReason, OutcomeKind, Prompt
from rollmesh.worker.program import SingleTurnProgram

from ...kit.waiting import reached
from .environment_episodes import (
    TURN,
    CountingEnvironment,
    SnapshottingEnvironment,
    check,
    policy_turn,
    program_of,
    saved_episode,
)
from .replicas import running, schedule
from .scenes import members, start, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedReward


class HangingEnvironment(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        await asyncio.sleep(3600)


class CancellingEnvironment(CountingEnvironment):
    """Awaits a call that its client library has cancelled."""

    async def step(self, response_text, idempotency_key):
        call = asyncio.create_task(asyncio.sleep(3600))
        call.cancel()
        await call


class CancellingProgram(SingleTurnProgram):
    async def run(self, rollout):
        await CancellingEnvironment([]).step("", "")


def made(kind, tokenizer, **options):
    return kind() if kind is CancellingProgram else program_of(kind, tokenizer, [], **options)


@pytest.mark.parametrize("kind", [HangingEnvironment, CancellingEnvironment, CancellingProgram])
async def test_an_attempt_that_hangs_or_awaits_a_cancelled_call_ends_as_a_dead_letter(store, tokenizer, kind):
    program = made(kind, tokenizer, timeout=0.05)
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=program) as run:
        letter = (await reached(store.dead_letters.newest))[0]
        assert letter.reason == "max_attempts"
        assert letter.attempts >= 3
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") >= 3


class BrokenToolEnvironment(SnapshottingEnvironment):
    async def step(self, response_text, idempotency_key):
        self.log.append(idempotency_key.rpartition(":")[0])
        raise ValueError("the tool is broken")


async def test_an_environment_with_snapshots_that_fails_at_its_first_turn_ends_as_a_dead_letter(store, tokenizer):
    log = []
    program = program_of(BrokenToolEnvironment, tokenizer, log)
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=program, chunk=4):
        letter = (await reached(store.dead_letters.newest))[0]
    assert letter.reason == "max_attempts"
    assert log.count(f"{letter.trajectory_id}:0") == 4, "the first attempt, then three without progress"


async def test_turns_run_out(store, tokenizer):
    program = program_of(CountingEnvironment, tokenizer, [], max_turns=2)
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=program) as run:
        batch = await run.trainer.train(1)
    for trajectory in members(batch):
        assert trajectory.finish_reason is FinishReason.LENGTH
        assert trajectory.response_ids.tolist().count(STOP) == 2


class OutageEnvironment(CountingEnvironment):
    """Fails at once until what it stands on is back: some time after it was missed first."""

    def __init__(self, log, missed):
        super().__init__(log)
        self.missed = missed

    async def step(self, response_text, idempotency_key):
        now = time.monotonic()
        if now < self.missed.setdefault("first", now) + 1.5:
            raise ConnectionError("the tool server is down")
        return await super().step(response_text, idempotency_key)


async def test_a_short_outage_of_an_environment_does_not_use_up_the_attempts(store, tokenizer):
    missed = {}
    program = program_of(lambda log: OutageEnvironment(log, missed), tokenizer, [])
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=program, first_pause=1.0) as run:
        check(await run.trainer.train(1))
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") >= 1
    assert await store.dead_letters.newest() == []


class UnclosableEnvironment(CountingEnvironment):
    error: BaseException

    async def aclose(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError("already gone"), asyncio.CancelledError()])
async def test_an_episode_counts_even_if_its_environment_cannot_be_closed(store, tokenizer, error):
    program = program_of(type("Unclosable", (UnclosableEnvironment,), {"error": error}), tokenizer, [])
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=program) as run:
        check(await run.trainer.train(1))
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="failed") == 0


class AwayEnvironment(CountingEnvironment):
    def __init__(self, log):
        raise ConnectionError("the tool server is away")


class ChattyEnvironment(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text=None, done=False)


@pytest.mark.parametrize("kind", [AwayEnvironment, ChattyEnvironment, CancellingEnvironment, CancellingProgram])
async def test_an_environment_that_fails_costs_an_evaluation_its_answers_and_never_the_replica(store, tokenizer, kind):
    await store.settings.set_user_paused(True)
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=made(kind, tokenizer)) as run:
        await store.evaluations.request(EvalRequest(evaluation_id="e", policy_version=0, prompt_count=3))

        async def result():
            return run.task.done() or (await store.evaluations.all())[0].result

        done = await reached(result)
        assert not run.task.done()
        assert (done.sample_count, done.discarded_count) == (0, 3)


async def test_a_finished_episode_whose_environment_cannot_be_made_again_has_an_error_for_a_score(tokenizer):
    trajectory = saved_episode(policy_turn(0))
    outcome = await program_of(AwayEnvironment, tokenizer, []).outcome_of(trajectory)
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert "the tool server is away" in outcome.message


class ReplayRaises:
    """Ends every trajectory at once and cannot score one whose worker has died."""

    async def run(self, rollout):
        raise AssertionError("nothing is to be rolled out")

    async def outcome_of(self, trajectory, snapshot=None):
        raise TypeError("a program with a fault")


async def test_a_finished_trajectory_whose_score_always_raises_ends_as_a_dead_letter(store):
    plan = schedule("sync", train_steps=1)
    cluster, _ = await start(store, plan, ScriptedGenerator("a"))
    leader = await store.leadership.acquire("once")
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="exact")
    orphans = [NewGroup(group_id="e0-0", prompt=prompt, needed=2, epoch=0, index=0)]
    await store.leadership.admit(leader, orphans, Cursor(), Cursor(index=1))
    await store.leadership.set_desired(leader, Desired(pool_size=1))
    session = await store.sessions.open("the one that dies")
    assert await store.trajectories.lease(session, 1)
    last = Finish(
        trajectory_id="e0-0.0", token_offset=0, segments=[policy_turn(0)], finish_reason=FinishReason.ENVIRONMENT
    )
    await store.trajectories.finish(session, [last])
    await store.sessions.close(session)
    await store.settings.set_user_paused(True)
    async with running(store, cluster, ScriptedReward(), plan, program=ReplayRaises()):
        (letter,) = await reached(store.dead_letters.newest)
    assert (letter.trajectory_id, letter.reason) == ("e0-0.0", "max_attempts to score it")
