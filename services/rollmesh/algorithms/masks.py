"""Which tokens stay in the numerator of the loss. The denominators keep counting the original tokens."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class MaskReason(IntEnum):
    """Why a token is out of the loss; ``TRAINED`` says it is in."""

    TRAINED = 0
    PROMPT = 1
    """The token belongs to the prompt."""
    ENVIRONMENT = 2
    """The environment, a tool or a hint wrote it."""
    STALE = 3
    """Its policy version is older than the staleness bound (``on_stale: mask_old_segments``)."""


def stale_mask(staleness: Tensor, original_mask: Tensor, max_staleness: int | None) -> Tensor:
    """Tokens of the loss that are at most ``max_staleness`` train steps old (all of them for None), bool [tokens].

    ``staleness`` int [tokens] in train steps; ``original_mask`` bool [tokens] marks the tokens that a policy wrote.
    """
    if max_staleness is None:
        return original_mask
    return original_mask & (staleness <= max_staleness)


def mask_reasons(is_prompt: Tensor, original_mask: Tensor, mask: Tensor) -> Tensor:
    """``MaskReason`` of every token, int8 [tokens]; all inputs are bool [tokens]."""
    reasons = torch.full_like(is_prompt, MaskReason.ENVIRONMENT, dtype=torch.int8)
    reasons[is_prompt] = MaskReason.PROMPT
    reasons[original_mask & ~mask] = MaskReason.STALE
    reasons[original_mask & mask] = MaskReason.TRAINED
    return reasons
