"""Single trajectories for the viewer: found in the queue, among the dead letters or in a batch file."""

from __future__ import annotations

import asyncio

from rollmesh.errors import CheckpointError, Conflict
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.models.items import TrajectoryDetail
from rollmesh.gateway.token_runs import Pieces
from rollmesh.gateway.trajectory_details import archived_detail, trajectory_detail
from rollmesh.runtime.request_guard import NotFound
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import InspectedTrajectory
from rollmesh.types import Trajectory, TrajectoryState


class Viewer:
    """Viewer of single trajectories, token by token."""

    def __init__(self, store: TrajectoryStore, archive: Archive, pieces: Pieces | None) -> None:
        self._store = store
        self._archive = archive
        self._pieces = pieces

    @property
    def has_text(self) -> bool:
        """True if token ids come with their text."""
        return self._pieces is not None

    async def detail(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return one trajectory; NotFound if its tokens are nowhere."""
        inspected = await self._store.inspection.inspect(trajectory_id)
        if inspected is not None and inspected.mark.state == TrajectoryState.DEAD:
            inspected = None  # the dead letter has its tokens
        if inspected is not None and inspected.trajectory is not None:
            return await self._in_queue(inspected, inspected.trajectory, first_token, token_limit)
        letter = await self._in_letters(trajectory_id, first_token, token_limit)
        return letter or await self._in_batches(trajectory_id, first_token, token_limit)

    async def _in_queue(
        self, inspected: InspectedTrajectory, trajectory: Trajectory, first_token: int, token_limit: int
    ) -> TrajectoryDetail:
        workers = await self._store.inspection.workers() if inspected.mark.session else {}
        detail = await self._detail(trajectory, first_token, token_limit)
        mark = inspected.mark
        members = [f"{trajectory.group_id}.{member}" for member in range(inspected.member_count)]
        marks = await self._store.inspection.marks(members)
        return detail.model_copy(
            update={
                "members": members,
                "member_rewards": tuple(None if each is None else each.reward for each in marks),
                "state": mark.state,
                "train_step": mark.train_step,
                "worker": workers.get(mark.session, ""),
                "history": list(inspected.history.sentences()),
            }
        )

    async def _in_letters(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail | None:
        try:
            letter = await self._store.dead_letters.get(trajectory_id)
        except Conflict:
            return None
        if letter.trajectory is None:
            return None
        detail = await self._detail(letter.trajectory, first_token, token_limit)
        return detail.model_copy(update={"state": TrajectoryState.DEAD.value, "found_in": "dead_letter"})

    async def _in_batches(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        group_id = trajectory_id.rpartition(".")[0]
        left_at = await self._store.inspection.gone_at(group_id)
        try:
            found = await self._archive.find(group_id, left_at)
        except CheckpointError as error:
            raise NotFound(f"{trajectory_id}: its batch file cannot be read: {error}") from error
        if found is not None:
            trained = (await self._store.training.state()).trained_step
            detail = await asyncio.to_thread(
                archived_detail, found, trajectory_id, trained, first_token, token_limit, self._pieces
            )
            if detail is not None:
                return detail
        raise _not_found(trajectory_id, left_at)

    async def _detail(self, trajectory: Trajectory, first_token: int, token_limit: int) -> TrajectoryDetail:
        # Decode in a thread: the text of thousands of tokens takes a while.
        return await asyncio.to_thread(trajectory_detail, trajectory, first_token, token_limit, self._pieces)


def _not_found(trajectory_id: str, left_at: int | None) -> NotFound:
    if left_at is None:
        return NotFound(
            f"no trajectory {trajectory_id} in the queue, in a batch file or among the dead letters",
            field="trajectory_id",
            hint="ids are <group>.<member>, as listed by /api/v1/trajectories",
        )
    return NotFound(
        f"the group of {trajectory_id} left the queue about train step {left_at}, and no batch file here has it",
        field="trajectory_id",
        hint="it was dropped (overview: drops), or the checkpoint folder is not on this machine",
    )
