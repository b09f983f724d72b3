"""Masks of the numerator of the loss, decided once per train step.

The denominators always count the original tokens. ``c = log(pi_old / mu)`` is the correction of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import segment_count, segment_sum
from rollmesh.algorithms.ratios import LOG_RATIO_LIMIT, log_ratio


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
    """Advantage of the token: that of its trajectory, turn or session, and what a teacher adds to it."""
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


def icepop(data: MaskInput, *, low: float, high: float) -> Tensor:
    """Keep the tokens with ``low <= exp(c) <= high``; bool [tokens]."""
    ratios = data.correction().exp()
    return (ratios >= low) & (ratios <= high)


def ratio_bounds(
    data: MaskInput,
    *,
    token: Sequence[float] | None,
    sequence: Sequence[float] | None,
    geometric: Sequence[float] | None,
    veto: float | None,
) -> Tensor:
    """Keep the tokens whose ratios ``exp(c)`` are within all bounds [low, high] that are not None; bool [tokens].

    ``token`` bounds the ratio of the token, ``sequence`` the product over its answer, ``geometric`` the |o|-th root of
    the product. ``veto`` masks an answer with a token ratio below it. A token out of the loss counts as a ratio of 1.
    """
    logs = data.correction()
    keep = torch.ones_like(data.mask)
    if token is not None:
        keep &= _within(logs, token)
    if sequence is not None:
        keep &= _within(data.sequence_sum(logs), sequence)[data.sequence_index]
    if geometric is not None:
        keep &= _within(data.sequence_mean(logs), geometric)[data.sequence_index]
    if veto is not None:
        keep &= (data.sequence_sum((logs.exp() < veto).double()) == 0)[data.sequence_index]
    return keep


def _within(logs: Tensor, bounds: Sequence[float]) -> Tensor:
    ratios = logs.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return (ratios >= bounds[0]) & (ratios <= bounds[1])


def opsm(data: MaskInput, *, delta: float) -> Tensor:
    """Mask the answers with ``A < 0`` and a mean of ``-c`` above ``delta``; bool [tokens].

    A token out of the loss counts as 0. The two policies of the source are those before and in the update.
    """
    divergence = data.sequence_mean(-data.correction())[data.sequence_index]
    return ~((data.advantages < 0) & (divergence > delta))


def m2po(data: MaskInput, *, threshold: float) -> Tensor:
    """Mask the tokens with the largest ``c^2`` until the mean over the others is at most ``threshold``.

    The mean is over the tokens in the loss of the whole batch; equal tokens leave from the last one on. Returns bool
    [tokens].
    """
    inside = torch.nonzero(data.mask).flatten()
    squares, order = data.correction()[inside].square().sort(stable=True)
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=squares.dtype)
    keep = torch.ones_like(data.mask)
    # Means of sorted values never fall, so the tokens over the bound are the last ones.
    keep[inside[order[means > threshold]]] = False
    return keep


def mastered(data: MaskInput, *, entropy: float, probability: float) -> Tensor:
    """Mask the tokens with ``pi >= probability`` of right answers whose mean entropy is below ``entropy``.

    ``entropy`` in nats per token, over all tokens of the answer. Returns bool [tokens].
    """
    assert data.entropy is not None and data.policy_logprobs is not None
    low = data.sequence_mean(data.entropy)[data.sequence_index] < entropy
    return ~(data.solved & low & (data.policy_logprobs.exp() >= probability))
