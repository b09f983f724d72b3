"""Rewards by turn of environments: every turn has a return, which a lost worker does not change."""

from dataclasses import replace

import numpy as np
import pytest

from rollmesh.types import OutcomeKind, TurnReturn
from rollmesh.worker.environment_program import outcome_of
from rollmesh.worker.turns import turns_of

from .environment_episodes import (
    CountingEnvironment,
    SnapshottingEnvironment,
    expected_episode,
    played_by_two_workers,
    policy_turn,
    program_of,
    saved_episode,
)
from .scenes import members
from .scripted import STOP

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
