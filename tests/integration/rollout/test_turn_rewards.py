"""Turns of environments: their first words, returns and idempotency keys, which a lost worker does not change."""

from dataclasses import replace

import numpy as np
import pytest

from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import FinishReason, OutcomeKind, SamplingParams, SegmentSource, TurnReturn
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.environment_program import EnvironmentProgram, outcome_of
from rollmesh.worker.program import RolloutContext
from rollmesh.worker.turns import turns_of

from ...kit.waiting import reached
from .environment_episodes import (
    REPLY,
    TURN,
    CountingEnvironment,
    ForgetfulEnvironment,
    SnapshottingEnvironment,
    expected_episode,
    played_by_two_workers,
    policy_turn,
    program_of,
    saved_episode,
)
from .replicas import running
from .scenes import members, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedReward

REWARDS = (1.0, None, 0.5)
"""Rewards of the episode so far: its turns have 1, 0 and -0.5."""
RETURNS = (0.5, -0.5, -0.5)


def rewarding(kind):
    """The environment with rewards after the first and the last of its three turns."""

    class Rewarding(kind):
        async def step(self, response_text, idempotency_key):
            reply = await super().step(response_text, idempotency_key)
            return replace(reply, reward=REWARDS[len(self.turns) - 1])

    return Rewarding


def check_returns(batch):
    for trajectory in members(batch):
        expected = expected_episode(trajectory.trajectory_id)
        own = [token for token, is_own in expected if is_own]
        ends = np.flatnonzero(np.array(own) == STOP) + 1
        turns = tuple(TurnReturn(end=int(end), value=value) for end, value in zip(ends, RETURNS, strict=True))
        assert trajectory.outcome.turns == turns
        assert (trajectory.outcome.value, trajectory.shaped_reward) == (0.5, 0.5)


@pytest.mark.parametrize("kind", [CountingEnvironment, SnapshottingEnvironment])
async def test_turns_keep_their_rewards_when_another_worker_continues(store, tokenizer, kind):
    log = []
    program = program_of(rewarding(kind), tokenizer, log, by_turn=True)
    batch, _, _ = await played_by_two_workers(store, program, log)
    check_returns(batch)


async def test_without_credit_by_turn_the_newest_reward_is_that_of_the_episode(tokenizer):
    trajectory = saved_episode(policy_turn(0), policy_turn(1))
    outcome = await program_of(rewarding(CountingEnvironment), tokenizer, []).outcome_of(trajectory)
    assert (outcome.value, outcome.turns) == (1.0, ())


async def test_a_finished_trajectory_that_another_worker_scores_has_its_returns(tokenizer):
    # The budget cut off the third turn, which no environment has answered.
    cut = replace(policy_turn(2), token_ids=np.array([12, 13], np.int32))
    trajectory = saved_episode(policy_turn(0), policy_turn(1), cut)
    outcome = await program_of(rewarding(CountingEnvironment), tokenizer, [], by_turn=True).outcome_of(trajectory)
    assert outcome.value == 1.0
    assert outcome.turns == tuple(TurnReturn(end=end, value=value) for end, value in ((2, 1.0), (4, 0.0), (6, 0.0)))


def test_an_episode_without_a_reward_is_the_verifiers_and_a_return_that_overflows_an_error():
    turns = turns_of((policy_turn(0), policy_turn(1)), (STOP,))
    assert outcome_of(None, [0.0, 0.0], turns) is None
    for reward, before in ((1.0, [0.0, float("nan")]), (2e9, [0.0, 0.0]), (1.0, [0.0, -1e9])):
        outcome = outcome_of(reward, before, turns)
        assert outcome.kind is OutcomeKind.VERIFIER_ERROR and "expected at most 1e+09 in size" in outcome.message


class KeyLog:
    """Sampler of given turns; collects the keys of an environment, and tokens and state at each snapshot."""

    def __init__(self, tokenizer, kind, turns):
        self.keys, self.snapshots, self.turns = [], [], list(turns)
        keys = self.keys

        class Environment(kind):
            async def step(self, response_text, idempotency_key):
                keys.append(idempotency_key)
                return await super().step(response_text, idempotency_key)

        self.program = EnvironmentProgram(
            lambda: Environment([]), tokenizer, stop_token_ids=(STOP,), max_turns=8, timeout_seconds=60.0, metrics=None
        )

    async def sample(self, active, budget, params, **options):
        active.add(policy_turn(self.turns.pop(0)))
        return FinishReason.STOP

    async def run(self, segments=(), snapshot=None, pinned_version=None):
        active = ActiveTrajectory(saved_episode(*segments), snapshot=snapshot)

        async def save(active):
            pass

        async def keep(active, snapshot):
            self.snapshots.append((list(active.segments), snapshot))

        rollout = RolloutContext(
            active=active,
            caller=self,
            params=SamplingParams(stop_token_ids=(STOP,)),
            budget=100,
            save=save,
            report_first_token=save,
            restart=save,
            keep_snapshot=keep,
            pinned_version=pinned_version,
        )
        result = await self.program.run(rollout)
        return active.result(result.reason)


async def keys_of(tokenizer, turns, **options):
    log = KeyLog(tokenizer, ForgetfulEnvironment, turns)
    await log.run(**options)
    return log.keys


