"""Decoupled PPO: the clip is centred on a proximal policy, and a weight corrects for the behavior policy."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.algorithms.losses.loss_protocol import LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.losses.ppo_clip import ppo_clip
from rollmesh.algorithms.ratios import ratio


def decoupled_ppo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``sg[pi_prox / mu] * PPO_clip(pi / pi_prox)``.

    pi_prox is the old-logprob source, mu the behavior policy. Sources: batch-size invariance (arXiv 2110.00641), AReaL
    Eq. 5 (arXiv 2505.24298).
    """
    correction = ratio(data.old_logprobs, data.behavior_logprobs).detach()
    inner = ppo_clip(data, options)
    return replace(inner, loss=correction * inner.loss, weight=correction * inner.weight)
