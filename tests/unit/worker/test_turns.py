"""Turns of a response, rewards of environments, and the shaping of rewards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.rollout import RewardConfig
from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply, checked_reply
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.worker.environment_program import outcome_of
from rollmesh.worker.trajectory_scoring import shape
from rollmesh.worker.turns import turns_of

from ...kit.records import environment_tokens, policy_tokens

STOP = 9


def policy(*ids):
    return policy_tokens(ids)


def turns_in(segments):
    return [(t.token_ids.tolist(), t.complete, t.answered) for t in turns_of(segments, (STOP,))]


def test_turns_end_at_stop_tokens_whatever_the_chunks():
    segments = [policy(1, 2), policy(3, STOP), environment_tokens([5]), policy(4), policy(STOP), policy(6)]
    assert turns_in(segments) == [([1, 2, 3, STOP], True, True), ([4, STOP], True, False), ([6], False, False)]
    # A reply without tokens leaves two turns next to each other.
    assert turns_in([policy(1, STOP, 2, STOP)]) == [([1, STOP], True, False), ([2, STOP], True, False)]
    assert turns_in([]) == []


@given(st.lists(st.sampled_from([1, 2, STOP]), max_size=20), st.data())
def test_cutting_chunks_elsewhere_changes_no_turn(ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert turns_in([policy(*part) for part in parts]) == turns_in([policy(*ids)])


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e308, -1e160, 1.1e9])
def test_a_reward_of_an_environment_that_would_overflow_is_an_error_with_its_value(reward: float) -> None:
    outcome = outcome_of(reward)
    assert outcome is not None and outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert f"reward is {reward}, expected at most 1e+09 in size" in outcome.message
    assert outcome_of(-1e9) is not None and outcome_of(-1e9).value == -1e9  # type: ignore[union-attr]


def test_a_whole_number_that_no_float_holds_is_refused_as_a_reply() -> None:
    with pytest.raises(DataError, match=r"step returned the reward 1000.*, expected at most 1e\+09"):
        checked_reply(EnvironmentReply(text="", done=True, reward=10**400))


SCORED = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0)


@pytest.mark.parametrize(
    ("tokens", "buffer", "reward"), [(10, 20, 1.0), (80, 20, 1.0), (90, 20, 0.5), (100, 20, 0.0), (50, 1000, 0.5)]
)
def test_long_answers_lose_up_to_one_over_the_last_tokens_of_the_budget(tokens, buffer, reward):
    result = shape(SCORED, tokens, RewardConfig(overlong_buffer_tokens=buffer), budget=100)
    assert result.shaped_reward == pytest.approx(reward)
    assert result.outcome.value == 1.0
    assert not result.assigned