async def test_a_turn_with_other_tokens_or_after_other_tokens_has_another_key(tokenizer):
    first = await keys_of(tokenizer, [0, 1, 2])
    assert [key.rpartition(":")[0] for key in first] == ["e0-0.0:0", "e0-0.0:1", "e0-0.0:2"]
    assert await keys_of(tokenizer, [0, 1, 2]) == first
    second = await keys_of(tokenizer, [0, 5, 2])
    assert second[0] == first[0]
    assert not set(second[1:]) & set(first)


async def test_evaluations_of_two_versions_have_different_keys_for_the_same_tokens(tokenizer):
    keys = [await keys_of(tokenizer, [0, 1, 2], pinned_version=version) for version in (1, 2, 2)]
    assert keys[1] == keys[2]
    assert not set(keys[0]) & set(keys[1])


async def test_a_replay_repeats_the_keys(tokenizer):
    log = KeyLog(tokenizer, CountingEnvironment, [0, 1, 2])
    trajectory = await log.run()
    first = list(log.keys)
    await log.program.outcome_of(trajectory)
    assert log.keys[3:] == first, "scored again after its worker died"
    again = KeyLog(tokenizer, CountingEnvironment, [2])
    await again.run(trajectory.segments[:4])
    assert again.keys == first


@pytest.mark.parametrize(("saved", "covered"), [(1, 1), (2, 2), (2, 1)])
async def test_a_turn_after_a_snapshot_has_the_key_of_the_unbroken_episode(tokenizer, saved, covered):
    log = KeyLog(tokenizer, SnapshottingEnvironment, [0, 1, 2])
    await log.run()
    segments, snapshot = log.snapshots[saved - 1][0], log.snapshots[covered - 1][1]
    resumed = KeyLog(tokenizer, SnapshottingEnvironment, [0, 1, 2][saved:])
    await resumed.run(segments, snapshot)
    assert resumed.keys == log.keys[covered:]


FIRST = EnvironmentReply(text=REPLY, done=False, reward=-1.0)


def speaking(kind, first=FIRST):
    class Speaking(kind):
        async def reset(self, prompt):
            await super().reset(prompt)
            return first

    return Speaking


def check_spoken(batch):
    for trajectory in members(batch):
        assert trajectory.response_ids.tolist()[:2] == [8, 9]
        sources = [segment.source for segment in trajectory.segments]
        assert sources[0] is SegmentSource.ENVIRONMENT and sources[1] is SegmentSource.POLICY
        assert sum(len(s) for s in trajectory.segments if s.source is SegmentSource.ENVIRONMENT) == 6
        assert trajectory.segments[0].policy_version == 0
        assert trajectory.finish_reason is FinishReason.ENVIRONMENT


@pytest.mark.parametrize("kind", [CountingEnvironment, ForgetfulEnvironment, SnapshottingEnvironment])
async def test_the_first_words_of_an_environment_come_before_the_first_turn_once(store, tokenizer, kind):
    log = []
    made = program_of(speaking(kind), tokenizer, log)
    slow = ScriptedGenerator("a", stop_every=TURN, seconds_per_token=0.02)
    async with whole_mesh(store, slow, program=made, chunk=4) as first:
        await reached(lambda: len(log) >= 6)
        await first.stop()  # half of the episodes continue in another worker
        async with running(store, first.cluster, ScriptedReward(), first.plan, index=1, program=made, chunk=4):
            check_spoken(await first.trainer.train(1))


async def test_the_reward_of_the_first_words_is_that_of_an_episode_without_a_turn(store, tokenizer):
    reward = ScriptedReward()
    made = program_of(speaking(CountingEnvironment), tokenizer, [])
    generator = ScriptedGenerator("a", stop_every=1000)
    async with whole_mesh(store, generator, program=made, reward=reward, budget=TURN) as run:
        batch = await run.trainer.train(1)
    assert {(t.finish_reason, t.shaped_reward) for t in members(batch)} == {(FinishReason.LENGTH, -1.0)}
    assert reward.batches == []


class TalksTooMuch(CountingEnvironment):
    async def step(self, response_text, idempotency_key):
        return EnvironmentReply(text="w8 " * 10_000_000, done=False, reward=2.0)


async def test_a_reply_of_megabytes_is_not_even_tokenized_and_ends_the_episode(store, tokenizer):
    async with whole_mesh(
        store, ScriptedGenerator("a", stop_every=TURN), program=program_of(TalksTooMuch, tokenizer, [])
    ) as run:
        batch = await run.trainer.train(1)
    assert {(t.finish_reason, len(t.response_ids), t.shaped_reward) for t in members(batch)} == {
        (FinishReason.LENGTH, TURN, 2.0)
    }


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (EnvironmentReply(text="w8 " * 100, done=False), "leaves no room for an answer: raise rollout.max_new_tokens"),
        (EnvironmentReply(text="", done=True), "max_attempts"),
        ("hello", "max_attempts"),
    ],
)
async def test_first_words_after_which_no_turn_can_be_sampled_end_as_a_dead_letter(store, tokenizer, first, reason):
    made = program_of(speaking(CountingEnvironment, first), tokenizer, [])
    async with whole_mesh(store, ScriptedGenerator("a", stop_every=TURN), program=made):
        letter = (await reached(store.dead_letters.newest))[0]
    assert reason in letter.reason
