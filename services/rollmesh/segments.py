"""Cutting segments, and joining the chunks of one policy version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from rollmesh.types import Segment


def part_of(segment: Segment, start: int, end: int | None = None) -> Segment:
    """The tokens of a segment from ``start`` up to ``end``."""
    if start == 0 and (end is None or end >= len(segment)):
        return segment
    logprobs = segment.behavior_logprobs
    return replace(
        segment,
        token_ids=segment.token_ids[start:end],
        behavior_logprobs=None if logprobs is None else logprobs[start:end],
    )


def join_segments(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """The same tokens in as few segments as there are writers, in order.

    Tokens arrive in chunks of some dozens; a segment is all that one policy version wrote in a row, with KV of one
    oldest version and at one temperature, or all that the environment said in a row.
    """
    return tuple(_one(list(parts)) for _, parts in groupby(segments, _writer))


def _writer(segment: Segment) -> tuple[object, ...]:
    has_logprobs = segment.behavior_logprobs is not None
    return (segment.source, segment.policy_version, segment.kv_min_version, segment.temperature, has_logprobs)


def _one(parts: Sequence[Segment]) -> Segment:
    if len(parts) == 1:
        return parts[0]
    logprobs = [part.behavior_logprobs for part in parts if part.behavior_logprobs is not None]
    return replace(
        parts[0],
        token_ids=np.concatenate([part.token_ids for part in parts]),
        behavior_logprobs=np.concatenate(logprobs) if logprobs else None,
    )
