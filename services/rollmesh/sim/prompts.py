"""Prompts of a simulated mesh: domains, the work of each admitted group, and the rows that samplers choose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rollmesh.curriculum.prompt_tables import Draw, HistoryTable, prompt_table
from rollmesh.curriculum.samplers import PromptSampler
from rollmesh.errors import ConfigError
from rollmesh.sim.length_trace import TracedLengths
from rollmesh.sim.lengths import LengthModel
from rollmesh.sim.queue_model import QueueModel
from rollmesh.sim.queue_model.records import GroupState
from rollmesh.sim.reward_model import SolveModel
from rollmesh.sim.simulated_calls import GroupWork
from rollmesh.tasks.sources.derived import interleaved

_IN_PROGRESS = (GroupState.OPEN, GroupState.ASIDE)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPrompts:
    """Prompts of the data, in their order; after the last one the first comes again."""

    lengths: LengthModel | TracedLengths
    solver: SolveModel
    count: int
    """Prompts of an epoch."""
    prompt_tokens: int
    """Tokens of a prompt, unless recorded lengths have their own."""
    groups_per_batch: int
    repeats: int = 1
    """Groups in a row that have the same prompt, as in ``tasks/sources/derived.py``."""
    domains: DomainRows | None = None
    """Domains of the rows; None without any."""

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


class SimulatedDraws:
    """Draws of a simulated leader."""

    def __init__(self, prompts: SimulatedPrompts, sampler: PromptSampler, queue: QueueModel, seed: int) -> None:
        self._sampler = sampler
        self._queue = queue
        self._seed = seed
        self._count = prompts.count
        names = [f"p{row}" for row in range(prompts.count)]
        domains: Sequence[str] = [""] * prompts.count
        weights: dict[str, float] = {}
        if prompts.domains is not None:
            domains = [prompts.domains.of(row).name for row in range(prompts.count)]
            weights = {domain.name: domain.weight for domain in prompts.domains.domains}
        self._table = prompt_table(names, domains, [False] * prompts.count, weights)
        self._history = HistoryTable(self._table)

    def refresh(self) -> None:
        """Take the records that have changed, and the prompts in progress, before an admission."""
        history, queue = self._queue.history, self._queue
        self._history.update({name: history.records[name] for name in history.changed})
        history.changed.clear()
        self._history.set_in_progress(
            group.prompt_id for state in _IN_PROGRESS for group in queue.groups[state].values()
        )

    def row(self, position: int) -> int:
        """Return the row of the group at a position."""
        epoch, index = divmod(position, self._count)
        draw = Draw(epoch=epoch, index=index, seed=self._seed)
        row = self._sampler.choose(draw, self._table, self._history.columns, self._queue.trained_step)
        self._history.begin(row)
        return row
