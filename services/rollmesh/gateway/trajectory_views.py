"""Single trajectories as responses of the REST API: where they are, and their tokens by source and policy version."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, ConfigError, Conflict, DataError
from rollmesh.gateway.archive import Archive, Archived, Pieces, reward_of
from rollmesh.gateway.models.items import Outcome, TokenRun, TrajectoryDetail
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.request_guard import NotFound
from rollmesh.segments import join_segments, slice_segment
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import InspectedTrajectory
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, Segment, SegmentSource, Trajectory, TrajectoryState

Source = Literal["prompt", "policy", "environment"]

_LEAD = 8
"""Tokens before a page that are decoded with it: a character may begin there."""
_DIGITS = 6


def token_runs(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> tuple[list[TokenRun], int | None]:
    """Return runs of up to ``token_limit`` tokens from a position on, and the position of the next page."""
    prompt_ids = trajectory.prompt.token_ids
    token_ids = np.concatenate([prompt_ids, trajectory.response_ids])
    last = min(len(token_ids), first_token + token_limit)
    lead = max(0, first_token - _LEAD)
    texts = None if pieces is None else pieces(token_ids[lead:last])
    runs: list[TokenRun] = []
    start = 0
    for source, segment in _parts(trajectory):
        begin, end = max(first_token, start), min(last, start + len(segment))
        if begin < end:
            part = slice_segment(segment, begin - start, end - start)
            shown = None if texts is None else texts[begin - lead : end - lead]
            runs.append(_run(source, part, begin - len(prompt_ids), shown))
        start += len(segment)
    return runs, last if last < len(token_ids) else None


def _parts(trajectory: Trajectory) -> Iterator[tuple[Source, Segment]]:
    """Yield the prompt and the response, with equal neighbors joined: a rollout is saved in many small segments."""
    yield "prompt", _environment(trajectory.prompt.token_ids)
    whole = (
        segment if segment.source is SegmentSource.POLICY else _environment(segment.token_ids)
        for segment in trajectory.segments
        if len(segment)
    )
    for segment in join_segments(whole):
        yield "policy" if segment.source is SegmentSource.POLICY else "environment", segment


def _environment(token_ids: Int32Array) -> Segment:
    """Make a segment of tokens whose version and temperature are not shown."""
    source = SegmentSource.ENVIRONMENT
    return Segment(token_ids=token_ids, behavior_logprobs=None, policy_version=0, kv_min_version=0, source=source)


def _run(source: Source, segment: Segment, position: int, texts: list[str] | None) -> TokenRun:
    is_policy, logprobs = source == "policy", segment.behavior_logprobs
    return TokenRun(
        source=source,
        policy_version=segment.policy_version if is_policy else None,
        kv_min_version=segment.kv_min_version if is_policy else None,
        position=position,
        token_ids=segment.token_ids.tolist(),
        texts=texts,
        logprobs=None
        if logprobs is None
        else [round(v, _DIGITS) if math.isfinite(v) else None for v in logprobs.tolist()],
        temperature=segment.temperature if is_policy else None,
    )


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Return the model's tokenizer; None if the model folder cannot be read: tokens are then shown as ids."""
    try:
        return Tokenizer(resolve_model(config.model.path))
    except (ConfigError, DataError) as error:
        get_logger("gateway").warning("tokens_without_text", message=str(error))
        return None


def trajectory_detail(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> TrajectoryDetail:
    """Return a trajectory with the runs of its tokens; blocks, because thousands of tokens are decoded."""
    runs, next_token = token_runs(trajectory, first_token, token_limit, pieces)
    outcome = trajectory.outcome
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
        outcome=None
        if outcome is None
        else Outcome(kind=outcome.kind.value, value=outcome.value, parts=dict(outcome.parts), message=outcome.message),
        shaped_reward=reward_of(trajectory),
        verifier=trajectory.prompt.verifier,
        prompt_metadata=dict(trajectory.prompt.metadata),
        prompt_tokens=len(trajectory.prompt.token_ids),
        response_tokens=trajectory.response_token_count,
        first_token=first_token,
        next_token=next_token,
        runs=runs,
        traceparent=trajectory.traceparent,
    )


def archived_detail(
    found: Archived, trajectory_id: str, trained_step: int, first_token: int, token_limit: int, pieces: Pieces | None
) -> TrajectoryDetail | None:
    """Return a member of an archived group, None for no such member; blocks like ``trajectory_detail``."""
    members = found.group.trajectories
    trajectory = next((each for each in members if each.trajectory_id == trajectory_id), None)
    if trajectory is None:
        return None
    return trajectory_detail(trajectory, first_token, token_limit, pieces).model_copy(
        update={
            "members": [each.trajectory_id for each in members],
            "member_rewards": tuple(reward_of(each) for each in members),
            "state": "consumed" if found.train_step <= trained_step else "cut",
            "found_in": "batch",
            "train_step": found.train_step,
        }
    )


class Viewer:
    """Viewer of single trajectories, token by token."""

    def __init__(self, store: TrajectoryStore, archive: Archive, pieces: Pieces | None) -> None:
        self._store = store
        self._archive = archive
        self._pieces = pieces

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
