"""Importance ratios from log-probabilities, and what is computed from them: KL estimators, a factor on the rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios: they are clamped to [-20, 20] before exp, so no ratio overflows; the gradient beyond is 0."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``clamp(numerator - denominator, -20, 20)``; both are log-probabilities [tokens]."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp`` of the clamped log-ratio, [tokens]."""
    return log_ratio(numerator, denominator).exp()


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log p - log q``, an estimate of KL(p || q) from samples of p: unbiased, may be negative; [tokens].

    Source: k1 and k3 of Schulman's note on approximating KL.
    """
    return -log_ratio(log_q, log_p)


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``(q/p - 1) - log(q/p)``: unbiased, never negative, low variance near p = q; [tokens]."""
    difference = log_ratio(log_q, log_p)
    return difference.exp() - 1 - difference


UpdateScale = Callable[[float], float]
"""Effective sample size per trajectory, in (0, 1] -> factor on the learning rate."""


def ess_scale(share: float, *, base: float, rule: Literal["sqrt", "linear"]) -> float:
    """Return ``min(1, share / base)`` to the power of 1/2 (sqrt) or 1 (linear); ``share`` in (0, 1].

    ``share`` is the effective sample size ``(sum w)^2 / sum w^2`` per trajectory of the minibatch, with
    ``w_i = exp(sum_t log(pi / mu))`` over its tokens in the loss, not clipped.

    >>> ess_scale(0.25, base=1.0, rule="sqrt")
    0.5
    """
    factor = min(1.0, share / base)
    return float(factor**0.5) if rule == "sqrt" else factor
