"""Kimi k1.5: policy gradient with a squared log-ratio as regularizer."""

from __future__ import annotations

import torch

from rollmesh.algorithms.losses.loss_protocol import LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import log_ratio


def kimi(data: LossInput, options: LossOptions, *, tau: float) -> TokenLoss:
    """Return ``-A log pi + tau / 2 (log pi - log pi_old)^2``, unclipped.

    The reported weight is that of the first term; the square pulls towards pi_old, also where A is 0. Source: Kimi k1.5
    (arXiv 2501.12599), per token as in ROLL.
    """
    difference = log_ratio(data.logprobs, data.old_logprobs)
    loss = -data.advantages * data.logprobs + tau / 2 * difference.square()
    ratios = difference.detach().exp()
    nothing = torch.zeros_like(ratios, dtype=torch.int8)
    return TokenLoss(loss=loss, ratio=ratios, weight=torch.ones_like(ratios), clip=nothing)
