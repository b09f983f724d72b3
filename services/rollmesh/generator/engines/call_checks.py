"""Validation of generation calls, shared by every engine; errors name the field and its limit."""

from __future__ import annotations

import math

import numpy as np

from rollmesh.errors import DataError
from rollmesh.types import LOWEST_TEMPERATURE, GenerationCall, Int32Array, SamplingParams


def check_call(call: GenerationCall, *, vocab_size: int, longest: int) -> int:
    """Check a call against the model and a context of ``longest`` tokens; returns its budget of new tokens.

    DataError names the field, the value and the limit. One id outside the vocabulary could crash a server.
    """
    ids = call.context_ids
    if len(ids) == 0:
        raise DataError("context_ids: empty; generation needs at least one token")
    check_ids(ids, vocab_size, "context_ids")
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


def check_ids(ids: Int32Array, vocab_size: int, name: str) -> None:
    """Raise DataError for the first id outside the vocabulary."""
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
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise DataError(f"sampling.stop_token_ids: {token} is outside the vocabulary of {vocab_size} tokens")
