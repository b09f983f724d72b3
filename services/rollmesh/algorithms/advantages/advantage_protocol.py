"""Input of every advantage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rollmesh.algorithms.segment_columns import segment_count, segment_sum


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryColumns:
    """The trajectories of a whole batch; every tensor is on the CPU, float64 [trajectories] unless noted."""

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
