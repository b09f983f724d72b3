"""Importance ratios from log-probabilities."""

from __future__ import annotations

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios: they are clamped to [-20, 20] before exp, so no ratio overflows; the gradient beyond is 0."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``clamp(numerator - denominator, -20, 20)``; both are log-probabilities [tokens]."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp`` of the clamped log-ratio, [tokens]."""
    return log_ratio(numerator, denominator).exp()
