"""Samples of the generators of a simulated run, for its page: an observer that changes no result."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from rollmesh.sim.simulated_calls import SimulatedGenerator
from rollmesh.types import Float64Array

_MOST_SAMPLES = 1024


@dataclass(slots=True)
class RunTimeline:
    """Version and running calls of every generator, at most 1,024 times: when full, every other sample is dropped."""

    times: list[float] = field(default_factory=list)
    """Virtual seconds of the samples."""
    samples: list[Mapping[str, tuple[int, int]]] = field(default_factory=list)
    """(policy version, running calls) of each generator by name; one without a policy is left out."""
    _interval: float = 0.1
    _due: float = 0.0

    def observe(self, now: float, generators: Mapping[str, SimulatedGenerator]) -> None:
        """Take a sample if one is due; called after every event, between which nothing changes."""
        if now < self._due:
            return
        self.times.append(now)
        self.samples.append(
            {name: (each.version, each.engine.running) for name, each in generators.items() if each.version >= 0}
        )
        if len(self.times) >= _MOST_SAMPLES:
            self.times, self.samples = self.times[::2], self.samples[::2]
            self._interval *= 2
        self._due = now + self._interval

    def arrays(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Return times [moments], versions and running calls [generators, moments]; version -1 for no generator."""
        rows = {name: row for row, name in enumerate(sorted({name for sample in self.samples for name in sample}))}
        versions = np.full((len(rows), len(self.times)), -1.0)
        running = np.zeros((len(rows), len(self.times)))
        for moment, sample in enumerate(self.samples):
            for name, (version, calls) in sample.items():
                versions[rows[name], moment], running[rows[name], moment] = version, calls
        return np.array(self.times), versions, running
