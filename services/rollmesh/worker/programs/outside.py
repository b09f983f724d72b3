"""Program of agent runs: agents roll out through the agents service, and a worker only scores finished trajectories."""

from __future__ import annotations

from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import LetGo
from rollmesh.worker.agent_mark import posted_outcome
from rollmesh.worker.program import RolloutContext, RolloutResult


class OutsideProgram:
    """Program that rolls nothing out; a worker with this program leases nothing new (see ``rollout.main``)."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Raise LetGo: the trajectory waits for the agents service."""
        raise LetGo("rollout.program=agent: agents work through the agents service")

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the reward posted before the agents service crashed."""
        return posted_outcome(snapshot)
