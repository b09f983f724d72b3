"""Slicing of segments, joining of chunks of one policy version, and groups of given tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from uuid import uuid4

import numpy as np

from rollmesh.kept_sets import join_sets, slice_sets
from rollmesh.types import Group, OutcomeKind, Prompt, RewardOutcome, Segment, SegmentSource, TeacherColumn, Trajectory


def slice_segment(segment: Segment, start: int, end: int | None = None) -> Segment:
    """Return the tokens of a segment from ``start`` up to ``end``."""
    if start == 0 and (end is None or end >= len(segment)):
        return segment
    logprobs = segment.behavior_logprobs
    return replace(
        segment,
        token_ids=segment.token_ids[start:end],
        behavior_logprobs=None if logprobs is None else logprobs[start:end],
        kept_sets=None if segment.kept_sets is None else slice_sets(segment.kept_sets, start, end),
    )


def keep_tokens(segments: Sequence[Segment], count: int) -> tuple[tuple[Segment, ...], int]:
    """Return the first ``count`` tokens of segments, and the number of sampled tokens after them."""
    kept, cut = list[Segment](), 0
    for segment in segments:
        stays = min(count, len(segment))
        count -= stays
        if stays:
            kept.append(slice_segment(segment, 0, stays))
        if segment.source is SegmentSource.POLICY:
            cut += len(segment) - stays
    return tuple(kept), cut


def keep_scores(column: TeacherColumn, count: int) -> TeacherColumn:
    """Return a teacher's scores of the first ``count`` tokens."""
    return replace(
        column,
        logprobs=column.logprobs[:count],
        top_ids=None if column.top_ids is None else column.top_ids[:count],
        top_logprobs=None if column.top_logprobs is None else column.top_logprobs[:count],
    )


def sampled_count(segments: Iterable[Segment]) -> int:
    """Return the number of tokens that a policy wrote."""
    return sum(len(segment) for segment in segments if segment.source is SegmentSource.POLICY)


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Merge adjacent segments with the same source, versions, temperature and columns, in order.

    Tokens arrive in chunks of a few dozen. A merged segment has all consecutive tokens of one policy version, with one
    oldest KV version and one temperature, or all consecutive tokens of the environment.
    """
    return tuple(_merge(list(run)) for _, run in groupby(segments, _merge_key))


def join_group(group: Group) -> Group:
    """Join the segments of every trajectory of a group."""
    members = tuple(replace(t, segments=join_segments(t.segments)) for t in group.trajectories)
    return replace(group, trajectories=members)


def _merge_key(segment: Segment) -> tuple[object, ...]:
    columns = (segment.behavior_logprobs is not None, segment.kept_sets is not None)
    return (segment.source, segment.policy_version, segment.kv_min_version, segment.temperature, columns)


def _merge(run: Sequence[Segment]) -> Segment:
    if len(run) == 1:
        return run[0]
    logprobs = [segment.behavior_logprobs for segment in run if segment.behavior_logprobs is not None]
    return replace(
        run[0],
        token_ids=np.concatenate([segment.token_ids for segment in run]),
        behavior_logprobs=np.concatenate(logprobs) if logprobs else None,
        kept_sets=join_sets((len(segment), segment.kept_sets) for segment in run),
    )


def given_answer(
    prompt_ids: Sequence[int], token_ids: Sequence[int], logprobs: Sequence[float], reward: float, version: int = 0
) -> Group:
    """Return a scored answer from anywhere as a group of one.

    ``logprobs`` are the log-probabilities with which policy version ``version`` sampled ``token_ids``, at T=1.
    """
    name = uuid4().hex
    segment = Segment(
        token_ids=np.asarray(token_ids, np.int32),
        behavior_logprobs=np.asarray(logprobs, np.float32),
        policy_version=version,
        kv_min_version=version,
    )
    answer = Trajectory(
        trajectory_id=name,
        group_id=name,
        member_index=0,
        prompt=Prompt(prompt_id=name, token_ids=np.asarray(prompt_ids, np.int32), verifier=""),
        segments=(segment,),
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=reward),
        shaped_reward=reward,
    )
    return Group(group_id=name, admission_index=0, trajectories=(answer,))
