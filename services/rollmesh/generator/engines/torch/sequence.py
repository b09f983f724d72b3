"""One generation call inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollmesh.errors import DataError
from rollmesh.generator.engines.torch.sampling import noise_key
from rollmesh.types import Chunk, GenerationCall, Int32Array

Deliver = Callable[[Chunk | Exception], None]


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """State of a call from its arrival to its last chunk."""

    call: GenerationCall
    deliver: Deliver
    """Hands a chunk or the final error to the caller; runs in the asyncio thread."""
    budget: int
    """Tokens that may be sampled in all: the call's own limit or what the context leaves."""
    noise_key: int
    arrival: int = 0
    slot: int = -1
    """Slot while running, -1 while waiting."""
    written: list[Int32Array] = field(default_factory=list)
    """Tokens already delivered, for a new prefill after a preemption."""
    written_count: int = 0
    kv_min_version: int = 0
    cached_token_count: int = 0
    """Prompt tokens copied from another call's cache, reported with the next chunk."""

    @property
    def started(self) -> bool:
        """Whether the caller has seen tokens of it."""
        return self.written_count > 0

    @property
    def position(self) -> int:
        """Tokens after the prompt so far, those of earlier calls included."""
        return len(self.call.context_ids) - self.call.prompt_token_count + self.written_count

    def context_ids(self) -> Int32Array:
        """Everything that the next token follows, int32 [tokens]."""
        return np.concatenate((self.call.context_ids, *self.written)) if self.written else self.call.context_ids


def make_sequence(call: GenerationCall, deliver: Deliver, *, vocab_size: int, longest: int) -> Sequence:
    """Check a call against the model; DataError names the field, the value and the limit."""
    ids = call.context_ids
    if len(ids) == 0:
        raise DataError("context_ids: empty; generation needs at least one token")
    foreign = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(foreign):
        at = int(foreign[0])
        raise DataError(f"context_ids[{at}]={int(ids[at])} is outside the vocabulary of {vocab_size} tokens")
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
    _check_sampling(call, vocab_size)
    return Sequence(
        call=call,
        deliver=deliver,
        budget=min(call.max_new_token_count, longest - len(ids)),
        noise_key=noise_key(call.sampling.seed, call.trajectory_id),
    )


def _check_sampling(call: GenerationCall, vocab_size: int) -> None:
    sampling = call.sampling
    if not (np.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise DataError(f"sampling.temperature={sampling.temperature}: expected a finite number of at least 0")
    if not 0 < sampling.top_p <= 1:
        raise DataError(f"sampling.top_p={sampling.top_p}: expected more than 0 and at most 1")
    if sampling.top_k < 0:
        raise DataError(f"sampling.top_k={sampling.top_k}: expected 0 (off) or more")
    for token in sampling.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise DataError(f"sampling.stop_token_ids: {token} is outside the vocabulary of {vocab_size} tokens")
