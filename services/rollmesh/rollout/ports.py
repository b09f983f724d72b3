"""What the rollout service needs of the reward services; ``wire/`` implements it over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollmesh.types import RewardOutcome, Trajectory


class RewardPort(Protocol):
    """Calls on reward services."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """One outcome per finished trajectory, in order; many calls at once travel together.

        Raises RewardUnavailable when no service answers, DataError for a trajectory that cannot travel.
        """
