"""Per-token estimators of KL(p || q) from samples of p (k1 and k3 of Schulman's note on approximating KL)."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.ratios import log_ratio


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log p - log q``: unbiased, may be negative; [tokens]."""
    return -log_ratio(log_q, log_p)


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``(q/p - 1) - log(q/p)``: unbiased, never negative, low variance near p = q; [tokens]."""
    difference = log_ratio(log_q, log_p)
    return difference.exp() - 1 - difference
