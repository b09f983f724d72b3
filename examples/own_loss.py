"""A loss of your own: REINFORCE, weighted by the ratio to the policy that sampled the token, with a cap.

trainer:
  algorithm:
    loss: own_loss:capped
    loss_options: {cap: 2.0}
"""

import torch

from rollmesh.algorithms.losses import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import ratio


def capped(data: LossInput, options: LossOptions, *, cap: float = 2.0) -> TokenLoss:
    """Return ``-sg[min(pi / mu, cap)] * A * log pi`` per token; mask, sums and averages are the trainer's."""
    values = ratio(data.logprobs, data.behavior_logprobs).detach()
    weight = values.clamp(max=cap)
    clip = torch.where(values > cap, ClipReason.TRUNCATED, ClipReason.NONE).to(torch.int8)
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=values, weight=weight, clip=clip)
