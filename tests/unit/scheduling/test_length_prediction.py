"""Rank correlation, the judgement on the two predictors of lengths, and the start ranks."""

import math

import numpy as np
import pytest

from rollmesh.prompt_history import LengthPrediction
from rollmesh.scheduling.length_prediction import (
    LEAST_CORRELATION,
    LEAST_PAIRS,
    LengthEvidence,
    rank_correlation,
    start_rank,
    weigh,
)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(1, 10), (2, 20), (3, 400), (9, 401)], 1.0),
        ([(1, 9), (2, 8), (3, 1)], -1.0),
        # By the formula for distinct values, with rank differences d: 1 - 6 * sum(d^2) / (n * (n^2 - 1)).
        ([(1, 3), (2, 4), (3, 2), (4, 1)], 1 - 6 * (4 + 4 + 1 + 9) / 60),
        # Ties have their mean rank: (-1.5, 0, 0, 1.5) and (-1.5, -0.5, 0.5, 1.5) give 4.5 / sqrt(4.5 * 5).
        ([(1, 1), (2, 2), (2, 3), (3, 4)], 4.5 / math.sqrt(22.5)),
        # The ten pairs of Wikipedia's article on the coefficient.
        (
            [(7, 106), (27, 100), (2, 86), (50, 101), (28, 99), (29, 103), (20, 97), (12, 113), (6, 112), (17, 110)],
            -29 / 165,
        ),
    ],
)
def test_the_rank_correlation_equals_the_one_worked_by_hand(pairs: list[tuple[float, float]], expected: float) -> None:
    assert rank_correlation(pairs) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("pairs", [[], [(1, 2)], [(5, 1), (5, 2), (5, 3)], [(1, 4), (2, 4)]])
def test_equal_lengths_have_no_rank_correlation(pairs: list[tuple[float, float]]) -> None:
    assert rank_correlation(pairs) is None


def made_groups(between_prompts: float, count: int = 256) -> list[LengthPrediction]:
    """Groups of eight lognormal lengths; this share of the variance is between prompts, with one epoch before."""
    rng = np.random.default_rng(17)
    prompts = rng.normal(0, math.sqrt(between_prompts), count)
    found = []
    for prompt in prompts:
        before, now = np.exp(6 + prompt + rng.normal(0, math.sqrt(1 - between_prompts), (2, 8)))
        found.append(LengthPrediction(float(before.mean()), float(now.mean()), float(now[0]), float(now[1:].mean())))
    return found


def test_lengths_that_belong_to_the_prompt_are_predicted_and_others_are_not() -> None:
    """The shares 0.92 and 0.06 are those of two public traces, whose sibling correlations are 0.91 and 0.15."""
    reasoning, base = weigh(made_groups(0.92)), weigh(made_groups(0.06))
    assert reasoning.siblings == pytest.approx(0.91, abs=0.05)
    assert base.siblings == pytest.approx(0.15, abs=0.1)
    assert reasoning.history_predicts
    assert not base.history_predicts


def test_the_order_stays_admission_before_there_is_evidence() -> None:
    few = made_groups(0.92, LEAST_PAIRS - 1)
    assert weigh(few) == LengthEvidence()
    unknown = [p._replace(expected=None) for p in made_groups(0.92)]
    assert weigh(unknown).history is None and weigh(unknown).siblings is not None
    assert {start_rank(tokens, weigh(few)) for tokens in (None, 5.0, 9_000.0)} == {0}


def test_the_longest_expected_group_starts_first_and_an_unknown_one_before_it() -> None:
    trusted = LengthEvidence(history=LEAST_CORRELATION)
    lengths = [None, 1e9, 30_000.0, 2_000.0, 1_000.0, 10.0, 0.0]
    ranks = [start_rank(tokens, trusted) for tokens in lengths]
    assert ranks == sorted(ranks) and len(set(ranks)) == len(ranks)
    assert ranks[0] == 0 and ranks[-1] == 127
    assert start_rank(1000.0, LengthEvidence(history=LEAST_CORRELATION - 0.01)) == 0
