"""Group shapers by their name in the run file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

from pydantic import Field, model_validator

from rollmesh.config.methods import Method
from rollmesh.config.section import Section


class DapOptions(Section):
    """Options of dap."""

    longest_tokens: int = Field(ge=1)
    """L: tokens of the longest answer, usually rollout.max_new_tokens."""
    buffer_tokens: int = Field(default=2048, ge=1)
    """Tokens below ``longest_tokens`` in which the penalty grows."""
    gamma: float = Field(default=1.0, ge=0)
    """Power of the share of right answers that weighs the penalty of a right answer."""
    failure_scale: float = Field(default=1.0, ge=0)
    """Weight of the penalty of a wrong answer."""

    @model_validator(mode="after")
    def _the_buffer_fits(self) -> Self:
        if self.buffer_tokens > self.longest_tokens:
            raise ValueError(
                f"buffer_tokens={self.buffer_tokens} is above longest_tokens={self.longest_tokens}; lower it"
            )
        return self


class DotOptions(Section):
    """Options of dot."""

    alpha: float = Field(default=3.0, gt=0)
    """Standard deviations above the mean length of the group from which an answer is an outlier."""
    least_excess: int = Field(default=32, ge=1)
    """Fewest tokens beyond the limit that are cut off."""
    truncated_reward: float = 0.0
    """Reward of a truncated answer, before its other shaping."""


SHAPER_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method(source="rewards stay as the worker has shaped them"),
        "dap": Method(
            source="Apriel-Reasoner, difficulty-aware penalty (code)",
            options=DapOptions,
            deviation="gamma and buffer_tokens are ours",
        ),
        "dot": Method(
            source="DOT (code)",
            options=DotOptions,
            deviation="a truncated answer is not verified again but gets truncated_reward",
        ),
    }
)


def largest_z_score(count: int) -> float:
    """Return the largest (x - mean) / std, ddof 1, of one of ``count`` values; 0 for one value."""
    return (count - 1) / math.sqrt(count)
