"""State of an agent's trajectory, stored beside its tokens in place of an environment snapshot.

A restarted agents service restores the agent's session and its position in the conversation from it. A worker that
scores the finished trajectory of a crashed service reads the posted reward from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rollmesh.errors import DataError
from rollmesh.types import OutcomeKind, RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import LetGo
from rollmesh.worker.program import RolloutContext, RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMark:
    """Place of one trajectory in an agent's session."""

    session_id: str
    trajectory_index: int
    """Index of the trajectory in its session; a context that drifted opens the next trajectory."""
    start_time: float
    """Start of the session, Unix seconds."""
    drift_count: int = 0
    """Drifts of the session before this trajectory."""
    turn: dict[str, int | str] = field(default_factory=dict)
    """Mark of the newest turn; empty before the first."""
    outcome: RewardOutcome | None = None
    """Posted reward; None before it is posted."""
    ask_verifier: bool = False
    """True if the agent requested the run's verifier instead of posting a reward."""
    finish_reason: str = ""
    """Finish reason of the trajectory; empty before the reward is posted."""

    @property
    def ended(self) -> bool:
        """True once the agent has posted a reward or requested the verifier."""
        return self.outcome is not None or self.ask_verifier

    def to_bytes(self) -> bytes:
        """Encode as JSON."""
        record: dict[str, object] = {
            "session": self.session_id,
            "part": self.trajectory_index,
            "start_time": self.start_time,
            "drifts": self.drift_count,
            "turn": self.turn,
            "ask_verifier": self.ask_verifier,
            "finish_reason": self.finish_reason,
        }
        if self.outcome is not None:
            record["outcome"] = {
                "kind": self.outcome.kind.value,
                "value": self.outcome.value,
                "parts": dict(self.outcome.parts),
                "message": self.outcome.message,
            }
        return json.dumps(record).encode()

    @staticmethod
    def from_bytes(data: bytes) -> AgentMark:
        """Decode; raises DataError if the bytes are not a mark."""
        try:
            record = json.loads(data)
            outcome = record.get("outcome")
            return AgentMark(
                session_id=record["session"],
                trajectory_index=record["part"],
                start_time=record["start_time"],
                drift_count=record["drifts"],
                turn=record["turn"],
                ask_verifier=record["ask_verifier"],
                finish_reason=record["finish_reason"],
                outcome=None
                if outcome is None
                else RewardOutcome(
                    kind=OutcomeKind(outcome["kind"]),
                    value=outcome["value"],
                    parts=outcome["parts"],
                    message=outcome["message"],
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"agent session: not a mark: {error}") from error


def posted_outcome(snapshot: bytes | None) -> RewardOutcome | None:
    """Return the posted outcome of a trajectory that finished without a score; None requests the verifier."""
    if snapshot is not None:
        mark = AgentMark.from_bytes(snapshot)
        if mark.ask_verifier or mark.outcome is not None:
            return mark.outcome
    message = "the agents service crashed before the trajectory was scored, and no reward of the agent was saved"
    return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)


class OutsideProgram:
    """Program that rolls nothing out; a worker with this program leases nothing new (see ``rollout.main``)."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Raise LetGo: the trajectory waits for the agents service."""
        raise LetGo("rollout.program=agent: agents work through the agents service")

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the reward posted before the agents service crashed."""
        return posted_outcome(snapshot)
