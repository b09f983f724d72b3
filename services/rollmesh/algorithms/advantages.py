"""Advantages: one number per trajectory, from the rewards of its group or of its batch; float64 [trajectories].

Symbols: ``R_i`` shaped reward of trajectory i, ``g`` its group, ``n_g`` members of the group, ``L_i`` tokens of
trajectory i that a policy wrote, ``s_i`` its mean log-probability per token. A group of one gets 0.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import segment_count, segment_sum

_EPSILON = 1e-6
_MEDIAN_EPSILON = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryColumns:
    """The trajectories of a whole batch; every tensor is on the CPU, float64 [trajectories] unless noted.

    With ``trainer.algorithm.credit: turn`` or ``shared`` turns or sessions stand for trajectories.
    """

    rewards: Tensor
    """Shaped rewards."""
    outcome_values: Tensor
    """Values of the verifier, before shaping; NaN without one."""
    group_index: Tensor
    """int64, index of the trajectory's group in [0, group_count)."""
    group_count: int
    lengths: Tensor
    """int64, tokens that a policy wrote."""
    truncated: Tensor
    """bool, ended by the token budget."""
    behavior_logprob_sums: Tensor
    """Sum of the log-probabilities of these tokens under the policies that sampled them."""
    policy_logprob_sums: Tensor | None = None
    """The same under the policy at the start of the step; None unless the advantage needs it."""
    reference_logprob_sums: Tensor | None = None
    """The same under the pinned reference version; None unless the advantage needs it."""

    @property
    def solved(self) -> Tensor:
        """True for a positive outcome (for a positive reward without a value of the verifier); bool [trajectories]."""
        return self.outcome_values.where(~self.outcome_values.isnan(), self.rewards) > 0

    def group_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` [trajectories] over the group of each trajectory; [trajectories]."""
        return segment_sum(values, self.group_index, self.group_count)[self.group_index]

    def group_mean(self, values: Tensor) -> Tensor:
        """Return the mean of ``values`` [trajectories] over the group of each trajectory; [trajectories]."""
        return self.group_sum(values) / self.group_sizes()

    def group_sizes(self) -> Tensor:
        """Return the size of the group of each trajectory, int64 [trajectories]."""
        return segment_count(self.group_index, self.group_count)[self.group_index]


Advantage = Callable[..., Tensor]
"""(TrajectoryColumns, options as keywords) -> advantages, float64 [trajectories]."""


def grpo(data: TrajectoryColumns, *, norm: str | None = None) -> Tensor:
    """Return ``(R_i - mean_g R) / (std_g R + 1e-6)``, with the sample standard deviation, or by 1 (norm none)."""
    centred = data.rewards - data.group_mean(data.rewards)
    if norm == "none":
        return centred
    variance = data.group_sum(centred.square()) / (data.group_sizes() - 1).clamp(min=1)
    return centred / (variance.sqrt() + _EPSILON)


def dr_grpo(data: TrajectoryColumns) -> Tensor:
    """Return ``R_i - mean_g R``: hard and easy prompts are not up-weighted."""
    return data.rewards - data.group_mean(data.rewards)


def rloo(data: TrajectoryColumns) -> Tensor:
    """Return ``R_i - (sum_g R - R_i) / (n_g - 1)``: the mean of the other members is subtracted."""
    sizes = data.group_sizes()
    others = data.group_sum(data.rewards) - data.rewards
    return (data.rewards - others / (sizes - 1).clamp(min=1)) * (sizes > 1)


def reinforce_pp(data: TrajectoryColumns) -> Tensor:
    """Return ``(R_i - mean R) / (std R + 1e-6)`` over the batch, with the sample deviation; 0 for one trajectory."""
    centred = data.rewards - data.rewards.mean()
    deviation = (centred.square().sum() / max(len(data.rewards) - 1, 1)).sqrt()
    return centred / (deviation + _EPSILON)


def mc_grpo(data: TrajectoryColumns, *, adv_clip: float | None) -> Tensor:
    """Return ``(R_i - med_g) / (median_g |R - med_g| + 1e-3) * n_g / #{A != 0}``, clamped to [-adv_clip, adv_clip].

    In a group of an even size the median is the lower one of the two in the middle, so that one member is always the
    pivot with advantage 0.
    """
    advantages = torch.zeros_like(data.rewards)
    for group in range(data.group_count):
        member = data.group_index == group
        rewards = data.rewards[member]
        if not len(rewards):
            continue
        centred = rewards - rewards.median()
        values = centred / (centred.abs().median() + _MEDIAN_EPSILON)
        advantages[member] = values * len(values) / max(1, int((values != 0).sum()))
    return advantages if adv_clip is None else advantages.clamp(-adv_clip, adv_clip)


def grpo_lambda(data: TrajectoryColumns, *, top_share: float, alpha: float) -> Tensor:
    """Return ``grpo`` of the rewards 1 (right) and 0; in the top groups right answers pay for their length.

    There a right answer has ``1 - alpha sigmoid((L_i - mean) / std)``, with mean and population standard deviation over
    the right answers of the group. The top groups are the share ``top_share`` of the groups with most right answers, at
    least one.
    """
    return grpo(replace(data, rewards=length_rewards(data, top_share=top_share, alpha=alpha)))


def length_rewards(data: TrajectoryColumns, *, top_share: float, alpha: float) -> Tensor:
    """Return the rewards of ``grpo_lambda``, float64 [trajectories].

    The number of top groups is rounded down; of equal groups the first one in the batch counts. Equal lengths give
    ``1 - alpha / 2``.
    """
    solved = data.solved
    right = solved.double()
    present = torch.unique(data.group_index)
    accuracy = torch.stack([right[data.group_index == group].mean() for group in present])
    ranked = present[accuracy.argsort(descending=True, stable=True)]
    rewards = right.clone()
    # 0.29 * 100 is a little below 29 in floating point.
    for group in ranked[: max(1, int(top_share * len(present) + 1e-9))]:
        member = (data.group_index == group) & solved
        if not member.any():
            continue
        lengths = data.lengths[member].double()
        spread = lengths.std(correction=0)
        offsets = (lengths - lengths.mean()) / torch.where(spread > 0, spread, 1.0)
        rewards[member] = 1 - alpha * offsets.sigmoid()
    return rewards


def drpo(data: TrajectoryColumns, *, longest_tokens: int, length_scale: float, tau: float) -> Tensor:
    """Return ``n_g w_i`` for right answers and ``-n_g softmax_wrong(s / tau)`` for wrong ones; 0 without both.

    ``w = softmax_right((1 - L / C) / length_scale)``, and ``s`` is under the policy at the start of the step. DRPO
    maximizes ``sum_right w_i s_i - tau log mean_wrong exp(s_j / tau)`` per group; these are the weights of its gradient
    times the size of the group, so that ``sequence_mean_token_mean`` gives the mean over equal groups.
    """
    assert data.policy_logprob_sums is not None
    means = data.policy_logprob_sums / data.lengths.clamp(min=1)
    solved = data.solved
    advantages = torch.zeros_like(data.rewards)
    for group in range(data.group_count):
        member = data.group_index == group
        right, wrong = member & solved, member & ~solved
        if not right.any() or not wrong.any():
            continue
        size = int(member.sum())
        weights = length_weights(data.lengths[right], longest_tokens=longest_tokens, length_scale=length_scale)
        advantages[right] = size * weights
        advantages[wrong] = -size * torch.softmax(means[wrong] / tau, 0)
    return advantages


def length_weights(lengths: Tensor, *, longest_tokens: int, length_scale: float) -> Tensor:
    """Return ``exp((1 - L / C) / Lambda)``, divided by its sum; ``lengths`` int64 [answers], float64 [answers]."""
    return torch.softmax((1 - lengths.double() / longest_tokens) / length_scale, 0)


def xrpo_novelty(data: TrajectoryColumns, *, novelty: float, cap: float) -> Tensor:
    """Return ``A_i + min(max(novelty (1 - exp(s_i - mean_g s)), 0), cap A_i)`` for right answers with A > 0.

    ``A`` is that of ``grpo``, also of all other answers; ``s`` is under the behavior policy.
    """
    advantages = grpo(data)
    return advantages + novelty_bonus(data, advantages, novelty=novelty, cap=cap)


def novelty_bonus(data: TrajectoryColumns, advantages: Tensor, *, novelty: float, cap: float) -> Tensor:
    """Return what ``xrpo_novelty`` adds to right answers that are less probable than their group; 0 for all others."""
    means = data.behavior_logprob_sums / data.lengths.clamp(min=1)
    rare = novelty * (1 - (means - data.group_mean(means)).exp()).clamp(min=0)
    return rare.minimum(cap * advantages.clamp(min=0)) * data.solved


def pairs(data: TrajectoryColumns, *, kept: float) -> Tensor:
    """Return ``grpo`` for the pairs (largest, smallest), (second largest, second smallest), ... that come first.

    The first ``kept`` of the pairs, at least one; 0 for the other members.
    """
    advantages = grpo(data)
    return advantages * in_kept_pairs(advantages, data.group_index, data.group_count, kept=kept)


def in_kept_pairs(advantages: Tensor, group_index: Tensor, group_count: int, *, kept: float) -> Tensor:
    """Tell which trajectories are in a kept pair; bool [trajectories].

    The number of pairs is rounded down. Equal advantages are in the order of the batch; the middle member of an odd
    group has no pair.
    """
    keep = torch.zeros_like(advantages, dtype=torch.bool)
    for group in range(group_count):
        members = torch.nonzero(group_index == group).flatten()
        order = members[advantages[members].argsort(descending=True, stable=True)]
        if count := len(members) // 2:
            # 0.29 * 100 is a little below 29 in floating point.
            count = max(1, int(kept * count + 1e-9))
            keep[order[:count]] = True
            keep[order[-count:]] = True
    return keep


def filtered_bc(data: TrajectoryColumns) -> Tensor:
    """Return 1 for right answers and 0 for others; with ``loss: topr`` the log-likelihood of the right answers."""
    return data.solved.double()


def tba(data: TrajectoryColumns, *, beta: float) -> Tensor:
    """Return ``R_i - mean_g R - beta (d_i - mean_g d)`` with ``d = log pi(y) - log pi_ref(y)``, sums over tokens.

    The loss of the source is ``(log Z + d_i - R_i / beta)^2`` with ``log Z = sg[mean_g(R / beta - d)]``, the VarGrad
    estimate of the partition function; its gradient is that of ``-2 / beta A_i log pi(y_i)``.
    """
    assert data.policy_logprob_sums is not None and data.reference_logprob_sums is not None
    energy = data.rewards - beta * (data.policy_logprob_sums - data.reference_logprob_sums)
    return energy - data.group_mean(energy)
