"""CISPO: the importance weight is clipped, the gradient never is."""

from __future__ import annotations

import torch

from rollmesh.algorithms.losses.loss_protocol import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import ratio


def cispo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-sg[clip(r, 1 - low, 1 + high)] * A * log pi`` with ``r = pi / pi_old``.

    In practice only the upper bound is used: ``clip_low`` 1 sets the lower one to 0. Source: MiniMax-M1
    (arXiv 2506.13585).
    """
    values = ratio(data.logprobs, data.old_logprobs).detach()
    low, high = 1 - options.clip_low, 1 + options.clip_high
    weight = values.clamp(low, high)
    clip = torch.zeros_like(values, dtype=torch.int8)
    clip[values > high] = ClipReason.HIGH
    clip[values < low] = ClipReason.LOW
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=values, weight=weight, clip=clip)
