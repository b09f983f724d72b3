"""Work of each admitted group, from the length model and the reward model: the same under every schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollmesh.errors import ConfigError
from rollmesh.sim.lengths import LengthModel
from rollmesh.sim.simulated_calls import GroupWork
from rollmesh.sim.simulated_domains import DomainRows
from rollmesh.sim.traced_lengths import TracedLengths


class Solver(Protocol):
    """Rewards of answers."""

    def rewards(self, position: int, prompt: int, members: int) -> Sequence[float]:
        """Return the rewards of the first members of the group at a position."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPrompts:
    """Prompts of the data, in their order; after the last one the first comes again."""

    lengths: LengthModel | TracedLengths
    solver: Solver
    count: int
    """Prompts of an epoch."""
    prompt_tokens: int
    """Tokens of a prompt, unless recorded lengths have their own."""
    groups_per_batch: int
    repeats: int = 1
    """Groups in a row that have the same prompt, as in ``tasks/sources/derived.py``."""
    domains: DomainRows | None = None
    """Domains of the rows; None without any."""

    def __post_init__(self) -> None:
        for name in ("count", "prompt_tokens", "repeats"):
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"prompts.{name}={value}: expected at least 1")

    def group_id(self, position: int) -> str:
        """Return the id of the group at a position, as the leader of the mesh names it."""
        epoch, index = divmod(position, self.count * self.repeats)
        return f"e{epoch}-{index}"

    def work(self, position: int, members: int, row: int | None = None) -> GroupWork:
        """Return lengths and rewards of a group's members: an answer has the same ones where its prompt repeats.

        The prompt is that of ``row``; without one it follows from the position.
        """
        place, repeat = divmod(position, self.repeats)
        epoch, prompt = divmod(place, self.count)
        prompt = prompt if row is None else row
        domain = None if self.domains is None else self.domains.of(prompt)
        first = repeat * members
        model, known = self.lengths, first + members
        lengths = model.draw(place, prompt, known, step=float(position // self.groups_per_batch))
        if domain is not None and isinstance(model, LengthModel):
            lengths = np.clip(np.rint(lengths * domain.length_factor), 1, model.cap).astype(np.int32)
        recorded = model if isinstance(model, TracedLengths) else None
        return GroupWork(
            prompt_id=f"p{prompt}",
            domain="" if domain is None else domain.name,
            place=f"e{epoch}-{prompt}" if row is None else f"d{position}",
            first_answer=first,
            prompt_tokens=self.prompt_tokens if recorded is None else recorded.prompt_tokens(prompt),
            turns=() if recorded is None else recorded.turns(place, prompt, known)[first:],
            lengths=tuple(lengths[first:].tolist()),
            rewards=tuple(self.solver.rewards(place, prompt, known)[first:]),
        )
