import pytest

from rollmesh.config.rollout import RewardConfig
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.worker.trajectory_scoring import shape

SCORED = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0)
TIMED_OUT = RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="slow")
BROKEN = RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message="broken")


@pytest.mark.parametrize(("tokens", "reward"), [(10, 1.0), (80, 1.0), (90, 0.5), (100, 0.0)])
def test_long_answers_lose_up_to_one_over_the_last_tokens_of_the_budget(tokens, reward):
    result = shape(SCORED, tokens, RewardConfig(overlong_buffer_tokens=20), budget=100)
    assert result.shaped_reward == pytest.approx(reward)
    assert result.outcome.value == 1.0
    assert not result.assigned


@pytest.mark.parametrize("outcome", [TIMED_OUT, BROKEN])
@pytest.mark.parametrize("policy", ["unscorable", "retry"])
def test_a_missing_value_stays_missing_and_is_never_a_silent_zero(outcome, policy):
    result = shape(outcome, 10, RewardConfig(on_timeout=policy, on_error=policy, fixed_value=-3.0), budget=100)
    assert result.outcome is outcome
    assert not result.assigned


def test_a_fixed_value_is_assigned_by_kind_and_the_kind_stays_visible():
    config = RewardConfig(on_timeout="fixed", on_error="unscorable", fixed_value=-0.5)
    late = shape(TIMED_OUT, 10, config, budget=100)
    assert (late.assigned, late.shaped_reward, late.outcome.kind) == (True, -0.5, OutcomeKind.TIMED_OUT)
    assert not shape(BROKEN, 10, config, budget=100).assigned


@pytest.mark.parametrize("outcome", [TIMED_OUT, BROKEN])
def test_a_dead_letter_has_no_value_either(outcome):
    result = shape(outcome, 10, RewardConfig(on_timeout="dead_letter", on_error="dead_letter"), budget=100)
    assert (result.dead, result.assigned, result.shaped_reward) == (True, False, 0.0)
    assert not shape(SCORED, 10, RewardConfig(on_timeout="dead_letter", on_error="dead_letter"), budget=100).dead


def test_a_buffer_longer_than_the_budget_covers_the_budget():
    result = shape(SCORED, 50, RewardConfig(overlong_buffer_tokens=1000), budget=100)
    assert result.shaped_reward == pytest.approx(0.5)
