"""What is kept beside the tokens of a trajectory that an outside agent works on, in place of a snapshot.

A gateway that comes back finds the agent's session and the place in its conversation by it; a worker that finds a
finished trajectory without a score finds the reward that the agent had posted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rollmesh.errors import DataError
from rollmesh.types import OutcomeKind, RewardOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMark:
    """One trajectory's place in an agent's session."""

    session_id: str
    part: int
    """Number of the trajectory in its session: a context that drifted opened the next one."""
    start_time: float
    """When the session began, Unix seconds."""
    drift_count: int = 0
    """Drifts of the session before this trajectory."""
    turn: dict[str, int | str] = field(default_factory=dict)
    """The gateway's mark of the newest turn; empty before the first."""
    outcome: RewardOutcome | None = None
    """The reward, once it is posted."""
    ask_verifier: bool = False
    """The agent asked for the run's verifier instead of posting a reward."""
    finish_reason: str = ""
    """How the trajectory ends, once the reward is posted."""

    @property
    def ended(self) -> bool:
        """Whether the agent has had its last word."""
        return self.outcome is not None or self.ask_verifier

    def to_bytes(self) -> bytes:
        """Encode."""
        record: dict[str, object] = {
            "session": self.session_id,
            "part": self.part,
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
        """Decode; DataError when the bytes are no mark."""
        try:
            record = json.loads(data)
            outcome = record.get("outcome")
            return AgentMark(
                session_id=record["session"],
                part=record["part"],
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
    """The outcome of a trajectory that ended without a score: what was posted; None asks the verifier."""
    if snapshot is not None:
        mark = AgentMark.from_bytes(snapshot)
        if mark.ask_verifier or mark.outcome is not None:
            return mark.outcome
    message = "its gateway died before the score, and the agent's reward had not been kept"
    return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
