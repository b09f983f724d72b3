"""State of an agent's trajectory, stored beside its tokens in place of an environment snapshot.

A restarted agents service restores the agent's session and its position in the conversation from it. A worker that
scores the finished trajectory of a crashed service reads the posted reward from it.
"""

from dataclasses import dataclass, field

from pydantic import TypeAdapter, ValidationError

from rollmesh.errors import DataError
from rollmesh.types import OutcomeKind, RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import LetGo
from rollmesh.worker.program import RolloutContext, RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentMark:
    """Place of one trajectory in an agent's session."""

    session_id: str
    session_name: str = ""
    """Name under which the agent opened the session; empty if the service opened it."""
    trajectory_index: int
    """Index of the trajectory in its session; a context that drifted opens the next trajectory."""
    start_time: float
    """Start of the session, Unix seconds."""
    drift_count: int = 0
    """Drifts of the session before this trajectory."""
    turn: dict[str, int | str] = field(default_factory=dict)
    """Mark of the newest turn; empty before the first."""
    first_turn: int = 0
    """Answers of the session before the first one of this trajectory."""
    turn_starts: tuple[int, ...] = ()
    """Tokens after the prompt before each answer of this trajectory."""
    outcome: RewardOutcome | None = None
    """Posted reward; None before it is posted."""
    promised: RewardOutcome | None = None
    """Posted reward, saved here before the session's other trajectories have it; ``outcome`` follows after theirs."""
    ask_verifier: bool = False
    """True if the agent requested the run's verifier instead of posting a reward."""
    finish_reason: str = ""
    """Finish reason of the trajectory; empty before the reward is posted."""

    @property
    def ended(self) -> bool:
        """True once the agent has posted a reward or requested the verifier."""
        return self.outcome is not None or self.ask_verifier

    @property
    def is_posted(self) -> bool:
        """True once the session's reward cannot change: some of its trajectories may have it, and be trained."""
        return self.ended or self.promised is not None

    @property
    def turn_count(self) -> int:
        """Answers of the session up to the newest one of this trajectory."""
        return self.first_turn + len(self.turn_starts)

    def to_bytes(self) -> bytes:
        """Encode as JSON."""
        return _MARKS.dump_json(self)

    @staticmethod
    def from_bytes(data: bytes) -> "AgentMark":
        """Decode; raises DataError if the bytes are not a mark."""
        try:
            return _MARKS.validate_json(data)
        except ValidationError as error:
            raise DataError(f"agent session: not a mark: {error}") from error


_MARKS = TypeAdapter(AgentMark)


def root_of(session_id: str) -> str:
    """Return the id of the session that gets the reward of a session: its own, or that of its agent's parent."""
    return session_id.partition(".")[0]


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
