"""Rewards of environments that no train step could use."""

from __future__ import annotations

import math

import pytest

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply, checked_reply
from rollmesh.types import OutcomeKind
from rollmesh.worker.environment_program import outcome_of


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e308, -1e160, 1.1e9])
def test_a_reward_of_an_environment_that_would_overflow_is_an_error_with_its_value(reward: float) -> None:
    outcome = outcome_of(reward)
    assert outcome is not None and outcome.kind is OutcomeKind.VERIFIER_ERROR
    assert f"reward is {reward}, expected at most 1e+09 in size" in outcome.message
    assert outcome_of(-1e9) is not None and outcome_of(-1e9).value == -1e9  # type: ignore[union-attr]


def test_a_whole_number_that_no_float_holds_is_refused_as_a_reply() -> None:
    with pytest.raises(DataError, match=r"step returned the reward 1000.*, expected at most 1e\+09"):
        checked_reply(EnvironmentReply(text="", done=True, reward=10**400))
