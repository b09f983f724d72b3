"""What the routes need behind them; ``backend.py`` provides it from the store, the run folder and the sampler."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from rollmesh.gateway.models import (
    About,
    DeadLetterList,
    Done,
    GeneratorList,
    ListState,
    Overview,
    PolicyList,
    ScaleRequest,
    SeriesAnswer,
    Timeline,
    TrajectoryDetail,
    TrajectoryPage,
)


class Reads(Protocol):
    """What everybody may look at. Raises ``NotFound``, ``BadRequest`` and the store's errors."""

    def about(self) -> About:
        """Fixed facts of the run."""

    def overview(self) -> Overview:
        """The newest look at the mesh; StoreUnavailable before the first one."""

    def timeline(self) -> Timeline:
        """Rollouts in flight and just ended."""

    def events(self, after: int | None) -> AsyncIterator[bytes]:
        """Server-sent events, from the one after ``after`` where it is still known; Busy with too many clients."""

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Curves; every one when no name is given."""

    async def trajectories(self, state: ListState | None, cursor: str | None, limit: int) -> TrajectoryPage:
        """One page of the queue's trajectories."""

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """One trajectory, from the queue, a batch file or a dead letter."""

    async def policies(self, limit: int) -> PolicyList:
        """Announced policies, newest first."""

    async def generators(self) -> GeneratorList:
        """Living generators."""

    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Dead letters, newest first."""


class Actions(Protocol):
    """What the holder of the token may do. Raises ``NotFound`` and the store's errors (Conflict among them)."""

    async def pause(self, paused: bool) -> Done:
        """Stop or allow new leases."""

    async def pin(self, policy_version: int) -> Done:
        """Hold the generators at one version."""

    async def unpin(self) -> Done:
        """Let them follow the newest version again."""

    async def roll_back(self, policy_version: int) -> Done:
        """Ask the trainer to go on from an older version."""

    async def replay(self, trajectory_id: str) -> Done:
        """Put the prompt of a dead letter back into the run."""

    async def delete_letter(self, trajectory_id: str) -> Done:
        """Forget a dead letter."""

    async def scale(self, request: ScaleRequest) -> Done:
        """Ask the launcher for another number of processes."""
