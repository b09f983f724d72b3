"""Work of the engines on calls: checks whose errors name the field and its limit, and the bound of unsaved tokens.

An engine continues to sample while the caller saves. If the caller crashes, its unsaved tokens are lost, so a call may
set a limit. Before every chunk the engine checks that the whole chunk fits under the limit. If not, it holds the call
until the caller acknowledges more tokens. A held call keeps its slot and its cache for a bounded time, then it ends as
interrupted.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from rollmesh.errors import ConfigError, DataError, EngineError
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.types import LOWEST_TEMPERATURE, Chunk, FinishReason, GenerationCall, Int32Array, SamplingParams

_HOLD_SECONDS = 2.0
_CONTENDED_HOLD_SECONDS = 0.25


def check_call(call: GenerationCall, *, vocab_size: int, longest: int) -> int:
    """Check a call against the model and a context of ``longest`` tokens; returns its budget of new tokens.

    DataError names the field, the value and the limit. One id outside the vocabulary could crash a server.
    """
    ids = call.context_ids
    if len(ids) == 0:
        raise DataError("context_ids: empty; generation needs at least one token")
    _check_ids(ids, vocab_size, "context_ids")
    if len(ids) >= longest:
        raise DataError(
            f"context_ids: {len(ids)} tokens leave no room to generate; generator.max_context_tokens and "
            f"kv_token_capacity allow {longest} tokens of prompt plus response"
        )
    if not 1 <= call.prompt_token_count <= len(ids):
        raise DataError(f"prompt_token_count={call.prompt_token_count}: expected 1 to {len(ids)} (context_ids)")
    for name in ("max_new_token_count", "chunk_token_count"):
        if getattr(call, name) < 1:
            raise DataError(f"{name}={getattr(call, name)}: expected at least 1")
    if call.unacknowledged_token_limit and call.unacknowledged_token_limit < call.chunk_token_count:
        raise DataError(
            f"unacknowledged_token_limit={call.unacknowledged_token_limit}: expected 0 (no limit) or at least "
            f"chunk_token_count={call.chunk_token_count}"
        )
    _check_sampling(call.sampling, vocab_size)
    return min(call.max_new_token_count, longest - len(ids))


def check_sequences(sequences: Sequence[Int32Array], *, vocab_size: int, longest: int) -> None:
    """Raise DataError for the first sequence that cannot be scored."""
    for number, ids in enumerate(sequences):
        if not 1 <= len(ids) <= longest:
            raise DataError(f"sequences[{number}]: {len(ids)} tokens, expected 1 to {longest}")
        _check_ids(ids, vocab_size, f"sequences[{number}]")


def check_mode(mode: OnNewVersion, *, with_adapter: bool) -> None:
    """Raise EngineError for a treatment of running calls that an engine with or without adapters does not have."""
    if (mode is OnNewVersion.NEXT_SLICE) != with_adapter:
        raise EngineError(
            f"generator.on_new_version={mode}: an engine {'with' if with_adapter else 'without'} model.adapter "
            "cannot; leave it out"
        )


def check_context_length(max_context_tokens: int, max_positions: int) -> None:
    """Raise ConfigError if the model has fewer positions than the run file wants."""
    if max_context_tokens > max_positions:
        raise ConfigError(
            f"generator.max_context_tokens={max_context_tokens} is more than the model's "
            f"max_position_embeddings={max_positions}"
        )


def _check_ids(ids: Int32Array, vocab_size: int, name: str) -> None:
    foreign = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(foreign):
        at = int(foreign[0])
        raise DataError(f"{name}[{at}]={int(ids[at])} is outside the vocabulary of {vocab_size} tokens")


def _check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    temperature = sampling.temperature
    if not (math.isfinite(temperature) and (temperature == 0 or temperature >= LOWEST_TEMPERATURE)):
        raise DataError(f"sampling.temperature={temperature}: expected 0 or a number of at least {LOWEST_TEMPERATURE}")
    if not 0 < sampling.top_p <= 1:
        raise DataError(f"sampling.top_p={sampling.top_p}: expected more than 0 and at most 1")
    if sampling.top_k < 0:
        raise DataError(f"sampling.top_k={sampling.top_k}: expected 0 (off) or more")
    if not 0 <= sampling.min_p < 1:
        raise DataError(f"sampling.min_p={sampling.min_p}: expected at least 0 (off) and less than 1")
    if sampling.kept_tokens and sampling.kept_tokens < max(1, sampling.top_k):
        raise DataError(
            f"sampling.kept_tokens={sampling.kept_tokens}: expected 0 (no sets) or at least {max(1, sampling.top_k)}"
        )
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise DataError(f"sampling.stop_token_ids: {token} is outside the vocabulary of {vocab_size} tokens")


def hold_seconds(*, contended: bool) -> float:
    """Return the seconds a call may be held; ``contended`` while other calls wait for a slot, cache or a load."""
    return _CONTENDED_HOLD_SECONDS if contended else _HOLD_SECONDS


@dataclass(slots=True, eq=False, kw_only=True)
class Backlog:
    """Sampled and durable tokens of one call's context."""

    chunk_token_count: int
    limit: int
    """Maximum number of sampled tokens that are not acknowledged; 0 is no limit."""
    sampled: int
    """Tokens of the context: the prompt, the response at the start of the call and the delivered tokens."""
    durable: int
    """Leading tokens of the context that are durable; includes the context at the start of the call."""

    @classmethod
    def of(cls, call: GenerationCall) -> Self:
        context = len(call.context_ids)
        return cls(
            chunk_token_count=call.chunk_token_count,
            limit=call.unacknowledged_token_limit,
            sampled=context,
            durable=context,
        )

    @property
    def blocked(self) -> bool:
        """True if another chunk might exceed the limit."""
        return 0 < self.limit < self.sampled - self.durable + self.chunk_token_count

    def add(self, token_count: int) -> None:
        self.sampled += token_count

    def acknowledge(self, context_token_count: int) -> None:
        """Record the durable tokens; a stale count changes nothing, and a count never exceeds the sampled tokens."""
        self.durable = max(self.durable, min(context_token_count, self.sampled))


def empty_chunk(policy_version: int, reason: FinishReason | None = None) -> Chunk:
    """Return a chunk without tokens; with a reason, it is the last one of its call."""
    return Chunk(
        token_ids=np.empty(0, np.int32),
        behavior_logprobs=np.empty(0, np.float32),
        policy_version=policy_version,
        kv_min_version=policy_version,
        finish_reason=reason,
    )
