"""The report of one train step: statistics from flat columns in float64, as numbers ready for JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import TypeAdapter

from rollmesh.algorithms.losses import ClipReason
from rollmesh.algorithms.ratios import k1, k3
from rollmesh.trainer.learner.teacher_scores import TeacherScores
from rollmesh.trainer.learner.train_batch import TrainBatch
from rollmesh.types import BoolArray, Float32Array, Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioStats:
    """Importance ratios of the tokens in the loss, as the loss compares them with its bounds."""

    tokens: int
    mean: float
    std: float
    min: float
    max: float
    clipped_high: float
    """Share of tokens whose gradient is clipped at the upper bound."""
    clipped_low: float
    clipped_dual: float
    truncated: float
    """Share of tokens whose importance weight is truncated at its cap."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GapStats:
    """``|behavior_logprob - trainer logprob|`` on tokens sampled by the weights at the start of the step."""

    tokens: int
    mean: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadStats:
    """Mean, largest value and histogram of whole numbers."""

    mean: float
    max: int
    histogram: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStats:
    """Properties of the fresh or of the replayed groups of a batch before any forward pass."""

    groups: int
    trajectories: int
    unscored_trajectories: int
    rollouts_per_group: SpreadStats
    """Scored trajectories of a group, as many as its rounds gave."""
    original_tokens: int
    """Tokens that a policy wrote, the count in the denominators."""
    trained_tokens: int
    """Tokens in the numerator of the loss."""
    masked_fraction: float
    skipped_trajectories: int
    """Trajectories without a pass, because their advantage is 0 (skip_zero_advantage)."""
    masked_tokens: Mapping[str, int]
    """Tokens, by the first mask that took them out of the numerator; a policy wrote them."""
    reward_mean: float
    reward_std: float
    reward_by_domain: Mapping[str, float]
    """Mean shaped reward by domain of the prompt; empty without domains."""
    outcome_mean: float
    """Mean outcome value before shaping, over the trajectories with a value from a verifier; NaN if there is none."""
    advantage_abs_mean: float
    all_right_groups: int
    """Groups without reward variance whose members all have a positive outcome."""
    all_wrong_groups: int
    """Groups without reward variance in which no member has a positive outcome."""
    truncated_share: float
    off_policy_token_share: float
    """Share of trained tokens with staleness above 0."""
    mixed_cache_token_share: float
    version_span: SpreadStats
    """Newest minus oldest policy version within a trajectory."""
    token_staleness: SpreadStats
    trajectory_staleness: SpreadStats
    response_length_mean: float
    response_length_deciles: tuple[float, ...]
    """Minimum, the nine deciles, maximum."""
    reverse_kl: float | None
    """k1 KL(behavior || teacher) per token in the loss, which distillation lowers; None without a teacher's column."""
    top_token_share: float | None
    """Share of the tokens in the loss that are among their teacher's top tokens; None without those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStats:
    """Comparison of the policy with the behavior policies of the batch, at the start of each minibatch."""

    ratio: RatioStats
    ratio_by_staleness: Mapping[int, RatioStats]
    kl_behavior_k1: float
    """KL(behavior || policy) per token, k1."""
    kl_behavior_k3: float
    effective_sample_size: float
    """Effective sample size of the trajectories, weighted by the product of their token ratios."""
    effective_sample_share: float
    entropy: float
    """Nats per token, at the sampling temperature."""
    logprob_gap_pure: GapStats
    logprob_gap_mixed_cache: GapStats
    old_logprob_fallbacks: Mapping[str, int]
    kl_reference: float | None
    """k3 KL to the reference per token; None without one."""
    forward_kl: float | None
    """KL(teacher || policy) per token over the teacher's top tokens and all others; None unless it is in the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Report of one train step."""

    train_step: int
    loss: float
    """Mean over the minibatches."""
    learning_rate: float
    rate_factor: float
    """Factor on the learning rate (update_scale), mean over the minibatches."""
    grad_norm: float
    """Before clipping; mean over the minibatches."""
    updates: int
    skipped_updates: int
    """Updates that were skipped because the gradient was not finite."""
    trailing_skipped_updates: int
    """Skipped updates after the last applied one."""
    microbatches: int
    forward_tokens: int
    """Tokens in the forward passes of the gradient, prompts included."""
    groups_before_cut: int
    """Groups whose gradient was computed before the batch was cut (schedule.part_groups)."""
    seconds: Mapping[str, float]
    """Wall time by phase: evidence (old and reference logprobs), gradient (parts with evidence), update, statistics."""
    average_reset: bool
    """True if the average of old_logprobs ewma began again with the weights after the step."""
    replayed_share: float
    """Share of the trajectories that are of replayed groups."""
    batch: BatchStats
    """Fresh groups."""
    replay: BatchStats | None
    """Replayed groups; None without any."""
    policy: PolicyStats
    """Comparison over fresh and replayed groups."""

    def to_json(self) -> dict[str, Any]:
        """Return a nested dictionary of numbers with string keys."""
        plain: dict[str, Any] = _REPORT.dump_python(self, mode="json")
        return plain


