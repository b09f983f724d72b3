"""TOPR: right answers without a correction, wrong ones with a truncated ratio."""

from __future__ import annotations

import torch

from rollmesh.algorithms.losses.loss_protocol import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import ratio


def topr(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-A log pi`` where A > 0 and ``-sg[min(r, 1)] A log pi`` elsewhere, with ``r = pi / pi_old``.

    Source: TOPR (arXiv 2503.14286), in the form of one ratio per token.
    """
    ratios = ratio(data.logprobs, data.old_logprobs).detach()
    wrong = data.advantages <= 0
    weight = torch.where(wrong, ratios.clamp(max=1.0), torch.ones_like(ratios))
    clip = torch.zeros_like(ratios, dtype=torch.int8)
    clip[wrong & (ratios > 1)] = ClipReason.TRUNCATED
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=ratios, weight=weight, clip=clip)
