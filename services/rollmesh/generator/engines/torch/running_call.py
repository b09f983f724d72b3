"""One generation call inside the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rollmesh.generator.engines.backlog import Backlog
from rollmesh.generator.engines.torch.sampling import noise_key
from rollmesh.types import Chunk, GenerationCall, Int32Array


@dataclass(slots=True, eq=False, kw_only=True)
class RunningCall:
    """State of a call from its arrival to its last chunk."""

    request: GenerationCall
    deliver: Callable[[Chunk | Exception], None]
    """Function that passes a chunk or the final error to the caller; runs in the asyncio thread."""
    budget: int
    """Maximum number of tokens to sample: the call's limit, or the room left in the context."""
    noise_key: int = field(init=False)
    backlog: Backlog = field(init=False)
    arrival: int = 0
    slot: int = -1
    """Slot of a running call; -1 while waiting."""
    written: list[Int32Array] = field(default_factory=list)
    """Delivered tokens, for a new prefill after a preemption."""
    written_count: int = 0
    adapter_version: int | None = None
    """Version of the adapter that the call began with and finishes on; None before that, and without adapters."""
    kv_min_version: int = 0
    newest_version: int = -1
    """Newest policy version of the call's tokens and cache; later tokens never have an older version."""
    cached_token_count: int = 0
    """Prompt tokens copied from another call's cache, reported with the next chunk."""

    def __post_init__(self) -> None:
        self.noise_key = noise_key(self.request.sampling.seed, self.request.trajectory_id)
        self.backlog = Backlog.of(self.request)

    @property
    def started(self) -> bool:
        """True once the caller has received tokens."""
        return self.written_count > 0

    @property
    def position(self) -> int:
        """Number of response tokens so far, including those of earlier calls."""
        return len(self.request.context_ids) - self.request.prompt_token_count + self.written_count

    def context_ids(self) -> Int32Array:
        """Return all tokens before the next one, int32 [tokens]."""
        return np.concatenate((self.request.context_ids, *self.written)) if self.written else self.request.context_ids
