"""Contract of rollout programs, and the program of one prompt and one answer."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rollmesh.errors import RollmeshError
from rollmesh.types import FinishReason, RewardOutcome, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller

TrajectoryWrite = Callable[[ActiveTrajectory], Awaitable[None]]


class NobodyAnswers(RollmeshError):
    """Signal that no agent comes for the trajectories of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """End of a trajectory: its finish reason and, if the program has one, its reward."""

    reason: FinishReason
    outcome: RewardOutcome | None = None
    """Reward given by the program itself; None requests the verifier."""
    further_tokens: int = 0
    """Response tokens of the other trajectories that share the reward: those of drifted contexts and sub-agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """One trajectory and the operations that continue it."""

    active: ActiveTrajectory
    caller: Caller
    params: SamplingParams
    budget: int
    """Most tokens of the whole response, environment tokens included."""
    save: Callable[..., Awaitable[None]]
    """Operation that makes the tokens so far durable: ``Saver.save``."""
    report_first_token: TrajectoryWrite
    """Operation that reports the policy version of the first token while no token is durable."""
    restart: TrajectoryWrite
    """Operation that drops all tokens, including saved ones."""
    keep_snapshot: Callable[..., Awaitable[None]]
    """Operation that makes the state of the environment durable: ``Saver.keep_snapshot``."""
    turns: int | None = None
    """Most turns of the trajectory; None for those of the program."""
    pinned_version: int | None = None

    @property
    def plan(self) -> Mapping[str, Any]:
        """Plan of the round that launched the trajectory, JSON values by a rollout planner; empty without one."""
        return self.active.plan

    @property
    def remaining_tokens(self) -> int:
        """Tokens left of the budget."""
        return max(0, self.budget - self.active.token_count)

    async def sample(self, *, durable: bool = True) -> FinishReason:
        """Sample from the policy until a stop token (STOP) or the end of the budget (LENGTH).

        With ``durable``, partial tokens are saved on the way; otherwise only the version of the first token is
        reported. An evaluation does neither. Raises Parked or LetGo.
        """
        if self.pinned_version is not None:
            version = self.pinned_version
            return await self.caller.sample(
                self.active, self.remaining_tokens, self.params, save=None, pinned_version=version
            )
        save = self.save if durable else self.report_first_token
        return await self.caller.sample(self.active, self.remaining_tokens, self.params, save=save, durable=durable)


class Program(Protocol):
    """Program that turns a leased trajectory, new or partial, into a finished one."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Continue the trajectory to its end.

        Raises Parked if it must become partial, LetGo if its lease is lost, DataError if it can never work, and in an
        evaluation NobodyAnswers if the whole evaluation cannot go on.
        """

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the reward of a finished trajectory whose worker died before the score; None requests the verifier.

        ``snapshot`` is the saved state of its environment.
        """


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