_REPORT = TypeAdapter(StepReport)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenResults:
    """Results of the gradient pass for each token of a ``TrainBatch``; valid where a policy wrote the token."""

    logprobs: Float64Array  # [tokens], at the start of the token's minibatch
    entropy: Float64Array  # [tokens]
    ratio: Float64Array  # [tokens]
    clip: npt.NDArray[np.int8]  # [tokens], ClipReason
    active: BoolArray  # [tokens], True where the loss has a gradient: its weight is not 0
    as_served: BoolArray  # [tokens], True where logprobs are from the weights at the start of the step, without dropout
    reference_logprobs: Float64Array | None = None  # [tokens]
    forward_kl: Float64Array | None = None  # [tokens]


def batch_stats(batch: TrainBatch) -> BatchStats:
    """Describe a batch. Trajectories without a token in the loss have no staleness and no version span."""
    mask = batch.loss_mask
    tokens = int(mask.sum())
    original = int(batch.policy_mask.sum())
    in_loss = np.unique(batch.sequence_index[mask])
    lengths, domains = batch.response_lengths, np.array(batch.group_domains)[batch.group_index]
    right = wrong = 0
    for group in np.unique(batch.group_index):
        member = batch.group_index == group
        if member.sum() > 1 and np.ptp(batch.rewards[member]) == 0:
            right += int((batch.outcome_values[member] > 0).all())
            wrong += int(not (batch.outcome_values[member] > 0).any())
    verdicts = batch.outcome_values[~np.isnan(batch.outcome_values)]
    return BatchStats(
        groups=len(np.unique(batch.group_index)),
        trajectories=batch.trajectory_count,
        unscored_trajectories=int(batch.unscored.sum()),
        rollouts_per_group=_spread(np.unique(batch.group_index, return_counts=True)[1]),
        original_tokens=original,
        trained_tokens=tokens,
        masked_fraction=1 - tokens / original if original else 0.0,
        skipped_trajectories=int((~batch.passed).sum()),
        masked_tokens={mask: int(column.sum()) for mask, column in batch.masked_by.items()},
        reward_mean=float(batch.rewards.mean()),
        reward_std=float(batch.rewards.std()),
        reward_by_domain={
            name: float(batch.rewards[domains == name].mean()) for name in sorted({*domains.tolist()} - {""})
        },
        outcome_mean=float(verdicts.mean()) if len(verdicts) else math.nan,
        advantage_abs_mean=_advantage_abs_mean(batch),
        all_right_groups=right,
        all_wrong_groups=wrong,
        truncated_share=float(batch.truncated.mean()),
        off_policy_token_share=_mean(batch.staleness[mask] > 0),
        mixed_cache_token_share=_mean(~batch.pure[mask]),
        version_span=_spread(_version_span(batch)),
        token_staleness=_spread(batch.staleness[mask].astype(np.int64)),
        trajectory_staleness=_spread(batch.loss_staleness()[in_loss]),
        response_length_mean=float(lengths.mean()),
        response_length_deciles=tuple(float(x) for x in np.quantile(lengths, np.linspace(0, 1, 11))),
        reverse_kl=None if batch.teacher is None else _reverse_kl(batch.behavior_logprobs, batch.teacher, mask),
        top_token_share=_top_token_share(batch),
    )


def _advantage_abs_mean(batch: TrainBatch) -> float:
    """Average over the units, or with a teacher, which gives every token its own, over the tokens of the policy."""
    if batch.teacher is None:
        return float(np.abs(batch.advantages).mean())
    return _mean(np.abs(batch.token_advantages[batch.policy_mask]))


def _reverse_kl(behavior: Float32Array, teacher: TeacherScores, mask: BoolArray) -> float:
    sampler, scores = (torch.from_numpy(each[mask]).double() for each in (behavior, teacher.logprobs))
    return _mean(k1(sampler, scores).numpy())


def _top_token_share(batch: TrainBatch) -> float | None:
    if batch.teacher is None or batch.teacher.top_ids is None:
        return None
    mask = batch.loss_mask
    return _mean((batch.teacher.top_ids[mask] == batch.token_ids[mask, None]).any(-1))


