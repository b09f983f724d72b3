"""Multi-turn rollouts on a real queue: turns, replays and snapshots of environments."""

import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import FinishReason, OutcomeKind, SamplingParams, SegmentSource
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.program import RolloutContext
from rollmesh.worker.turns import LARGEST_STATE_BYTES, Snapshot

from ...kit.waiting import reached
from .environment_episodes import (
    REPLY,
    TURN,
    CountingEnvironment,
    ForgetfulEnvironment,
    SnapshottingEnvironment,
    check,
    played_by_two_workers,
    policy_turn,
    program_of,
    saved_episode,
)
from .replicas import running, schedule
from .scenes import start, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedReward


async def test_turns_alternate_and_the_environments_reward_counts(store, tokenizer):
    log, reward = [], ScriptedReward()
    async with whole_mesh(
        store,
        ScriptedGenerator("a", stop_every=TURN),
        reward=reward,
        program=program_of(CountingEnvironment, tokenizer, log),
        chunk=4,
    ) as run:
        check(await run.trainer.train(1))
    assert reward.batches == []
    ids = {key.rpartition(":")[0] for key in log}
    assert sorted(log) == sorted(f"{i}:{turn}" for i in ids for turn in range(3))


class GatedEnvironment(CountingEnvironment):
    """Ends after one turn; it lasts until the gate opens in the first group, and until both its members are there in
    the others."""

    gate: asyncio.Event
    first: list[str]

    async def step(self, response_text, idempotency_key):
        if self.prompt.metadata["index"] == 0:
            self.first.append(idempotency_key)
            await self.gate.wait()
        while len(self.first) < 2:
            await asyncio.sleep(0.01)
        return EnvironmentReply(text="", done=True, reward=float(idempotency_key.split(":")[0][-1] == "1"))


@pytest.mark.parametrize(("replayable", "chunk"), [(False, 4), (False, 8), (True, 8)])
async def test_pace_waits_for_a_group_whose_tokens_are_not_saved_before_the_end(store, tokenizer, replayable, chunk):
    """Staleness bound 1, batches of one group: one whose first token is of step 0 must be in batch 2."""
    gate = asyncio.Event()
    kind = type("Gated", (GatedEnvironment,), {"gate": gate, "first": [], "replayable": replayable})
    plan = schedule("areal", train_steps=3, groups_per_batch=1, group_size=2, max_staleness=1, pool_size=4)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", stop_every=TURN))

    async def second_cut_is_decided():
        seen = await store.mesh.view()
        return seen.cut_step == 2 or seen.blocked_since is not None

    async with running(store, cluster, ScriptedReward(), plan, program=program_of(kind, tokenizer, []), chunk=chunk):
        assert [g.group_id for g in (await trainer.train(1)).groups] == ["e0-1"]
        await reached(second_cut_is_decided)
        assert (await store.mesh.view()).cut_step == 1
        gate.set()
        batch = await trainer.train(2)
        assert [g.group_id for g in batch.groups] == ["e0-0"]
        assert {t.segments[0].policy_version for t in batch.groups[0].trajectories} == {0}
    assert "stale" not in (await store.mesh.counts()).drops


class SpareHangs(ScriptedGenerator):
    """Sends one chunk of the spare member's first turn, then nothing until the call ends."""

    async def generate(self, call):
        async for chunk in super().generate(call):
            yield chunk
            if call.trajectory_id.endswith(".2"):
                await asyncio.Event().wait()


@pytest.mark.parametrize("kind", [CountingEnvironment, ForgetfulEnvironment, SnapshottingEnvironment])
async def test_a_spare_member_is_cut_off_within_its_turn_whatever_the_environment_saves(store, tokenizer, kind):
    plan = schedule("sync", train_steps=1, groups_per_batch=1, group_size=2, spare_members=1)
    cluster, trainer = await start(store, plan, SpareHangs("a", stop_every=TURN))
    opened = []

    class Noted(kind):
        def __init__(self, log):
            super().__init__(log)
            opened.append(self)

    program = program_of(Noted, tokenizer, [])
    options = {"program": program, "chunk": 4, "heartbeat": 0.05, "grace": 0.5}
    async with running(store, cluster, ScriptedReward(), plan, **options) as replica:
        check(await trainer.train(1))
        await reached(lambda: len(opened) == 3 and not any(environment.open for environment in opened))
        await reached(lambda: not replica.session.trajectories)
    assert (await store.mesh.counts()).totals["surplus_total"] == 1


async def test_a_replayable_environment_is_played_again_after_a_lost_worker(store, tokenizer):
    log = []
    batch, _, pool = await played_by_two_workers(store, program_of(CountingEnvironment, tokenizer, log), log)
    check(batch)
    assert len(log) > 3 * pool, "finished turns were played again to a fresh environment"


async def test_an_environment_that_cannot_be_replayed_starts_over_without_a_trace(store, tokenizer):
    log = []
    batch, left, _ = await played_by_two_workers(store, program_of(ForgetfulEnvironment, tokenizer, log), log)
    check(batch)
    assert (left.leased, left.partial) == (0, 0)


