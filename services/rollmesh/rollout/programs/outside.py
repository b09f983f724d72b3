"""Rollouts that an agent outside of the mesh makes, through the gateway: nothing to do here but old scores."""

from __future__ import annotations

from rollmesh.holding.agent_mark import posted_outcome
from rollmesh.holding.held import LetGo
from rollmesh.holding.program import Ending, Rollout
from rollmesh.types import RewardOutcome, Trajectory


class OutsideProgram:
    """Rolls nothing out; a worker with this program leases nothing new (see ``rollout.main``)."""

    async def run(self, rollout: Rollout) -> Ending:
        """Let go: the trajectory waits for the gateway."""
        raise LetGo("rollout.program=agent: agents work through the gateway")

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """The reward that was posted before the gateway died."""
        return posted_outcome(snapshot)
