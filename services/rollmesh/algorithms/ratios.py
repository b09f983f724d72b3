"""Importance ratios from log-probabilities: their denominators, KL estimators, a factor on the rate, distillation.

``sampler`` is the fallback of every other old-logprob source (``config/old_logprob_methods.py``): a token that attended
to another version's KV cache has no exact policy, and no recomputation reproduces it. Sources that claim exactness fall
back for such tokens, counted by reason.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import segment_count
from rollmesh.config.old_logprob_methods import OLD_LOGPROBS, OldLogprobMethod

LOG_RATIO_LIMIT = 20.0
"""Bound of log-ratios: they are clamped to [-20, 20] before exp, so no ratio overflows; the gradient beyond is 0."""


def log_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``clamp(numerator - denominator, -20, 20)``; both are log-probabilities [tokens]."""
    return (numerator - denominator).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return ``exp`` of the clamped log-ratio, [tokens]."""
    return log_ratio(numerator, denominator).exp()


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log p - log q``, an estimate of KL(p || q) from samples of p: unbiased, may be negative; [tokens].

    Source: k1 and k3 of Schulman's note on approximating KL.
    """
    return -log_ratio(log_q, log_p)


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``(q/p - 1) - log(q/p)``: unbiased, never negative, low variance near p = q; [tokens]."""
    difference = log_ratio(log_q, log_p)
    return difference.exp() - 1 - difference


UpdateScale = Callable[[float], float]
"""Effective sample size per trajectory, in (0, 1] -> factor on the learning rate."""


def ess_scale(share: float, *, base: float, rule: Literal["sqrt", "linear"]) -> float:
    """Return ``min(1, share / base)`` to the power of 1/2 (sqrt) or 1 (linear); ``share`` in (0, 1].

    ``share`` is the effective sample size ``(sum w)^2 / sum w^2`` per trajectory of the minibatch, with
    ``w_i = exp(sum_t log(pi / mu))`` over its tokens in the loss, not clipped.

    >>> ess_scale(0.25, base=1.0, rule="sqrt")
    0.5
    """
    factor = min(1.0, share / base)
    return float(factor**0.5) if rule == "sqrt" else factor


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobs:
    """Chosen denominator of every token."""

    values: Tensor  # float [tokens]
    from_trainer: Tensor  # bool [tokens], True where the trainer-side value was taken
    fell_back: Mapping[str, Tensor]  # bool [tokens] by reason
    """Policy tokens that fell back to ``sampler``."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of tokens that fell back, by reason; reasons without tokens are omitted."""
        counts = {reason: int(tokens.sum()) for reason, tokens in self.fell_back.items()}
        return {reason: count for reason, count in counts.items() if count}


def choose_old_logprobs(
    source: OldLogprobMethod, *, behavior: Tensor, trainer: Tensor, available: Tensor, pure: Tensor, policy: Tensor
) -> OldLogprobs:
    """Choose ``trainer`` for the tokens that the source covers, ``behavior`` for the others.

    All [tokens]: ``behavior`` and ``trainer`` float log-probabilities, ``available`` bool where ``trainer`` exists,
    ``pure`` bool where one version's weights and cache sampled the token, ``policy`` bool where a policy sampled it
    (only those are counted).
    """
    if not source.is_known_early:
        return OldLogprobs(values=behavior, from_trainer=torch.zeros_like(policy), fell_back={})
    mixed = policy & ~pure if source.needs_pure else torch.zeros_like(policy)
    taken = policy & available & ~mixed
    return OldLogprobs(
        values=torch.where(taken, trainer.to(behavior.dtype), behavior),
        from_trainer=taken,
        fell_back={"mixed_cache": mixed, source.missing_reason: policy & ~available & ~mixed},
    )


def loglinear_share(staleness: Tensor) -> Tensor:
    """Return the share of the policy in training in ``log pi_old``, float64 [tokens].

    ``log pi_old = (1 - a) log mu + a log pi`` with ``a = d / (d + 1)`` for a token that is ``d`` train steps old: the
    way from the behavior policy to the policy after the update, up to its last step. ``staleness`` int [tokens].
    """
    return staleness / (staleness + 1.0).double()


FALLBACK_REASONS = tuple(sorted({"mixed_cache", *(row.missing_reason for row in OLD_LOGPROBS.methods.values())}))
"""All reasons that may occur in ``OldLogprobs.fallbacks``."""


def reverse_kl_advantages(
    teacher: Tensor,
    behavior: Tensor,
    sequence_index: Tensor,
    sequence_count: int,
    *,
    coefficient: float,
    discount: float,
) -> Tensor:
    """Return ``coefficient * sum_{s >= t} discount^(s - t) (log pi_teacher(a_s) - log mu(a_s))``; [tokens].

    ``teacher`` and ``behavior`` are log-probabilities of the tokens that a policy wrote, ``sequence_index`` int64 their
    sequences, each contiguous and in order; all [tokens]. Log-ratios are clamped to [-20, 20].
    """
    rewards = -coefficient * k1(behavior, teacher)
    if not discount:
        return rewards
    ends = segment_count(sequence_index, sequence_count).cumsum(0)
    after = ends[sequence_index] - 1 - torch.arange(len(rewards), device=rewards.device)
    total, sums = rewards.new_zeros(sequence_count), torch.empty_like(rewards)
    # One place from the end at a time, for all sequences that are long enough.
    for rows in torch.split(after.argsort(stable=True), torch.bincount(after).tolist()):
        sequences = sequence_index[rows]
        sums[rows] = total[sequences] = rewards[rows] + discount * total[sequences]
    return sums
