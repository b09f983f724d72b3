"""Processors that generators, the trainer and the other services of a mesh share on one machine.

Each process takes at most its demand, in cores, and the scheduler of the machine divides the rest evenly (max-min
fairness): a process gets min(demand, level), where the level is the largest one at which all shares fit the cores. A
process whose share falls from one level to another slows down in that proportion. The times of a simulation were
measured while generators and trainer took turns, so a slowing is relative to the share of that time.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.sim.fleet import Fleet
from rollmesh.sim.simulated_trainer import SimulatedTrainer

_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShares:
    """Slowing of generators and trainer by each other."""

    cores: int
    """Cores of the machine. Generators and trainer share them, or have half of them each."""
    is_shared: bool
    """True if the generators are on the cores of the trainer."""
    generators: int
    generator_demand: float
    """Cores that one decoding generator takes if it can: 1, or less if a pace makes it sleep."""
    service_demand: float
    """Cores that the other services take while every generator decodes; they are on the cores of the trainer."""

    def generator_slowing(self, *, decoding: int, is_training: bool) -> float:
        """Return the factor on the seconds of the ``decoding`` ones."""
        if not (decoding and self.generator_demand):
            return 1.0
        before = self._generator_share(self.generators, is_training=False)
        return before / self._generator_share(decoding, is_training=is_training)

    def trainer_slowing(self, *, decoding: int) -> float:
        """Return the factor on the seconds of the trainer."""
        before = self._trainer_side_share(1.0, 0, is_training=True)
        return before / self._trainer_side_share(1.0, decoding, is_training=True)

    def _generator_share(self, decoding: int, *, is_training: bool) -> float:
        demand = self.generator_demand
        if self.is_shared:
            return self._trainer_side_share(demand, decoding, is_training=is_training)
        return min(demand, fair_level(self.cores // 2, [(decoding, demand)]))

    def _trainer_side_share(self, demand: float, decoding: int, *, is_training: bool) -> float:
        """Return the share of a process with this demand on the cores of the trainer."""
        services = (1.0 if decoding else 0.0, self.service_demand * decoding / max(1, self.generators))
        demands = [(1.0 if is_training else 0.0, 1.0), services]
        if self.is_shared:
            return min(demand, fair_level(self.cores, [*demands, (decoding, self.generator_demand)]))
        return min(demand, fair_level(self.cores - self.cores // 2, demands))


def fair_level(cores: float, demands: Sequence[tuple[float, float]]) -> float:
    """Return the max-min fair share of ``cores`` for (number of processes, demand of each); infinite if all fit."""
    left, ascending = cores, sorted(demands, key=lambda each: each[1])
    for at, (count, demand) in enumerate(ascending):
        rest = sum(number for number, _ in ascending[at:])
        if rest * demand > left + _ROUNDING:
            return left / rest
        left -= count * demand
    return math.inf


class SimulatedCores:
    """The scheduler of the machine: it divides the cores again whenever a process begins or ends its work."""

    def __init__(self, shares: CoreShares, fleet: Fleet, trainer: SimulatedTrainer) -> None:
        self._shares = shares
        self._fleet = fleet
        self._trainer = trainer
        self._seen = (0, False)
        self._slowings: dict[tuple[int, bool], tuple[float, float]] = {}
        """Factors of generators and trainer by what works; each is computed once."""

    def react(self) -> bool:
        """Slow down or speed up what works now; returns True if that has changed."""
        engines = [generator.engine for generator in self._fleet.generators.values()]
        decoding, is_training = sum(engine.running > 0 for engine in engines), self._trainer.is_working
        if (decoding, is_training) == self._seen:
            return False
        self._seen = now = (decoding, is_training)
        if now not in self._slowings:
            self._slowings[now] = (
                self._shares.generator_slowing(decoding=decoding, is_training=is_training),
                self._shares.trainer_slowing(decoding=decoding),
            )
        of_generators, of_trainer = self._slowings[now]
        self._fleet.slow_down(of_generators)
        self._trainer.slow_down(of_trainer)
        return True
