"""Leased trajectories without a generator, in the order in which they began to wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rollmesh.sim.simulated_calls import SimulatedTrajectory


class WaitingCalls:
    """Trajectories by call; their versions are counted, so that a look at them costs O(versions)."""

    def __init__(self) -> None:
        self._by_call: dict[int, SimulatedTrajectory] = {}
        self._versions: Counter[tuple[int, int]] = Counter()
        """Number of trajectories by floor and version; neither changes while a trajectory waits."""

    def __len__(self) -> int:
        return len(self._by_call)

    def add(self, trajectory: SimulatedTrajectory) -> None:
        """Let a trajectory wait behind the others."""
        self._by_call[trajectory.call] = trajectory
        self._versions[trajectory.floor, trajectory.version] += 1

    def discard(self, trajectory: SimulatedTrajectory) -> None:
        """Remove a trajectory if it waits."""
        if self._by_call.pop(trajectory.call, None) is None:
            return
        key = trajectory.floor, trajectory.version
        self._versions[key] -= 1
        if not self._versions[key]:
            del self._versions[key]

    def take_all(self) -> Iterator[SimulatedTrajectory]:
        """Return the trajectories in order; none waits any longer."""
        taken, self._by_call, self._versions = self._by_call, {}, Counter()
        return iter(taken.values())

    @property
    def lowest_floor(self) -> int:
        """Oldest version that may continue one of them; raises ValueError without a trajectory."""
        return min(floor for floor, _ in self._versions)

    @property
    def newest_version(self) -> int:
        """Newest version of their tokens; -1 without a token."""
        return max((version for _, version in self._versions), default=-1)
