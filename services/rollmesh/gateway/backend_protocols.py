"""Interface between the routes and ``backend.py``, which implements it on the store, the run folder and the poller."""

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
    """Read access to the run; raises ``NotFound``, ``BadRequest``, ``Busy`` and the store's errors."""

    def about(self) -> About:
        """Return the fixed facts of the run."""

    def overview(self) -> Overview:
        """Return the newest overview; Busy before the first one."""

    def timeline(self) -> Timeline:
        """Return the rollouts in progress and recently ended."""

    def events(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream server-sent events, from the one after ``after`` if it is still kept; Busy with too many clients."""

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return the named curves, or all curves if ``names`` is empty."""

    async def trajectories(self, state: ListState | None, cursor: str | None, limit: int) -> TrajectoryPage:
        """Return one page of the queue's trajectories."""

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return one trajectory, from the queue, a batch file or a dead letter."""

    async def policies(self, limit: int) -> PolicyList:
        """Return announced policies, newest first."""

    async def generators(self) -> GeneratorList:
        """Return the live generators."""

    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Return dead letters, newest first."""


class Actions(Protocol):
    """Actions that require the token; raises ``NotFound`` and the store's errors, including Conflict."""

    async def pause(self, paused: bool) -> Done:
        """Stop or allow new leases."""

    async def pin(self, policy_version: int) -> Done:
        """Pin the generators to one version."""

    async def unpin(self) -> Done:
        """Let the generators follow the newest version."""

    async def roll_back(self, policy_version: int) -> Done:
        """Request a rollback to an older version from the trainer."""

    async def replay(self, trajectory_id: str) -> Done:
        """Return the prompt of a dead letter to the run."""

    async def delete_letter(self, trajectory_id: str) -> Done:
        """Delete a dead letter."""

    async def scale(self, request: ScaleRequest) -> Done:
        """Request a number of processes from the launcher."""