def policy_stats(
    batch: TrainBatch, results: TokenResults, current_version: int, fallbacks: Mapping[str, int]
) -> PolicyStats:
    """Compare the policy with the behavior policies, over the tokens in the loss that had a pass."""
    mask = batch.loss_mask & batch.passed_mask
    behavior = batch.behavior_logprobs.astype(np.float64)
    policy = torch.from_numpy(results.logprobs[mask])
    sampler = torch.from_numpy(behavior[mask])
    size = effective_sample_size((results.logprobs - behavior)[mask], batch.sequence_index[mask])
    in_loss = len(np.unique(batch.sequence_index[mask]))
    fresh = mask & results.as_served & (batch.versions == current_version)
    gap = np.abs(results.logprobs - behavior)
    staleness = batch.staleness[mask]
    ratio, clip = results.ratio[mask], results.clip[mask]
    reference = None
    if results.reference_logprobs is not None:
        reference = _mean(k3(policy, torch.from_numpy(results.reference_logprobs[mask])).numpy())
    return PolicyStats(
        ratio=ratio_stats(ratio, clip),
        ratio_by_staleness={
            int(s): ratio_stats(ratio[staleness == s], clip[staleness == s]) for s in np.unique(staleness)
        },
        kl_behavior_k1=_mean(k1(sampler, policy).numpy()),
        kl_behavior_k3=_mean(k3(sampler, policy).numpy()),
        effective_sample_size=size,
        effective_sample_share=size / in_loss if in_loss else 0.0,
        entropy=_mean(results.entropy[mask]),
        logprob_gap_pure=_gap(gap[fresh & batch.pure]),
        logprob_gap_mixed_cache=_gap(gap[fresh & ~batch.pure]),
        old_logprob_fallbacks=dict(fallbacks),
        kl_reference=reference,
        forward_kl=None if results.forward_kl is None else _mean(results.forward_kl[mask]),
    )


def active_token_share(batch: TrainBatch, active: BoolArray) -> float:
    """Return the share of the sampled tokens that are in the loss and ``active`` [tokens]; 1 without tokens.

    Trajectories that have no pass because their advantage is 0 count: they are in the loss, and no loss clips them.
    """
    sampled = batch.policy_mask
    return float((batch.loss_mask & active)[sampled].mean()) if sampled.any() else 1.0


def effective_sample_size(log_ratios: Float64Array, sequence_index: Int64Array) -> float:
    """Compute ``(sum w)^2 / sum w^2`` with ``w_i = exp(sum_t log_ratio_t)``, unclipped (VCPO, arXiv 2602.17616).

    ``log_ratios`` and ``sequence_index`` are [tokens]. Log-weights are shifted by their maximum to avoid overflow.
    """
    if not len(log_ratios):
        return 0.0
    _, compact = np.unique(sequence_index, return_inverse=True)
    log_weights = np.bincount(compact, weights=log_ratios)
    weights = np.exp(log_weights - log_weights.max())
    return float(weights.sum() ** 2 / np.square(weights).sum())


def ratio_stats(ratio: Float64Array, clip: npt.NDArray[np.int8]) -> RatioStats:
    """Summarize ratios and clip reasons, [tokens] each. Without tokens mean, min and max are 1 and the rest is 0."""
    values = ratio if len(ratio) else np.ones(1)
    return RatioStats(
        tokens=len(ratio),
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        clipped_high=_mean(clip == ClipReason.HIGH),
        clipped_low=_mean(clip == ClipReason.LOW),
        clipped_dual=_mean(clip == ClipReason.DUAL),
        truncated=_mean(clip == ClipReason.TRUNCATED),
    )


def _version_span(batch: TrainBatch) -> Int64Array:
    seen, first = np.unique(batch.sequence_index[batch.loss_mask], return_index=True)
    versions = batch.versions[batch.loss_mask].astype(np.int64)
    if not len(seen):
        return versions
    spans: Int64Array = np.maximum.reduceat(versions, first) - np.minimum.reduceat(versions, first)
    return spans


def _spread(values: Int64Array) -> SpreadStats:
    if not len(values):
        return SpreadStats(mean=0.0, max=0, histogram={})
    found, counts = np.unique(values, return_counts=True)
    histogram = {int(v): int(c) for v, c in zip(found, counts, strict=True)}
    return SpreadStats(mean=float(values.mean()), max=int(values.max()), histogram=histogram)


def _gap(values: Float64Array) -> GapStats:
    return GapStats(tokens=len(values), mean=_mean(values), max=float(values.max()) if len(values) else 0.0)


def _mean(values: BoolArray | Float64Array) -> float:
    return float(values.mean()) if len(values) else 0.0
