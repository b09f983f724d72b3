"""A trajectory as runs of tokens: by source and policy version, with text and log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rollmesh.gateway.models import TokenRun
from rollmesh.types import Float32Array, Int32Array, Segment, SegmentSource, Trajectory

Pieces = Callable[[npt.ArrayLike], list[str]]
"""Text that each token adds (``Tokenizer.pieces``)."""

_LEAD = 8
"""Tokens before a page that are decoded with it: a character may begin there."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    source: Literal["prompt", "policy", "environment"]
    first: int
    """Position from the start of the prompt."""
    token_ids: Int32Array
    logprobs: Float32Array | None
    policy_version: int | None
    kv_min_version: int | None
    temperature: float | None

    def follows(self, other: _Span) -> bool:
        """Tell whether both belong to one run."""
        key = (self.source, self.policy_version, self.kv_min_version, self.temperature)
        return key == (other.source, other.policy_version, other.kv_min_version, other.temperature)


def token_runs(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> tuple[list[TokenRun], int | None]:
    """Return runs of up to ``token_limit`` tokens from a position on, and the position of the next page."""
    spans = _merged(_spans(trajectory))
    token_ids = np.concatenate([span.token_ids for span in spans]) if spans else np.empty(0, np.int32)
    last = min(len(token_ids), first_token + token_limit)
    texts = _texts(token_ids, first_token, last, pieces)
    prompt_tokens = len(trajectory.prompt.token_ids)
    runs = [
        run
        for span in spans
        if (run := _run(span, first_token, last, texts, prompt_tokens)) is not None
    ]  # fmt: skip
    return runs, last if last < len(token_ids) else None


def _spans(trajectory: Trajectory) -> list[_Span]:
    prompt = trajectory.prompt.token_ids
    spans = [
        _Span(
            source="prompt",
            first=0,
            token_ids=prompt,
            logprobs=None,
            policy_version=None,
            kv_min_version=None,
            temperature=None,
        )
    ]
    at = len(prompt)
    for segment in trajectory.segments:
        spans.append(_segment_span(segment, at))
        at += len(segment)
    return [span for span in spans if len(span.token_ids)]


def _segment_span(segment: Segment, first: int) -> _Span:
    is_policy = segment.source is SegmentSource.POLICY
    return _Span(
        source="policy" if is_policy else "environment",
        first=first,
        token_ids=segment.token_ids,
        logprobs=segment.behavior_logprobs if is_policy else None,
        policy_version=segment.policy_version if is_policy else None,
        kv_min_version=segment.kv_min_version if is_policy else None,
        temperature=segment.temperature if is_policy else None,
    )


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Merge equal neighbors: a rollout is saved in many small segments."""
    groups: list[list[_Span]] = []
    for span in spans:
        if groups and span.follows(groups[-1][0]):
            groups[-1].append(span)
        else:
            groups.append([span])
    return [group[0] if len(group) == 1 else _merge(group) for group in groups]


def _merge(group: Sequence[_Span]) -> _Span:
    head = group[0]
    logprobs = [span.logprobs for span in group if span.logprobs is not None]
    return _Span(
        source=head.source,
        first=head.first,
        token_ids=np.concatenate([span.token_ids for span in group]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        policy_version=head.policy_version,
        kv_min_version=head.kv_min_version,
        temperature=head.temperature,
    )


def _texts(token_ids: Int32Array, first: int, last: int, pieces: Pieces | None) -> dict[int, str] | None:
    """Return text by position, for the positions of one page."""
    if pieces is None:
        return None
    begin = max(0, first - _LEAD)
    found = pieces(token_ids[begin:last])
    return {begin + at: text for at, text in enumerate(found)}


def _run(span: _Span, first: int, last: int, texts: dict[int, str] | None, prompt_tokens: int) -> TokenRun | None:
    begin, end = max(first, span.first), min(last, span.first + len(span.token_ids))
    if begin >= end:
        return None
    inside = slice(begin - span.first, end - span.first)
    return TokenRun(
        source=span.source,
        policy_version=span.policy_version,
        kv_min_version=span.kv_min_version,
        position=begin - prompt_tokens,
        token_ids=span.token_ids[inside].tolist(),
        texts=None if texts is None else [texts[at] for at in range(begin, end)],
        logprobs=None if span.logprobs is None else [_rounded(value) for value in span.logprobs[inside].tolist()],
        temperature=span.temperature,
    )


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None
