"""Policy losses per token, from log-probabilities, advantages and masks.

Symbols: ``r = pi / pi_old``, ``A`` advantage, ``mu`` behavior policy, ``sg`` stop-gradient, ``low`` and ``high`` the
bounds. Every loss is a function of ``LossInput``, ``LossOptions`` and its own options as keywords.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from math import inf

import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import segment_count, segment_sum
from rollmesh.algorithms.ratios import LOG_RATIO_LIMIT, log_ratio, ratio
from rollmesh.config.loss_methods import LossMethod


class ClipReason(IntEnum):
    """Effect of a loss on the gradient of a token."""

    NONE = 0
    HIGH = 1
    """The ratio is above the upper clip of a positive advantage: no gradient. Where the weight is clipped, of any
    advantage: capped."""
    LOW = 2
    """The ratio is below the lower clip of a negative advantage: no gradient. Where the weight is clipped, of any
    advantage: raised."""
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
    """Advantage of the token: that of its trajectory, turn or session, and what a teacher adds to it."""
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


def loss_options(
    method: LossMethod,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    tis_cap: float = 2.0,
) -> LossOptions:
    """Return the shared options of a loss; None selects its default bound, and no dual clip."""
    low, high = method.bounds or (inf, inf)
    return LossOptions(
        clip_low=low if clip_low is None else clip_low,
        clip_high=high if clip_high is None else clip_high,
        dual_clip=dual_clip,
        tis_cap=tis_cap,
    )


def ppo_clip(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-min(r A, clip(r, 1 - low, 1 + high) A)``, and at most ``-c A`` where A < 0 (``c``: dual clip)."""
    return clipped_surrogate(ratio(data.logprobs, data.old_logprobs), data.advantages, options)


def clipped_surrogate(ratios: Tensor, advantages: Tensor, options: LossOptions) -> TokenLoss:
    """Return the clipped surrogate of any ``ratios`` [tokens]."""
    low, high = 1 - options.clip_low, 1 + options.clip_high
    loss = torch.maximum(-ratios * advantages, -ratios.clamp(low, high) * advantages)
    values = ratios.detach()
    clip = torch.zeros_like(values, dtype=torch.int8)
    clip[(advantages > 0) & (values > high)] = ClipReason.HIGH
    clip[(advantages < 0) & (values < low)] = ClipReason.LOW
    if options.dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -options.dual_clip * advantages), loss)
        clip[(advantages < 0) & (values > options.dual_clip)] = ClipReason.DUAL
    return TokenLoss(loss=loss, ratio=values, weight=values * (clip == ClipReason.NONE), clip=clip)


def decoupled_ppo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``sg[pi_old / mu] * ppo_clip``, the weight not truncated: pi_old is the proximal policy of the source."""
    correction = ratio(data.old_logprobs, data.behavior_logprobs).detach()
    inner = ppo_clip(data, options)
    return replace(inner, loss=correction * inner.loss, weight=correction * inner.weight)


def tis(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``sg[min(pi_old / mu, C)] * ppo_clip``, with ``C = tis_cap``.

    With the old-logprob source ``sampler``, pi_old is mu and the weight is 1, so the correction requires a trainer-side
    source.
    """
    correction = ratio(data.old_logprobs, data.behavior_logprobs).detach()
    inner = ppo_clip(data, options)
    clip = inner.clip.clone()
    clip[(correction > options.tis_cap) & (clip == ClipReason.NONE)] = ClipReason.TRUNCATED
    weight = torch.clamp(correction, max=options.tis_cap)
    return replace(inner, loss=weight * inner.loss, weight=weight * inner.weight, clip=clip)


