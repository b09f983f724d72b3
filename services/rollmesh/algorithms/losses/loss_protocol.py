"""Input, options and result of every policy loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor


class ClipReason(IntEnum):
    """Effect of a loss on the gradient of a token."""

    NONE = 0
    HIGH = 1
    """The ratio is above the upper clip of a positive advantage (cispo, minpro: of any): no gradient (cispo, minpro:
    capped)."""
    LOW = 2
    """The ratio is below the lower clip of a negative advantage (cispo, minpro: of any): no gradient (cispo, minpro:
    raised)."""
    DUAL = 3
    """The ratio of a negative advantage is above the dual clip: no gradient."""
    TRUNCATED = 4
    """The importance weight was cut at its cap; the gradient stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInput:
    """Packed tokens sampled by a policy, masked or not; every tensor is float [tokens] unless noted."""

    logprobs: Tensor
    """Log-probabilities of the policy in training; the only input with a gradient."""
    old_logprobs: Tensor
    """Denominator of the ratio, from the run's old-logprob source."""
    behavior_logprobs: Tensor
    """Log-probabilities of the policy that sampled the token."""
    advantages: Tensor
    """Advantage of the trajectory, repeated for each of its tokens."""
    mask: Tensor
    """bool, True for a token in the numerator of the loss."""
    sequence_index: Tensor
    """int64, index of the token's sequence in [0, sequence_count)."""
    sequence_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options that losses share; each loss reads its own."""

    clip_low: float
    """inf for a loss without bounds, as ``clip_high``."""
    clip_high: float
    dual_clip: float | None
    tis_cap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """Per-token result; everything but ``loss`` is detached."""

    loss: Tensor  # float [tokens], differentiable
    ratio: Tensor  # float [tokens], the ratio that was compared with the clip bounds
    weight: Tensor  # float [tokens], the gradient of the loss is -weight * advantage * grad logprob
    clip: Tensor  # int8 [tokens], ClipReason


PolicyLoss = Callable[..., TokenLoss]
"""(LossInput, LossOptions, own options as keywords) -> TokenLoss."""
