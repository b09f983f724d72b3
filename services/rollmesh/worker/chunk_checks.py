"""Checks of every chunk from a generator, before any of its tokens is kept."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from rollmesh.errors import RollmeshError
from rollmesh.types import LOWEST_LOGPROB, Chunk, FinishReason

LOGPROB_SLACK = 1e-4
"""Largest log-probability accepted: rounding may push it above 0."""


class GarbageAnswer(RollmeshError, RuntimeError):
    """A generator sent an impossible chunk; ``reason`` is one of few short strings, for use as a metric label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Limits of a call that its chunks must satisfy."""

    vocab_size: int
    min_version: int
    newest_version: int
    """Newest announced policy version; no generator can sample from a later one."""
    pinned_version: int | None
    stop_token_ids: Collection[int]
    max_context_tokens: int
    kept_tokens: int = 0
    """Largest kept set; 0 for chunks without sets."""


def check_chunk(chunk: Chunk, expected: Expected, *, remaining: int, context_tokens: int) -> None:
    """Raise GarbageAnswer unless the chunk is a possible continuation.

    Before the chunk, ``remaining`` tokens of the call's budget are left and the context has ``context_tokens`` tokens.
    """
    count = len(chunk.token_ids)
    if len(chunk.behavior_logprobs) != count:
        raise GarbageAnswer("lengths", f"{count} token_ids but {len(chunk.behavior_logprobs)} behavior_logprobs")
    if count > remaining:
        raise GarbageAnswer("too_many_tokens", f"{count} tokens where {remaining} were left of the budget")
    _check_version(chunk, expected)
    if count:
        low, high = int(chunk.token_ids.min()), int(chunk.token_ids.max())
        if low < 0 or high >= expected.vocab_size:
            raise GarbageAnswer("token_id", f"token id {low if low < 0 else high} outside [0, {expected.vocab_size})")
        smallest, largest = float(chunk.behavior_logprobs.min()), float(chunk.behavior_logprobs.max())
        if not LOWEST_LOGPROB <= smallest <= largest <= LOGPROB_SLACK:
            raise GarbageAnswer(
                "logprob", f"behavior_logprobs are {smallest} to {largest}, expected {LOWEST_LOGPROB:g} to 0"
            )
        _check_sets(chunk, expected)
    match chunk.finish_reason:
        case FinishReason.STOP:
            if not count or int(chunk.token_ids[-1]) not in expected.stop_token_ids:
                raise GarbageAnswer("finish_reason", "stop without a stop token at the end")
        case FinishReason.LENGTH:
            if count < remaining and context_tokens + count < expected.max_context_tokens:
                raise GarbageAnswer("finish_reason", f"length with {remaining - count} tokens left of the budget")
        case FinishReason.ENVIRONMENT:
            raise GarbageAnswer("finish_reason", "a generator cannot end a trajectory for the environment")


def _check_sets(chunk: Chunk, expected: Expected) -> None:
    counts = np.zeros(len(chunk.token_ids), np.int32) if chunk.kept_sets is None else chunk.kept_sets.counts
    most = expected.kept_tokens
    if not (counts > 0).all() if most else counts.any():
        found = f"{np.count_nonzero(counts)} of {len(counts)} tokens have a kept set"
        raise GarbageAnswer("kept_sets", f"{found}, expected {'all: sampling is truncated' if most else 'none'}")
    if counts.max() > most:
        raise GarbageAnswer("kept_sets", f"a kept set of {counts.max()} tokens, expected at most {most}")
    if chunk.kept_sets is not None and chunk.kept_sets.ids.max(initial=0) >= expected.vocab_size:
        raise GarbageAnswer("kept_sets", f"a kept set has an id outside [0, {expected.vocab_size})")


def _check_version(chunk: Chunk, expected: Expected) -> None:
    version = chunk.policy_version
    if not expected.min_version <= version <= expected.newest_version:
        raise GarbageAnswer(
            "version", f"policy_version {version} outside [{expected.min_version}, {expected.newest_version}]"
        )
    if expected.pinned_version is not None and version != expected.pinned_version:
        raise GarbageAnswer("version", f"policy_version {version}, pinned to {expected.pinned_version}")
    if chunk.kv_min_version > version:
        raise GarbageAnswer("version", f"kv_min_version {chunk.kv_min_version} above policy_version {version}")