async def test_an_environment_with_snapshots_continues_in_another_worker(store, tokenizer):
    log = []
    batch, left, pool = await played_by_two_workers(store, program_of(SnapshottingEnvironment, tokenizer, log), log)
    check(batch)
    assert left.partial > 0
    assert len(log) == len(set(log)) == 3 * pool, "no turn was played twice"


ENVIRONMENT_REPLY = replace(
    policy_turn(0), token_ids=np.array([8, 9], np.int32), behavior_logprobs=None, source=SegmentSource.ENVIRONMENT
)


class TurnCaller:
    """Writes one more turn at every call."""

    async def sample(self, held, budget, params, *, save, durable):
        held.add(policy_turn(5))
        return FinishReason.STOP


def kept(turns, reply=REPLY):
    state = json.dumps([f"turn {n}" for n in range(turns)]).encode()
    reply = EnvironmentReply(text=reply, done=False)
    return Snapshot(turn_count=turns, reply=reply, reward=None, state=state).to_bytes()


@pytest.mark.parametrize(
    ("segments", "snapshot", "played"),
    [
        # The worker died after a turn was saved and before it was played, after that, and after the reply was saved.
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1)], kept(1), [1, 2]),
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1)], kept(2), [2]),
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1), ENVIRONMENT_REPLY], kept(2), [2]),
        # Redis has lost the snapshot of a turn whose reply the tokens hold, or all of them: it begins again.
        ([policy_turn(0), ENVIRONMENT_REPLY, policy_turn(1), ENVIRONMENT_REPLY], kept(1), [0, 1, 2]),
        ([policy_turn(0)], None, [0, 1, 2]),
    ],
)
async def test_a_snapshot_covers_whatever_the_worker_left(tokenizer, segments, snapshot, played):
    held, log, snapshots = ActiveTrajectory(saved_episode(*segments), snapshot=snapshot), [], []

    async def save(_held):
        pass

    async def restart(held):
        held.restart()

    async def keep(held, data):
        snapshots.append(Snapshot.from_bytes(data).turn_count)

    rollout = RolloutContext(
        active=held,
        caller=TurnCaller(),
        params=SamplingParams(stop_token_ids=(STOP,)),
        budget=100,
        save=save,
        report_first_token=save,
        restart=restart,
        keep_snapshot=keep,
    )
    ending = await program_of(SnapshottingEnvironment, tokenizer, log).run(rollout)
    assert log == [f"e0-0.0:{turn}" for turn in played]
    assert snapshots == [turn + 1 for turn in played]
    assert ending.reason is FinishReason.ENVIRONMENT
    sources = [segment.source for segment in held.segments]
    assert sources == [SegmentSource.POLICY, SegmentSource.ENVIRONMENT] * 2 + [SegmentSource.POLICY]


async def test_the_reward_of_an_episode_survives_the_worker_in_its_snapshot(tokenizer):
    trajectory = saved_episode(policy_turn(0))
    program = program_of(SnapshottingEnvironment, tokenizer, [])
    reply = EnvironmentReply(text="", done=True, reward=3.0)
    last = Snapshot(turn_count=1, reply=reply, reward=3.0, state=b"[]").to_bytes()
    assert (await program.outcome_of(trajectory, last)).value == 3.0
    for missing in (None, kept(0)):
        assert (await program.outcome_of(trajectory, missing)).kind is OutcomeKind.VERIFIER_ERROR


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (
            EnvironmentReply(text="hi \udc00", done=False),
            "environment: turn 0: step returned the text 'hi \\\\udc00', in",
        ),
        (EnvironmentReply(text=None, done=False), "environment: turn 0: step returned the text None, expected text"),
        (EnvironmentReply(text="", done=True, reward="1"), "turn 0: step returned the reward '1', expected a number"),
        ({"text": "hi"}, "environment: turn 0: step returned dict instead of an EnvironmentReply"),
        (ValueError("\udc00"), r"environment: turn 0: ValueError: \\udc00 \("),
    ],
)
async def test_a_reply_that_cannot_be_used_fails_the_attempt_with_words_that_can_be_kept(tokenizer, reply, words):
    class Environment(CountingEnvironment):
        async def step(self, response_text, idempotency_key):
            if isinstance(reply, Exception):
                raise reply
            return reply

    trajectory = saved_episode(policy_turn(0))
    outcome = await program_of(Environment, tokenizer, []).outcome_of(trajectory)
    assert outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert re.search(words, outcome.message), outcome.message
    assert outcome.message.encode()


def test_a_snapshot_comes_back_as_it_was_and_a_huge_one_is_refused():
    reply = EnvironmentReply(text="w8", done=False, reward=0.5)
    snapshot = Snapshot(turn_count=2, reply=reply, reward=0.5, state=b"\x00\xff")
    assert Snapshot.from_bytes(snapshot.to_bytes()) == snapshot
    with pytest.raises(DataError, match="the limit is"):
        replace(snapshot, state=bytes(LARGEST_STATE_BYTES + 1)).to_bytes()
    with pytest.raises(DataError, match="not a snapshot"):
        Snapshot.from_bytes(b"{}")
