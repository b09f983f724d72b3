"""What a rollout program is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from rollmesh.types import FinishReason, RewardOutcome, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller

HeldWrite = Callable[[ActiveTrajectory], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """How a trajectory ended."""

    reason: FinishReason
    outcome: RewardOutcome | None = None
    """Reward that the program itself knows; None asks the verifier."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """One trajectory and the means to continue it."""

    held: ActiveTrajectory
    caller: Caller
    params: SamplingParams
    budget: int
    """Tokens of the whole response, environment tokens included."""
    save: HeldWrite
    """Make the tokens so far durable."""
    report_first_token: HeldWrite
    """Let the queue know how old the tokens are, while none is durable."""
    restart: HeldWrite
    """Drop all tokens, saved ones too."""
    keep_snapshot: Callable[[ActiveTrajectory, bytes], Awaitable[None]]
    """Make the state of the trajectory's environment durable."""
    pinned_version: int | None = None

    @property
    def left(self) -> int:
        """Tokens left of the budget."""
        return max(0, self.budget - self.held.token_count)

    async def sample(self, *, durable: bool = True) -> FinishReason:
        """Let the policy continue until a stop token (STOP) or the end of the budget (LENGTH).

        ``durable`` saves partial tokens on the way, unless it is an evaluation; else the first token is reported.
        Raises Parked or LetGo.
        """
        if self.pinned_version is not None:
            version = self.pinned_version
            return await self.caller.sample(self.held, self.left, self.params, save=None, pinned_version=version)
        save = self.save if durable else self.report_first_token
        return await self.caller.sample(self.held, self.left, self.params, save=save, durable=durable)


class Program(Protocol):
    """Turns a leased trajectory, new or partial, into a finished one."""

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Continue the trajectory to its end.

        Raises Parked when it comes to rest, LetGo when the queue gave it up, DataError when it can never work.
        """

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Reward of a finished trajectory whose worker died before it was scored; None asks the verifier.

        ``snapshot`` is what was kept of its environment.
        """
