"""Processors that generators, the trainer and the other services of a mesh share on one machine.

Each process takes at most its demand, in cores, and the scheduler of the machine divides the rest evenly (max-min
fairness): a process gets min(demand, level), where the level is the largest one at which all shares fit the cores. A
process whose share falls from one level to another slows down in that proportion. The times of a simulation were
measured while generators and trainer took turns, so a slowing is relative to the share of that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.errors import ConfigError

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Strangers:
    """Processes outside of the mesh that would each take a core."""

    number: float
    """Mean number of them that can run, on all cores together."""
    weight: float = 1.0
    """Share of each against a process of the mesh: 1 for equal niceness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShares:
    """Slowing of generators and trainer by each other and by processes outside of the mesh."""

    cores: int
    """Cores of the machine. Generators and trainer share them, or have half of them each."""
    is_shared: bool
    """True if the generators are on the cores of the trainer."""
    generators: int
    generator_demand: float
    """Cores that one decoding generator takes if it can: 1, or less if a pace makes it sleep."""
    service_demand: float
    """Cores that the other services take while every generator decodes; they are on the cores of the trainer."""
    strangers_before: tuple[Strangers, ...] = ()
    """Processes outside of the mesh while the times were measured."""
    strangers: tuple[Strangers, ...] = ()
    """The same in the run that is simulated."""

    def __post_init__(self) -> None:
        for name in ("generators", "generator_demand", "service_demand"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ConfigError(f"shared cores: {name}={value}; expected a finite number of at least 0")
        if self.cores < (1 if self.is_shared else 2):
            raise ConfigError(f"shared cores: cores={self.cores}; expected 1 or more, 2 if the sides have their own")

    def generator_slowing(self, *, decoding: int, is_training: bool) -> float:
        """Return the factor on the seconds of the ``decoding`` ones."""
        if not (decoding and self.generator_demand):
            return 1.0
        before = self._generator_level(self.generators, self.strangers_before, is_training=False)
        now = self._generator_level(decoding, self.strangers, is_training=is_training)
        return min(self.generator_demand, before) / min(self.generator_demand, now)

    def trainer_slowing(self, *, decoding: int) -> float:
        """Return the factor on the seconds of the trainer."""
        before = self._trainer_level(0, self.strangers_before, is_training=True)
        now = self._trainer_level(decoding, self.strangers, is_training=True)
        return min(1.0, before) / min(1.0, now)

    def _generator_level(self, decoding: int, strangers: Sequence[Strangers], *, is_training: bool) -> float:
        if self.is_shared:
            return self._trainer_level(decoding, strangers, is_training=is_training)
        return self._level(self.cores // 2, [(decoding, self.generator_demand)], strangers)

    def _trainer_level(self, decoding: int, strangers: Sequence[Strangers], *, is_training: bool) -> float:
        services = (1.0 if decoding else 0.0, self.service_demand * decoding / max(1, self.generators))
        demands = [(1.0 if is_training else 0.0, 1.0), services]
        if self.is_shared:
            return self._level(self.cores, [*demands, (decoding, self.generator_demand)], strangers)
        return self._level(self.cores - self.cores // 2, demands, strangers)

    def _level(self, cores: int, demands: Sequence[tuple[float, float]], strangers: Sequence[Strangers]) -> float:
        """Return the level on some of the cores; a stranger of weight w counts as w processes of 1 / w cores each."""
        part = cores / self.cores
        return fair_level(cores, [*demands, *((part * s.number * s.weight, 1 / s.weight) for s in strangers)])


def fair_level(cores: float, demands: Sequence[tuple[float, float]]) -> float:
    """Return the max-min fair share of ``cores`` for (number of processes, demand of each); infinite if all fit."""
    left, ascending = cores, sorted(demands, key=lambda each: each[1])
    for at, (count, demand) in enumerate(ascending):
        rest = sum(number for number, _ in ascending[at:])
        if rest * demand > left + _ROUNDING:
            return left / rest
        left -= count * demand
    return math.inf
