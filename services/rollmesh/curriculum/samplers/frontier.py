"""Sampler frontier: prompts between the easier and the harder ones (HeaPA without augmentation)."""

from __future__ import annotations

import numpy as np

from rollmesh.curriculum.sampler_protocol import Draw, Float64Array, History, Int64Array, PromptTable
from rollmesh.curriculum.samplers.weighted_rows import choose_row


def frontier(
    draw: Draw,
    prompts: PromptTable,
    history: History,
    train_step: int,
    *,
    low_share: float,
    candidates: int,
    unseen: float,
) -> int:
    """Draw one of the rows next to the boundary between the ``low_share`` with the lowest mean reward and the others.

    A row that was drawn more often than others is left out while ``candidates`` rows remain.
    """

    def weigh(rows: Int64Array) -> Float64Array:
        means = history.reward_sums[rows] / history.members[rows]
        return frontier_weights(means, history.groups[rows], low_share, candidates)

    return choose_row(draw, prompts, history, unseen, weigh)


def frontier_weights(means: Float64Array, groups: Int64Array, low_share: float, candidates: int) -> Float64Array:
    """Return 1 for the candidates and 0 for other rows: the highest of the lower part, the lowest of the upper part."""
    pool = np.flatnonzero(groups < groups.max())
    if len(pool) < candidates:
        pool = np.arange(len(means))
    order = pool[np.argsort(means[pool], kind="stable")]
    boundary = round(low_share * len(order))
    first = min(max(0, boundary - candidates // 2), max(0, len(order) - candidates))
    weights = np.zeros(len(means))
    weights[order[first : first + candidates]] = 1.0
    return weights
