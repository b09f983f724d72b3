"""A trajectory as runs of tokens: by writer and policy version, with text and log-probabilities."""

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
"""Tokens before a page that are decoded with it: a character may have begun there."""
_DIGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    source: Literal["prompt", "policy", "environment"]
    first: int
    """Position from the start of the prompt."""
    token_ids: Int32Array
    logprobs: Float32Array | None
    policy_version: int | None
    kv_min_version: int | None
    temperature: float | None

    def follows(self, other: _Part) -> bool:
        """Whether both are one run."""
        mine = (self.source, self.policy_version, self.kv_min_version, self.temperature)
        return mine == (other.source, other.policy_version, other.kv_min_version, other.temperature)


def token_runs(
    trajectory: Trajectory, first_token: int, token_limit: int, pieces: Pieces | None
) -> tuple[list[TokenRun], int | None]:
    """Runs of up to ``token_limit`` tokens from a position on, and the position of the next page."""
    parts = _joined(_parts(trajectory))
    everything = np.concatenate([part.token_ids for part in parts]) if parts else np.empty(0, np.int32)
    last = min(len(everything), first_token + token_limit)
    texts = _texts(everything, first_token, last, pieces)
    prompt_tokens = len(trajectory.prompt.token_ids)
    runs = [
        run
        for part in parts
        if (run := _run(part, first_token, last, texts, prompt_tokens)) is not None
    ]  # fmt: skip
    return runs, last if last < len(everything) else None


def _parts(trajectory: Trajectory) -> list[_Part]:
    prompt = trajectory.prompt.token_ids
    parts = [
        _Part(
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
        parts.append(_segment_part(segment, at))
        at += len(segment)
    return [part for part in parts if len(part.token_ids)]


def _segment_part(segment: Segment, first: int) -> _Part:
    ours = segment.source is SegmentSource.POLICY
    return _Part(
        source="policy" if ours else "environment",
        first=first,
        token_ids=segment.token_ids,
        logprobs=segment.behavior_logprobs if ours else None,
        policy_version=segment.policy_version if ours else None,
        kv_min_version=segment.kv_min_version if ours else None,
        temperature=segment.temperature if ours else None,
    )


def _joined(parts: Sequence[_Part]) -> list[_Part]:
    """Neighbours that differ in nothing are one: a rollout is saved in many small segments."""
    groups: list[list[_Part]] = []
    for part in parts:
        if groups and part.follows(groups[-1][0]):
            groups[-1].append(part)
        else:
            groups.append([part])
    return [group[0] if len(group) == 1 else _one(group) for group in groups]


def _one(group: Sequence[_Part]) -> _Part:
    head = group[0]
    logprobs = [part.logprobs for part in group if part.logprobs is not None]
    return _Part(
        source=head.source,
        first=head.first,
        token_ids=np.concatenate([part.token_ids for part in group]),
        logprobs=np.concatenate(logprobs) if logprobs else None,
        policy_version=head.policy_version,
        kv_min_version=head.kv_min_version,
        temperature=head.temperature,
    )


def _texts(everything: Int32Array, first: int, last: int, pieces: Pieces | None) -> dict[int, str] | None:
    """Text by position, for the positions of one page."""
    if pieces is None:
        return None
    begin = max(0, first - _LEAD)
    found = pieces(everything[begin:last])
    return {begin + at: text for at, text in enumerate(found)}


def _run(part: _Part, first: int, last: int, texts: dict[int, str] | None, prompt_tokens: int) -> TokenRun | None:
    begin, end = max(first, part.first), min(last, part.first + len(part.token_ids))
    if begin >= end:
        return None
    inside = slice(begin - part.first, end - part.first)
    return TokenRun(
        source=part.source,
        policy_version=part.policy_version,
        kv_min_version=part.kv_min_version,
        position=begin - prompt_tokens,
        token_ids=part.token_ids[inside].tolist(),
        texts=None if texts is None else [texts[at] for at in range(begin, end)],
        logprobs=None if part.logprobs is None else [_rounded(value) for value in part.logprobs[inside].tolist()],
        temperature=part.temperature,
    )


def _rounded(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None
