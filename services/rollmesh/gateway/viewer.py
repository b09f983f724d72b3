"""Single trajectories for the viewer: found in the queue, among the dead letters or in a batch file."""

from __future__ import annotations

import asyncio

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, ConfigError, Conflict, DataError
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.models.items import Outcome, TrajectoryDetail, TrajectoryPage, TrajectorySummary
from rollmesh.gateway.token_runs import Pieces, token_runs
from rollmesh.runtime.api_errors import NotFound
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import InspectedTrajectory, TrajectoryMark
from rollmesh.text import Tokenizer
from rollmesh.types import RewardOutcome, Trajectory, TrajectoryState


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the model's tokenizer; None if the model folder cannot be read: tokens are then shown as ids."""
    try:
        return Tokenizer(resolve_model(config.model.path))
    except (ConfigError, DataError) as error:
        get_logger("gateway").warning("tokens_without_text", message=str(error))
        return None


class Viewer:
    """Viewer of queue pages and of single trajectories, token by token."""

    def __init__(self, store: TrajectoryStore, archive: Archive, tokenizer: Tokenizer | None) -> None:
        self._store = store
        self._archive = archive
        self._pieces: Pieces | None = None if tokenizer is None else tokenizer.pieces

    @property
    def has_text(self) -> bool:
        """True if token ids come with their text."""
        return self._pieces is not None

    async def page(self, state: str | None, cursor: str | None, limit: int) -> TrajectoryPage:
        """Return one page of the queue."""
        marks, next_cursor = await self._store.inspection.trajectory_page(state, cursor, limit)
        return TrajectoryPage(items=[_summary(mark) for mark in marks], next_cursor=next_cursor)

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
        return detail.model_copy(
            update={
                "members": [f"{trajectory.group_id}.{member}" for member in range(inspected.member_count)],
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
        members = () if found is None else found.group.trajectories
        trajectory = next((each for each in members if each.trajectory_id == trajectory_id), None)
        if found is None or trajectory is None:
            raise _not_found(trajectory_id, left_at)
        trained = (await self._store.training.state()).trained_step
        detail = await self._detail(trajectory, first_token, token_limit)
        consumed = found.train_step <= trained
        return detail.model_copy(
            update={
                "members": [each.trajectory_id for each in members],
                "state": "consumed" if consumed else "cut",
                "found_in": "batch",
                "train_step": found.train_step,
            }
        )

    async def _detail(self, trajectory: Trajectory, first_token: int, token_limit: int) -> TrajectoryDetail:
        # Decode in a thread: the text of thousands of tokens takes a while.
        runs, next_token = await asyncio.to_thread(token_runs, trajectory, first_token, token_limit, self._pieces)
        scored = trajectory.outcome is not None
        return TrajectoryDetail(
            id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            members=[trajectory.trajectory_id],
            state="",
            found_in="queue",
            train_step=None,
            worker="",
            history=[],
            birth_version=trajectory.birth_version,
            policy_versions=list(trajectory.policy_versions),
            finish_reason=None if trajectory.finish_reason is None else trajectory.finish_reason.value,
            outcome=None if trajectory.outcome is None else _outcome(trajectory.outcome),
            shaped_reward=trajectory.shaped_reward if scored else None,
            verifier=trajectory.prompt.verifier,
            prompt_metadata=dict(trajectory.prompt.metadata),
            prompt_tokens=len(trajectory.prompt.token_ids),
            response_tokens=trajectory.response_token_count,
            first_token=first_token,
            next_token=next_token,
            runs=runs,
            traceparent=trajectory.traceparent,
        )


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


def _outcome(outcome: RewardOutcome) -> Outcome:
    return Outcome(kind=outcome.kind.value, value=outcome.value, parts=dict(outcome.parts), message=outcome.message)


def _summary(mark: TrajectoryMark) -> TrajectorySummary:
    return TrajectorySummary(
        id=mark.trajectory_id,
        group_id=mark.trajectory_id.rpartition(".")[0],
        state=mark.state,
        tokens=mark.token_count,
        attempts=mark.attempts,
        birth_version=mark.birth_version,
        newest_version=mark.newest_version,
        finish_reason=mark.finish_reason,
        reward=mark.reward,
        train_step=mark.train_step,
    )
