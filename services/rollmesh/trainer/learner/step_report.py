"""The report of one train step: numbers only, ready for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any


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
    """k3 KL to the pinned reference per token; None without one."""


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
    """Wall time by phase: evidence (old and reference logprobs), gradient, update, statistics.

    The gradient of parts is in gradient, with their evidence.
    """
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

    def after_stage_end(self, seconds: float) -> StepReport:
        """Return the report with the time of the stage end before the step in the phase evidence."""
        return replace(self, seconds={**self.seconds, "evidence": self.seconds["evidence"] + seconds})

    def to_json(self) -> dict[str, Any]:
        """Return a nested dictionary of numbers with string keys."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
