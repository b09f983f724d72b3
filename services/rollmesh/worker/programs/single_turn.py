"""Single-turn program: one prompt, one answer."""

from __future__ import annotations

from rollmesh.types import FinishReason, RewardOutcome, Trajectory
from rollmesh.worker.program import RolloutContext, RolloutResult


class SingleTurnProgram:
    """Program that samples until a stop token or the end of the budget."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Continue the answer; a partial answer that ends in a stop token is finished already."""
        segments = rollout.active.segments
        if segments and int(segments[-1].token_ids[-1]) in rollout.params.stop_token_ids:
            return RolloutResult(reason=FinishReason.STOP)
        if rollout.remaining_tokens == 0:
            return RolloutResult(reason=FinishReason.LENGTH)
        return RolloutResult(reason=await rollout.sample())

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return None: the verifier scores single answers."""
        return None
