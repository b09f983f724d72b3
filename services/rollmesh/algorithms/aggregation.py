"""Sums over ragged sets, and the aggregation of per-token losses to one number.

An aggregation is a weight per token, computed from the ORIGINAL tokens and divided by its sum over the whole minibatch.
Masking a token removes it from the numerator and changes no denominator, so it shrinks the update instead of
re-weighting the other tokens. A token's own weight depends on its trajectory only, so gradients of parts of a minibatch
add up before the sum is known.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum ``values`` [items] by ``index`` int64 [items] in [0, count); differentiable; returns [count]."""
    return values.new_zeros(count).index_add(0, index, values)


def segment_count(index: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """Count the items per segment (only those with ``mask``), int64 [count]."""
    return torch.bincount(index if mask is None else index[mask], minlength=count)


def token_mean(original_mask: Tensor, sequence_index: Tensor, sequence_count: int) -> Tensor:
    """Return 1 for every original token, divided ``1 / sum_i |o_i|``: long answers weigh more (DAPO, arXiv 2503.14476).

    ``original_mask`` bool [tokens], ``sequence_index`` int64 [tokens]; returns float64 [tokens].
    """
    return original_mask.double()


def sequence_mean_token_mean(original_mask: Tensor, sequence_index: Tensor, sequence_count: int) -> Tensor:
    """Return ``1 / |o_i|``; divided, ``1 / (S |o_i|)``: the S answers with tokens have the same weight (GRPO, GSPO).

    ``original_mask`` bool [tokens], ``sequence_index`` int64 [tokens]; returns float64 [tokens].
    """
    lengths = segment_count(sequence_index, sequence_count, original_mask)
    return original_mask.double() / lengths.clamp(min=1)[sequence_index]


Aggregation = Callable[[Tensor, Tensor, int], Tensor]
"""(original_mask [tokens], sequence_index [tokens], sequence_count) -> weights before the division [tokens]."""

AGGREGATIONS: Mapping[str, Aggregation] = MappingProxyType(
    {"token_mean": token_mean, "sequence_mean_token_mean": sequence_mean_token_mean}
)


def aggregate(token_loss: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum_t weights_t * mask_t * token_loss_t``; a masked token adds 0 even if its loss is not finite."""
    return (token_loss.masked_fill(~mask, 0.0) * weights).sum()
