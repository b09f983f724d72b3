"""Choice among rows: which may be drawn, which share new ones get, and a draw by weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rollmesh.curriculum.sampler_protocol import Draw, Float64Array, History, Int64Array, PromptTable

Weigh = Callable[[Int64Array], Float64Array]
"""Weights of rows that have a scored trajectory, float64 [rows]; not negative."""


def choose_row(draw: Draw, prompts: PromptTable, history: History, unseen: float, weigh: Weigh) -> int:
    """Return a row without an unfinished group: an unseen one with probability ``unseen``, else one by weight.

    An unseen row was never drawn, or has no scored trajectory and was drawn no more often than any that has one and is
    still drawn. If all rows have an unfinished group, every row may be drawn.
    """
    free = np.flatnonzero(prompts.endless | (history.in_progress == 0))
    if not len(free):
        free = np.arange(prompts.row_count)
    is_seen = history.members[free] > 0
    seen, new = free[is_seen], free[~is_seen]
    weights = weigh(seen) if len(seen) else np.zeros(0)
    if len(seen):
        # Rows whose trajectories never get a score would take the share of the unseen ones without end. A row of weight
        # 0, for example a solved one, is drawn no more, so it holds no other back.
        drawn = seen[weights > 0] if np.any(weights > 0) else seen
        new = new[history.groups[new] <= history.groups[drawn].min()]
    if len(new) and (not len(seen) or draw.uniform("unseen") < unseen):
        # Rows that were drawn without a score come after those that were never drawn.
        return draw_uniformly(draw, new[history.groups[new] == history.groups[new].min()])
    return draw_by_weight(draw, seen, weights)


def draw_uniformly(draw: Draw, rows: Int64Array) -> int:
    """Return one of the rows, each with the same probability."""
    return int(rows[int(draw.uniform("row") * len(rows))])


def draw_by_weight(draw: Draw, rows: Int64Array, weights: Float64Array) -> int:
    """Return one of the rows in proportion to its weight; uniformly if all weights are 0."""
    sums = np.cumsum(weights)
    if not sums[-1] > 0:
        return draw_uniformly(draw, rows)
    at = int(np.searchsorted(sums, draw.uniform("row") * sums[-1], side="right"))
    return int(rows[min(at, len(rows) - 1)])


def solve_rates(history: History, rows: Int64Array) -> Float64Array:
    """Return the share of solved trajectories of rows that have a scored one, float64 [rows]."""
    rates: Float64Array = history.solved[rows] / history.members[rows]
    return rates
