"""A trajectory as runs of tokens: by source and policy version, with text and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollmesh.gateway.models.items import TokenRun
from rollmesh.segments import join_segments, slice_segment
from rollmesh.types import Int32Array, Segment, SegmentSource, Trajectory

Pieces = Callable[[npt.ArrayLike], list[str]]
"""Text that each token adds (``Tokenizer.pieces``)."""
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
        logprobs=None if logprobs is None else [_rounded(value) for value in logprobs.tolist()],
        temperature=segment.temperature if is_policy else None,
    )


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None
