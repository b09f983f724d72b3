"""MinPRO: the ratio of a token times the smallest ratio before it."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.losses.loss_protocol import ClipReason, LossInput, LossOptions, TokenLoss
from rollmesh.algorithms.ratios import ratio
from rollmesh.algorithms.segment_columns import segment_count


def minpro(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-sg[clip(m_t r_t, 1 - low, 1 + high)] * A * log pi`` with ``r = pi / pi_old``.

    ``m_t = min_{i < t} r_i`` over the earlier tokens of the sequence, 1 for its first one; the tokens of a sequence are
    contiguous and in order. A masked token counts as a ratio of 1 for the tokens after it. Source: MinPRO
    (arXiv 2601.22718).
    """
    ratios = ratio(data.logprobs, data.old_logprobs).detach()
    values = smallest_before(ratios.masked_fill(~data.mask, 1.0), data.sequence_index, data.sequence_count) * ratios
    low, high = 1 - options.clip_low, 1 + options.clip_high
    weight = values.clamp(low, high)
    clip = torch.zeros_like(values, dtype=torch.int8)
    clip[values > high] = ClipReason.HIGH
    clip[values < low] = ClipReason.LOW
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=values, weight=weight, clip=clip)


def smallest_before(values: Tensor, sequence_index: Tensor, sequence_count: int) -> Tensor:
    """Return the smallest value before each token within its sequence, 1 for the first token; [tokens].

    ``values`` and ``sequence_index`` (sorted) are [tokens].
    """
    if not len(values):
        return values
    # One sequence at a time: a table of all of them would have sequences * longest cells.
    sequences = torch.split(values, segment_count(sequence_index, sequence_count).tolist())
    return torch.cat([part for s in sequences for part in (torch.ones_like(s[:1]), s[:-1].cummin(dim=0).values)])
