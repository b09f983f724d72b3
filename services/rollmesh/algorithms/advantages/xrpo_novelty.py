"""XRPO's novelty bonus on the GRPO advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns
from rollmesh.algorithms.advantages.grpo import grpo


def xrpo_novelty(data: TrajectoryColumns, *, novelty: float, cap: float) -> Tensor:
    """Add ``novelty_bonus`` to the GRPO advantage; float64 [trajectories]. Source: XRPO, from reviews."""
    advantages = grpo(data)
    return advantages + novelty_bonus(data, advantages, novelty=novelty, cap=cap)


def novelty_bonus(data: TrajectoryColumns, advantages: Tensor, *, novelty: float, cap: float) -> Tensor:
    """Return the bonus of right answers that are less probable than their group; 0 for all others.

    ``min(max(novelty (1 - exp(s_i - mean_g s)), 0), cap A_i)`` for a right answer with A_i > 0, ``s`` being the mean
    log-probability per token under the behavior policy. ``advantages`` and the result are float64 [trajectories].
    """
    means = data.behavior_logprob_sums / data.lengths.clamp(min=1)
    rare = novelty * (1 - (means - data.group_mean(means)).exp()).clamp(min=0)
    return rare.minimum(cap * advantages.clamp(min=0)) * data.solved
