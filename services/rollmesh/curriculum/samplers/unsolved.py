"""Sampler unsolved: prompts with a low solve rate come more often (prioritized sampling of Kimi k1.5)."""

from __future__ import annotations

from rollmesh.curriculum.sampler_protocol import Draw, Float64Array, History, Int64Array, PromptTable
from rollmesh.curriculum.samplers.weighted_rows import choose_row, solve_rates


def unsolved(draw: Draw, prompts: PromptTable, history: History, train_step: int, *, unseen: float) -> int:
    """Draw a row in proportion to ``1 - solve rate``."""

    def weigh(rows: Int64Array) -> Float64Array:
        return 1.0 - solve_rates(history, rows)

    return choose_row(draw, prompts, history, unseen, weigh)
