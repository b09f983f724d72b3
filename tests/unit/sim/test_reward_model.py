from __future__ import annotations

import math

import numpy as np
import pytest

from rollmesh.sim.reward_model import RewardModel, SolveModel


def test_answers_wait_for_a_free_worker_in_order() -> None:
    workers = RewardModel(median_seconds=2.0, worker_count=2).workers()
    assert [workers.known_at(now, f"g.{now}", 0) for now in (0.0, 0.5, 1.0, 10.0)] == [2.0, 2.5, 4.0, 12.0]


def test_scoring_times_are_lognormal_and_depend_on_the_answer_only() -> None:
    model = RewardModel(median_seconds=3.0, sigma=0.5, seed=7)
    seconds = [model.seconds(f"g{i}.0", 0) for i in range(4000)]
    logs = np.log(seconds)
    # Four standard errors of mean and standard deviation.
    assert np.mean(logs) == pytest.approx(math.log(3.0), abs=4 * 0.5 / math.sqrt(4000))
    assert np.std(logs) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(8000))
    assert RewardModel(median_seconds=3.0, sigma=0.5, seed=7).seconds("g5.0", 0) == seconds[5]
    assert model.seconds("g5.0", 1) != seconds[5]
    assert RewardModel(median_seconds=3.0, sigma=0.5, seed=8).seconds("g5.0", 0) != seconds[5]


def test_prompts_have_beta_distributed_probabilities() -> None:
    model = SolveModel(alpha=2.0, beta=6.0)
    probabilities = [model.probability(prompt) for prompt in range(2000)]
    deviation = math.sqrt(2 * 6 / (8**2 * 9))
    assert np.mean(probabilities) == pytest.approx(0.25, abs=4 * deviation / math.sqrt(2000))


def test_spare_members_do_not_change_the_rewards_of_the_others() -> None:
    model = SolveModel(seed=3)
    assert model.rewards(9, 5, 16)[:8] == model.rewards(9, 5, 8)
    assert set(model.rewards(9, 5, 16)) <= {0.0, 1.0}
