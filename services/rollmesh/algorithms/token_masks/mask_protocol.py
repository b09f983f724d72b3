"""Input of every token mask."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rollmesh.algorithms.ratios import log_ratio
from rollmesh.algorithms.segment_columns import segment_count, segment_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskInput:
    """All tokens of a batch that a policy wrote; every tensor is float64 [tokens] unless noted."""

    old_logprobs: Tensor
    """Log-probabilities of the run's old-logprob source; the behavior policy's where it has none."""
    behavior_logprobs: Tensor
    """Log-probabilities of the policy that sampled the token."""
    policy_logprobs: Tensor | None
    """Log-probabilities of the policy at the start of the step; None if no mask needs them."""
    entropy: Tensor | None
    """Entropy of the same policy in nats; None if no mask needs it."""
    advantages: Tensor
    """Advantage of the trajectory, repeated for each of its tokens."""
    solved: Tensor
    """bool, True for the tokens of a trajectory with a positive outcome."""
    mask: Tensor
    """bool, True for a token that no earlier mask took out of the loss."""
    sequence_index: Tensor
    """int64, index of the token's sequence in [0, sequence_count)."""
    sequence_count: int

    def correction(self) -> Tensor:
        """Return ``log(pi_old / mu)`` of every token, 0 for a token out of the loss; [tokens]."""
        return log_ratio(self.old_logprobs, self.behavior_logprobs).masked_fill(~self.mask, 0.0)

    def sequence_sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` [tokens] over each sequence; [sequences]."""
        return segment_sum(values, self.sequence_index, self.sequence_count)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Average ``values`` [tokens] over all tokens of each sequence, masked or not; [sequences]."""
        lengths = segment_count(self.sequence_index, self.sequence_count).clamp(min=1)
        return self.sequence_sum(values) / lengths


TokenMask = Callable[..., Tensor]
"""(MaskInput, options as keywords) -> bool [tokens], True for a token that stays in the loss."""
