"""Rollouts that an agent outside of the mesh makes, through the gateway: nothing to do here but old scores."""

from __future__ import annotations

from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import LetGo
from rollmesh.worker.agent_mark import posted_outcome
from rollmesh.worker.program import RolloutContext, RolloutResult


class OutsideProgram:
    """Rolls nothing out; a worker with this program leases nothing new (see ``rollout.main``)."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Let go: the trajectory waits for the gateway."""
        raise LetGo("rollout.program=agent: agents work through the gateway")

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """The reward that was posted before the gateway died."""
        return posted_outcome(snapshot)
