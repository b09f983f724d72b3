"""Domains of simulated prompts, whose answers differ in length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rollmesh.errors import ConfigError
from rollmesh.tasks.sources.derived import interleaved


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDomain:
    """One domain."""

    name: str
    weight: float
    """Share of the prompts."""
    length_factor: float
    """Factor on the lengths of its answers, before the cap."""

    def __post_init__(self) -> None:
        if not (0 < self.weight <= 1 and 0 < self.length_factor < math.inf):
            raise ConfigError(
                f"domains: {self.name}:{self.weight:g}:{self.length_factor:g} needs a weight in (0, 1] and a factor "
                "above 0"
            )


@dataclass(frozen=True)
class DomainRows:
    """Domains of the rows of the data, evenly interleaved by weight."""

    domains: Sequence[SimulatedDomain]
    count: int
    """Rows of the data."""

    def of(self, row: int) -> SimulatedDomain:
        """Return the domain of a row."""
        return self.domains[self._places[row]]

    @cached_property
    def _places(self) -> list[int]:
        places, _ = interleaved([max(1, round(domain.weight * self.count)) for domain in self.domains])
        rows: list[int] = places.tolist()
        return (rows * 2)[: self.count]


def parse_domains(text: str) -> tuple[SimulatedDomain, ...]:
    """Read ``name:weight:length factor`` of every domain, separated by commas. Raises ConfigError for anything else."""
    found = []
    for part in text.split(","):
        words = part.strip().split(":")
        try:
            name, weight, factor = words[0], float(words[1]), float(words[2])
        except (IndexError, ValueError):
            raise ConfigError(f"domains={text}: expected name:weight:length_factor,... and got {part!r}") from None
        found.append(SimulatedDomain(name=name, weight=weight, length_factor=factor))
    if abs((total := math.fsum(domain.weight for domain in found)) - 1) > 1e-6:
        raise ConfigError(f"domains={text}: the weights sum to {total:g}; they must sum to 1")
    return tuple(found)
