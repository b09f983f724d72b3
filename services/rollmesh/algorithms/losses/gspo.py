"""GSPO: one length-normalised ratio per sequence."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.algorithms.losses.loss_protocol import LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.losses.ppo_clip import clipped_surrogate
from rollmesh.algorithms.ratios import LOG_RATIO_LIMIT
from rollmesh.algorithms.segment_columns import segment_count, segment_sum


def gspo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-min(s A, clip(s, 1 - low, 1 + high) A)``, the clipped loss of a sequence ratio.

    ``s_i = exp(1 / |o_i| sum_t m_t (log pi - log pi_old))``. ``m_t`` is 1 for a token in the loss; ``|o_i|`` counts all
    tokens sampled by a policy. A masked token therefore counts as a ratio of 1, and with the aggregation
    ``sequence_mean_token_mean`` the gradient is exactly that of ``s_i A``. The ratio has the token form
    ``sg[s_i] pi / sg[pi]``, so the aggregation spreads the gradient over the tokens. There is no dual clip.
    Source: GSPO (arXiv 2507.18071).
    """
    difference = (data.logprobs.detach() - data.old_logprobs).masked_fill(~data.mask, 0.0)
    lengths = segment_count(data.sequence_index, data.sequence_count).clamp(min=1)
    mean = segment_sum(difference, data.sequence_index, data.sequence_count) / lengths
    sequence_ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[data.sequence_index]
    token_ratio = sequence_ratio * (data.logprobs - data.logprobs.detach()).exp()
    return clipped_surrogate(token_ratio, data.advantages, replace(options, dual_clip=None))
