"""Lengths of a run's own trajectories or of a trace: every schedule gets the same recorded work.

The prompts of the simulation are the groups of the trace, in order and again from the first. The members of a group get
its recorded trajectories in an order that depends on the seed and on the place of the group in the run: each of them
once, and further members one at random.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from rollmesh.errors import ConfigError
from rollmesh.sim.length_trace import TracedTrajectory
from rollmesh.sim.simulated_calls import SimulatedTurn
from rollmesh.types import Int32Array


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedLengths:
    """Turns of all trajectories of a run, recorded ones that are cut to its budget."""

    groups: tuple[tuple[TracedTrajectory, ...], ...]
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.groups or not all(self.groups):
            raise ConfigError("lengths: no trajectories; give a trace or a run folder that has some")

    def draw(self, position: int, prompt: int, members: int, *, step: float = 0.0) -> Int32Array:
        """Return the sampled tokens of the first members of a group, as ``LengthModel.draw`` does."""
        return np.array([sum(chosen.outputs) for chosen in self._chosen(position, prompt, members)], dtype=np.int32)

    def prompt_tokens(self, prompt: int) -> int:
        """Return the tokens of a prompt: the most that a trajectory of its group has."""
        return max(trajectory.prompt_tokens for trajectory in self._group(prompt))

    def turns(self, position: int, prompt: int, members: int) -> tuple[tuple[SimulatedTurn, ...], ...]:
        """Return the turns before the last one of the first members of a group."""
        return tuple(_turns(chosen) for chosen in self._chosen(position, prompt, members))

    def longest(self) -> tuple[int, TracedTrajectory]:
        """Return the largest context of a call, in tokens, and the trajectory that has it."""
        each = (
            (self.prompt_tokens(prompt) + trajectory.longest_context, trajectory)
            for prompt, group in enumerate(self.groups)
            for trajectory in group
        )
        return max(each, key=lambda item: item[0])

    def _group(self, prompt: int) -> tuple[TracedTrajectory, ...]:
        return self.groups[prompt % len(self.groups)]

    def _chosen(self, position: int, prompt: int, members: int) -> list[TracedTrajectory]:
        group = self._group(prompt)
        counter = np.array([0, 0, 2, position], dtype=np.uint64)
        numbers = np.random.Generator(np.random.Philox(key=self.seed, counter=counter))
        order = numbers.permutation(len(group)).tolist()
        further = (numbers.random(max(0, members - len(group))) * len(group)).astype(int).tolist()
        return [group[index] for index in [*order, *further][:members]]


def _turns(trajectory: TracedTrajectory) -> tuple[SimulatedTurn, ...]:
    ends = accumulate(trajectory.outputs[:-1])
    seconds = trajectory.tool_seconds or (0.0,) * len(trajectory.outputs)
    between = zip(ends, trajectory.observations, seconds, strict=False)
    return tuple(SimulatedTurn(*turn) for turn in between)
