"""Single trajectories as responses of the REST API: where they are, and their tokens by source and policy version."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollmesh.checkpoints.policies import LATEST_LINK
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import ConfigError, DataError
from rollmesh.gateway.archive import Archived, Pieces, reward_of
from rollmesh.gateway.models.items import Outcome, TokenRun, TrajectoryDetail
from rollmesh.runtime.logging import get_logger
from rollmesh.segments import join_segments, slice_segment
from rollmesh.text import Tokenizer
from rollmesh.types import Float32Array, Int32Array, Segment, SegmentSource, Trajectory

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
            position, column = begin - len(prompt_ids), None if source == "prompt" else trajectory.teacher
            scores = None if column is None else column.logprobs[position : position + len(part)]
            runs.append(_run(source, part, position, shown, scores))
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


def _run(
    source: Source, segment: Segment, position: int, texts: list[str] | None, teacher: Float32Array | None
) -> TokenRun:
    is_policy, logprobs = source == "policy", segment.behavior_logprobs
    return TokenRun(
        source=source,
        policy_version=segment.policy_version if is_policy else None,
        kv_min_version=segment.kv_min_version if is_policy else None,
        position=position,
        token_ids=segment.token_ids.tolist(),
        texts=texts,
        logprobs=_shown(logprobs),
        teacher_logprobs=_shown(teacher),
        kept_counts=None if segment.kept_sets is None else segment.kept_sets.counts.tolist(),
        temperature=segment.temperature if is_policy else None,
    )


def _shown(logprobs: Float32Array | None) -> list[float | None] | None:
    if logprobs is None:
        return None
    return [round(value, _DIGITS) if math.isfinite(value) else None for value in logprobs.tolist()]


def open_pieces(config: RunConfig) -> Pieces | None:
    """Return the texts of tokens by the model's tokenizer, or where that is not found from here the newest policy's.

    None if neither can be read: tokens are then shown as ids, as are those of a damaged file that it does not know.
    """
    try:
        tokenizer = Tokenizer(resolve_model(config.model.path))
    except (ConfigError, DataError) as error:
        try:
            tokenizer = Tokenizer(config.checkpoints.on_this_node(Path(config.folder)) / LATEST_LINK)
        except DataError:
            get_logger("gateway").warning("tokens_without_text", message=str(error))
            return None

    def pieces(ids: npt.ArrayLike) -> list[str]:
        try:
            return tokenizer.pieces(ids)
        except DataError:
            return [f"{token_id} " for token_id in np.asarray(ids).tolist()]

    return pieces


def trajectory_detail(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> TrajectoryDetail:
    """Return a trajectory with the runs of its tokens; blocks, because thousands of tokens are decoded."""
    runs, next_token = token_runs(trajectory, first_token, token_limit, pieces)
    outcome, column = trajectory.outcome, trajectory.teacher
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
        teacher="" if column is None else f"{column.teacher} ({column.manifest_digest[:12]})",
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
