"""PPO's clipped surrogate with asymmetric bounds and dual clip."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.losses.loss_protocol import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import ratio


def ppo_clip(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-min(r A, clip(r, 1 - low, 1 + high) A)``, and at most ``-c A`` where A < 0.

    ``r = exp(log pi - log pi_old)``. Sources: PPO (arXiv 1707.06347); asymmetric bounds .2/.28: DAPO
    (arXiv 2503.14476); dual clip c: arXiv 1912.09729.
    """
    return clipped_surrogate(ratio(data.logprobs, data.old_logprobs), data.advantages, options)


def clipped_surrogate(ratios: Tensor, advantages: Tensor, options: LossOptions) -> TokenLoss:
    """Return the clipped surrogate of any ``ratios`` [tokens]."""
    low, high = 1 - options.clip_low, 1 + options.clip_high
    loss = torch.maximum(-ratios * advantages, -ratios.clamp(low, high) * advantages)
    values = ratios.detach()
    clip = torch.zeros_like(values, dtype=torch.int8)
    clip[(advantages > 0) & (values > high)] = ClipReason.HIGH
    clip[(advantages < 0) & (values < low)] = ClipReason.LOW
    if options.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -options.dual_clip * advantages), loss)
        clip[(advantages < 0) & (values > options.dual_clip)] = ClipReason.DUAL
    return TokenLoss(loss=loss, ratio=values, weight=values * (clip == ClipReason.NONE), clip=clip)
