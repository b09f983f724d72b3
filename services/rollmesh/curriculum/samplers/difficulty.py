"""Sampler difficulty: prompts whose solve rate is near a target come more often (DOTS)."""

from __future__ import annotations

import numpy as np

from rollmesh.curriculum.sampler_protocol import Draw, Float64Array, History, Int64Array, PromptTable
from rollmesh.curriculum.samplers.weighted_rows import choose_row, solve_rates


def difficulty(
    draw: Draw,
    prompts: PromptTable,
    history: History,
    train_step: int,
    *,
    target: float,
    temperature: float,
    unseen: float,
) -> int:
    """Draw a row in proportion to ``exp(-|solve rate - target| / temperature)``."""

    def weigh(rows: Int64Array) -> Float64Array:
        return target_weights(solve_rates(history, rows), target, temperature)

    return choose_row(draw, prompts, history, unseen, weigh)


def target_weights(rates: Float64Array, target: float, temperature: float) -> Float64Array:
    """Return the probability of rows with these solve rates, float64 [rows]."""
    exponents = -np.abs(rates - target) / temperature
    weights = np.exp(exponents - exponents.max())
    probabilities: Float64Array = weights / weights.sum()
    return probabilities
