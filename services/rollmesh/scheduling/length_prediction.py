"""Predictability of lengths, measured on the groups that ended, and the start ranks that follow from it.

The measure is Spearman's rank correlation. In public traces the length of one trajectory and the mean length of its
siblings correlate with 0.91 (a reasoning model near its token limit) and with 0.15 (a base model early in training).
Longest-first needs the first kind: below ``LEAST_CORRELATION`` its order is close to a random one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.prompt_history import LengthPrediction
from rollmesh.types import Float64Array

LEAST_CORRELATION = 0.5
"""Rank correlation of expected and true lengths from which groups start longest first."""
LEAST_PAIRS = 32
"""Groups with an expectation that are needed for a judgement: the standard error is then below 0.18."""
LAST_RANK = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthEvidence:
    """Rank correlations with the true length; None before LEAST_PAIRS groups, and where all lengths are equal."""

    history: float | None = None
    """Of the mean length in the prompt's record, at the admission of the group."""
    siblings: float | None = None
    """Of member 0 with the mean of the other members."""

    @property
    def history_predicts(self) -> bool:
        """True if groups may start longest first."""
        return self.history is not None and self.history >= LEAST_CORRELATION


def weigh(predictions: Sequence[LengthPrediction]) -> LengthEvidence:
    """Measure the two predictors on the newest groups that ended."""
    history = [(p.expected, p.mean) for p in predictions if p.expected is not None]
    siblings = [(p.first, p.rest) for p in predictions if p.first is not None and p.rest is not None]
    return LengthEvidence(history=_judged(history), siblings=_judged(siblings))


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, ties with their mean rank; None if all values of one side are equal."""
    if len(pairs) < 2:
        return None
    x, y = (_centred_ranks(np.array(values, dtype=np.float64)) for values in zip(*pairs, strict=True))
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else None


def start_rank(expected_tokens: float | None, evidence: LengthEvidence) -> int:
    """Return the start rank of a group, the lowest first: by expected length, quarter octaves apart, the longest first.

    A prompt without a record may be long, so it starts first. Without a predictor all ranks are equal: admission order.
    """
    if expected_tokens is None or not evidence.history_predicts:
        return 0
    return LAST_RANK - min(LAST_RANK - 1, int(4 * math.log2(expected_tokens + 1)))


def _judged(pairs: Sequence[tuple[float, float]]) -> float | None:
    return rank_correlation(pairs) if len(pairs) >= LEAST_PAIRS else None


def _centred_ranks(values: Float64Array) -> Float64Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    centred: Float64Array = ranks - ranks.mean()
    return centred
