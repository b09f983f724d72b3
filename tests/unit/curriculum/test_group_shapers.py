"""Group shapers against the numbers of their sources and plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.round_methods import largest_z_score
from rollmesh.curriculum.shapers import load_shaper, longest_kept

from .outcomes import group_of

DAP = {"longest_tokens": 16384, "buffer_tokens": 2048}


def test_dap_penalises_long_answers_to_hard_prompts_less() -> None:
    group = group_of([1, 0, 0, 0], [15360, 15360, 16384, 100], truncated=[False, False, True, False])
    assert load_shaper("dap", DAP)(group, {}).shaped_rewards == (1 - 0.125, -0.5, -1.0, 0.0)


def test_dap_counts_a_right_answer_cut_off_at_the_longest_length_in_full() -> None:
    group = group_of([1, 0, 0, 0], [16384, 10, 10, 10], truncated=[True, False, False, False])
    assert load_shaper("dap", DAP)(group, {}).shaped_rewards[0] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_dap_equals_the_formula_of_its_source(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, longest, buffer = int(rng.integers(1, 17)), 500, int(rng.integers(1, 500))
    gamma, failure = float(rng.uniform(0, 3)), float(rng.uniform(0, 2))
    outcomes, lengths = rng.integers(0, 2, count).astype(float).tolist(), rng.integers(1, 501, count).tolist()
    cut = [length == longest and bool(rng.integers(0, 2)) for length in lengths]
    options = {"longest_tokens": longest, "buffer_tokens": buffer, "gamma": gamma, "failure_scale": failure}
    shaped = load_shaper("dap", options)(group_of(outcomes, lengths, truncated=cut, shaping=0.25), {}).shaped_rewards
    rate = sum(outcomes) / count
    for got, outcome, length, is_cut in zip(shaped, outcomes, lengths, cut, strict=True):
        penalty = ((longest - buffer) - length) / buffer if length > longest - buffer else 0.0
        scale = 1.0 if is_cut else rate**gamma if outcome else failure
        assert got == pytest.approx(outcome + 0.25 + scale * penalty, abs=1e-12)


def test_dot_truncates_the_outlier_of_a_group_that_is_all_right() -> None:
    lengths = [1000] * 31 + [9000]
    assert longest_kept(lengths, 3.0) == 5492
    closing = load_shaper("dot", {})(group_of([1.0] * 32, lengths, shaping=0.5), {})
    assert closing.kept_tokens == (*[1000] * 31, 5492)
    assert closing.shaped_rewards == (*[1.5] * 31, 0.5)


def test_the_largest_z_score_of_a_group_is_that_of_one_outlier() -> None:
    known = {4: 1.5, 8: 2.475, 10: 2.846, 11: 3.015, 16: 3.75, 32: 5.48}
    assert {count: round(largest_z_score(count), 3) for count in known} == known
    for count in known:
        lengths = [0] * (count - 1) + [10**6]
        mean, spread = float(np.mean(lengths)), float(np.std(lengths, ddof=1))
        assert (10**6 - mean) / spread == pytest.approx(largest_z_score(count))


@pytest.mark.parametrize(
    ("outcomes", "lengths"),
    [
        ([1.0] * 31 + [0.0], [1000] * 31 + [9000]),
        ([1.0] * 32, [1000] * 32),
        ([1.0] * 32, [10] * 31 + [60]),
        ([1.0], [9000]),
        ([], []),
    ],
    ids=["one wrong", "equal lengths", "little excess", "one member", "no member"],
)
def test_dot_leaves_other_groups_as_they_are(outcomes: list[float], lengths: list[int]) -> None:
    closing = load_shaper("dot", {})(group_of(outcomes, lengths), {})
    assert (closing.shaped_rewards, closing.kept_tokens) == (tuple(outcomes), None)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=2, max_size=40),
    alpha=st.floats(0.1, 4),
    least=st.integers(1, 100),
    right=st.booleans(),
)
def test_dot_keeps_every_answer_up_to_the_limit(lengths: list[int], alpha: float, least: int, right: bool) -> None:
    outcomes = [1.0] * (len(lengths) - 1) + [float(right)]
    options = {"alpha": alpha, "least_excess": least, "truncated_reward": -0.5}
    closing = load_shaper("dot", options)(group_of(outcomes, lengths), {})
    limit = math.floor(np.mean(lengths) + alpha * np.std(lengths, ddof=1) + 1e-7)
    if closing.kept_tokens is None:
        assert closing.shaped_rewards == tuple(outcomes)
        assert not right or max(lengths) - limit <= least
        return
    assert right
    for length, kept, reward in zip(lengths, closing.kept_tokens, closing.shaped_rewards, strict=True):
        assert 1 <= kept <= length
        assert reward == (1.0 if kept == length else -0.5)
        assert kept == length or (length - kept >= least and abs(kept - limit) <= 1)


def test_without_a_shaper_rewards_stay_as_they_are() -> None:
    closing = load_shaper("none", {})(group_of([1.0, 0.0], shaping=-0.25), {})
    assert (closing.shaped_rewards, closing.kept_tokens) == ((0.75, -0.25), None)