def gspo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-min(s A, clip(s, 1 - low, 1 + high) A)``, the clipped loss of a sequence ratio; no dual clip.

    ``s_i = exp(1 / |o_i| sum_t m_t (log pi - log pi_old))``. ``m_t`` is 1 for a token in the loss; ``|o_i|`` counts all
    tokens sampled by a policy. A masked token therefore counts as a ratio of 1, and with the aggregation
    ``sequence_mean_token_mean`` the gradient is exactly that of ``s_i A``. The ratio has the token form
    ``sg[s_i] pi / sg[pi]``, so the aggregation spreads the gradient over the tokens.
    """
    difference = (data.logprobs.detach() - data.old_logprobs).masked_fill(~data.mask, 0.0)
    lengths = segment_count(data.sequence_index, data.sequence_count).clamp(min=1)
    mean = segment_sum(difference, data.sequence_index, data.sequence_count) / lengths
    sequence_ratio = mean.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()[data.sequence_index]
    token_ratio = sequence_ratio * (data.logprobs - data.logprobs.detach()).exp()
    return clipped_surrogate(token_ratio, data.advantages, replace(options, dual_clip=None))


def cispo(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-sg[clip(r, 1 - low, 1 + high)] A log pi``: the weight is clipped, the gradient never is.

    In practice only the upper bound is used: ``clip_low`` 1 sets the lower one to 0.
    """
    return _clipped_weight(ratio(data.logprobs, data.old_logprobs).detach(), data, options)


def minpro(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-sg[clip(m_t r_t, 1 - low, 1 + high)] A log pi``, with ``m_t`` the smallest ratio before token t.

    ``m_t = min_{i < t} r_i`` over the earlier tokens of the sequence, 1 for its first one; the tokens of a sequence are
    contiguous and in order. A masked token counts as a ratio of 1 for the tokens after it.
    """
    ratios = ratio(data.logprobs, data.old_logprobs).detach()
    smallest = smallest_before(ratios.masked_fill(~data.mask, 1.0), data.sequence_index, data.sequence_count)
    return _clipped_weight(smallest * ratios, data, options)


def smallest_before(values: Tensor, sequence_index: Tensor, sequence_count: int) -> Tensor:
    """Return the smallest value before each token within its sequence, 1 for the first token; [tokens].

    ``values`` and ``sequence_index`` (sorted) are [tokens].
    """
    if not len(values):
        return values
    # One sequence at a time: a table of all of them would have sequences * longest cells.
    sequences = torch.split(values, segment_count(sequence_index, sequence_count).tolist())
    return torch.cat([part for s in sequences for part in (torch.ones_like(s[:1]), s[:-1].cummin(dim=0).values)])


def _clipped_weight(values: Tensor, data: LossInput, options: LossOptions) -> TokenLoss:
    low, high = 1 - options.clip_low, 1 + options.clip_high
    weight = values.clamp(low, high)
    clip = torch.zeros_like(values, dtype=torch.int8)
    clip[values > high] = ClipReason.HIGH
    clip[values < low] = ClipReason.LOW
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=values, weight=weight, clip=clip)


def topr(data: LossInput, options: LossOptions) -> TokenLoss:
    """Return ``-A log pi`` where A > 0 and ``-sg[min(r, 1)] A log pi`` elsewhere."""
    ratios = ratio(data.logprobs, data.old_logprobs).detach()
    wrong = data.advantages <= 0
    weight = torch.where(wrong, ratios.clamp(max=1.0), torch.ones_like(ratios))
    clip = torch.zeros_like(ratios, dtype=torch.int8)
    clip[wrong & (ratios > 1)] = ClipReason.TRUNCATED
    return TokenLoss(loss=-weight * data.advantages * data.logprobs, ratio=ratios, weight=weight, clip=clip)


def kimi(data: LossInput, options: LossOptions, *, tau: float) -> TokenLoss:
    """Return ``-A log pi + tau / 2 (log pi - log pi_old)^2``, unclipped.

    The reported weight is that of the first term; the square pulls towards pi_old, also where A is 0.
    """
    difference = log_ratio(data.logprobs, data.old_logprobs)
    loss = -data.advantages * data.logprobs + tau / 2 * difference.square()
    ratios = difference.detach().exp()
    nothing = torch.zeros_like(ratios, dtype=torch.int8)
    return TokenLoss(loss=loss, ratio=ratios, weight=torch.ones_like(ratios), clip=nothing)
