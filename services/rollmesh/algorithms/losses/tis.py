"""Truncated importance sampling on top of PPO-clip."""

from __future__ import annotations

from dataclasses import replace

import torch

from rollmesh.algorithms.losses.loss_protocol import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.losses.ppo_clip import ppo_clip
from rollmesh.algorithms.ratios import ratio


def tis(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``sg[min(pi_old / mu, C)] * PPO_clip(pi / pi_old)``.

    With the old-logprob source ``sampler``, pi_old is mu and the weight is 1, so the correction requires a trainer-side
    source. Source: the truncated correction of the rollout engine's mismatch used by slime and verl.
    """
    correction = ratio(data.old_logprobs, data.behavior_logprobs).detach()
    inner = ppo_clip(data, options)
    clip = inner.clip.clone()
    clip[(correction > options.tis_cap) & (clip == ClipReason.NONE)] = ClipReason.TRUNCATED
    weight = torch.clamp(correction, max=options.tis_cap)
    return replace(inner, loss=weight * inner.loss, weight=weight * inner.weight, clip=clip)
