"""Sampler band: prompts of moderate difficulty by quantiles of the mean rewards (ADS of TACO)."""

from __future__ import annotations

import numpy as np

from rollmesh.curriculum.sampler_protocol import Draw, Float64Array, History, Int64Array, PromptTable
from rollmesh.curriculum.samplers.weighted_rows import choose_row


def band(
    draw: Draw, prompts: PromptTable, history: History, train_step: int, *, low: float, high: float, unseen: float
) -> int:
    """Draw one of the rows whose mean reward lies between two quantiles of the mean rewards, bounds included."""

    def weigh(rows: Int64Array) -> Float64Array:
        means = history.reward_sums[rows] / history.members[rows]
        bottom, top = np.quantile(means, (low, high))
        weights: Float64Array = ((means >= bottom) & (means <= top)).astype(np.float64)
        return weights

    return choose_row(draw, prompts, history, unseen, weigh)
