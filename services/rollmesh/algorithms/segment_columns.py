"""Sums and counts over ragged sets, such as the tokens of a sequence or the members of a group."""

from __future__ import annotations

import torch
from torch import Tensor


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum ``values`` [items] by ``index`` int64 [items] in [0, count); differentiable; returns [count]."""
    return values.new_zeros(count).index_add(0, index, values)


def segment_count(index: Tensor, count: int, mask: Tensor | None = None) -> Tensor:
    """Count the items per segment (only those with ``mask``), int64 [count]."""
    return torch.bincount(index if mask is None else index[mask], minlength=count)
