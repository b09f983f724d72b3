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
    lengths = segment_count(sequence_index, sequence_count)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(len(values), device=values.device) - starts[sequence_index]
    # One row per sequence, shifted by one: column t holds the value of token t - 1. Memory: sequences * longest.
    table = values.new_ones(sequence_count, int(lengths.max()) + 1)
    table[sequence_index, positions + 1] = values
    table[:, 0] = torch.inf
    smallest = table.cummin(dim=1).values[sequence_index, positions]
    return torch.where(positions == 0, 1.0, smallest)
