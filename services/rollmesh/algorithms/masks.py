"""Masks of the numerator of the loss; the denominators always count the original tokens."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class MaskReason(IntEnum):
    """Reason that a token is not in the loss; ``TRAINED`` for a token in the loss."""

    TRAINED = 0
    PROMPT = 1
    """The token belongs to the prompt."""
    ENVIRONMENT = 2
    """The token comes from the environment, a tool or a hint."""
    STALE = 3
    """The token's policy version exceeds the staleness bound (``on_stale: mask_old_segments``)."""


def stale_mask(staleness: Tensor, original_mask: Tensor, max_staleness: int | None) -> Tensor:
    """Keep the tokens that are at most ``max_staleness`` train steps old (all for None); returns bool [tokens].

    ``staleness`` int [tokens] in train steps; ``original_mask`` bool [tokens] marks the tokens sampled by a policy.
    """
    # docs/architecture.md: The staleness bound
    if max_staleness is None:
        return original_mask
    return original_mask & (staleness <= max_staleness)


def mask_reasons(is_prompt: Tensor, original_mask: Tensor, mask: Tensor) -> Tensor:
    """Return the ``MaskReason`` of every token, int8 [tokens]; all inputs are bool [tokens]."""
    reasons = torch.full_like(is_prompt, MaskReason.ENVIRONMENT, dtype=torch.int8)
    reasons[is_prompt] = MaskReason.PROMPT
    reasons[original_mask & ~mask] = MaskReason.STALE
    reasons[original_mask & mask] = MaskReason.TRAINED
    return reasons
