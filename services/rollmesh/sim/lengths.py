"""Lengths of responses, forced by prompt and member: every schedule gets the same work.

A length is the quantile of a marginal distribution at a standard normal number z. Between the members of a prompt the
numbers have the correlation ``prompt_share``: z = sqrt(share) * z_prompt + sqrt(1 - share) * z_member. For a lognormal
marginal that is the usual split of the variance of ln(length) into a part between prompts and a part within them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rollmesh.errors import ConfigError
from rollmesh.types import Float64Array, Int32Array


class Marginal(Protocol):
    """Distribution of the length of one trajectory, before the cap."""

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles at standard normal numbers, in tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Lognormal:
    """Lognormal lengths: exp(ln(median) + sigma z)."""

    median: float
    sigma: float

    def __post_init__(self) -> None:
        _positive("lengths.median", self.median)
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise ConfigError(f"lengths.sigma={self.sigma}: expected a finite number, 0 or more")

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles."""
        return self.median * np.exp(self.sigma * z)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pareto:
    """Pareto lengths: shortest * (1 - Phi(z))^(-1 / index)."""

    shortest: float
    index: float

    def __post_init__(self) -> None:
        _positive("lengths.shortest", self.shortest)
        _positive("lengths.index", self.index)

    def at(self, z: Float64Array) -> Float64Array:
        """Return the quantiles."""
        # Phi(-z) keeps its precision in the tail, where 1 - Phi(z) has none.
        return self.shortest * np.maximum(_normal_cdf(-z), 1e-300) ** (-1 / self.index)


class _Normals:
    """Standard normal numbers of one seed. Generators of random numbers are costly to make, so there is one."""

    def __init__(self, seed: int) -> None:
        self._bits = np.random.Philox(key=seed)
        self._start = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def draw(self, stream: int, index: int, count: int) -> Float64Array:
        """Return numbers that depend on (seed, stream, index) alone, float64 [count]."""
        self._start["state"]["counter"] = np.array([0, 0, stream, index], dtype=np.uint64)
        self._bits.state = self._start
        return self._generator.standard_normal(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthModel:
    """Lengths of all trajectories of a run, in tokens after the prompt."""

    marginal: Marginal
    prompt_share: float
    """Share of the variance of z that lies between prompts: 0.92 and 0.06 in two public traces."""
    cap: int
    """Most tokens; longer responses end there."""
    growth_per_step: float = 0.0
    """Relative growth of the lengths per batch of admitted prompts, so that every schedule sees the same growth."""
    seed: int = 0
    _normals: _Normals = field(init=False, repr=False, compare=False)
    _between: dict[int, Float64Array] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Normal number of each prompt drawn so far, float64 [1]."""

    def __post_init__(self) -> None:
        if not 0 <= self.prompt_share <= 1:
            raise ConfigError(f"lengths.prompt_share={self.prompt_share}: expected a number between 0 and 1")
        if self.cap < 1:
            raise ConfigError(f"lengths.cap={self.cap}: expected at least 1 token")
        if not (math.isfinite(self.growth_per_step) and self.growth_per_step > -1):
            raise ConfigError(f"lengths.growth_per_step={self.growth_per_step}: expected a number above -1")
        object.__setattr__(self, "_normals", _Normals(self.seed))

    def draw(self, position: int, prompt: int, members: int, *, step: float = 0.0) -> Int32Array:
        """Return the lengths of the first members of a group, int32 [members].

        ``position`` counts the groups of the run, ``prompt`` the row of the data, which comes again in every epoch.
        ``step`` is the batch to which the position belongs. A member has its length whatever the number of members.
        """
        if (between := self._between.get(prompt)) is None:
            between = self._between[prompt] = self._normals.draw(0, prompt, 1)
        within = self._normals.draw(1, position, members)
        z = math.sqrt(self.prompt_share) * between + math.sqrt(1 - self.prompt_share) * within
        lengths = self.marginal.at(z) * (1 + self.growth_per_step) ** step
        capped: Int32Array = np.minimum(np.maximum(np.rint(lengths), 1), self.cap).astype(np.int32)
        return capped


def _normal_cdf(z: Float64Array) -> Float64Array:
    return np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in z], dtype=np.float64)


def _positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name}={value}: expected a finite number above 0")
