"""Cores of a simulated mesh on one machine: generators and trainer slow down while they share them."""

from __future__ import annotations

from rollmesh.errors import ConfigError
from rollmesh.sim.core_shares import CoreShares
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.simulated_trainer import SimulatedTrainer


class SimulatedCores:
    """The scheduler of the machine: it divides the cores again whenever a process begins or ends its work."""

    def __init__(self, shares: CoreShares, fleet: Fleet, trainer: SimulatedTrainer, *, part_groups: int) -> None:
        """Raise ConfigError for a schedule that trains in parts: their times are not divided."""
        if part_groups:
            raise ConfigError(f"shared cores with schedule.part_groups={part_groups}: not simulated; set part_groups=0")
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
