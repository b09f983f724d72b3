"""What a generation engine is: the seam between the generator service and torch, SGLang or a test double."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from rollmesh.errors import EngineError
from rollmesh.types import Chunk as Chunk
from rollmesh.types import Float32Array, Int32Array
from rollmesh.types import GenerationCall as GenerationCall


class OnNewVersion(StrEnum):
    """What a new policy version does to running calls."""

    INTERRUPT = "interrupt"
    """Running calls end as ``interrupted`` with the tokens they have; their KV is dropped."""
    KEEP_KV = "keep_kv"
    """Weights swap under running calls; chunks split at the swap and carry the older kv_min_version. A call that has
    met a newer version than the new one ends as ``interrupted``: the versions of one call never fall."""
    DRAIN = "drain"
    """New calls wait; weights swap once the running ones have finished."""


class EngineLost(EngineError):
    """What the engine runs on is gone or in an unknown state: this process must end and be started anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStatus:
    """Load and lifetime counters of an engine; all counters only grow."""

    policy_version: int
    running_count: int
    waiting_count: int
    slot_count: int
    kv_tokens_used: int
    kv_token_capacity: int
    generated_token_total: int
    prefill_token_total: int
    reprefill_token_total: int
    """Prefilled tokens that this or another generator had already sampled (resumed contexts)."""
    cached_token_total: int
    decode_step_total: int | None
    """None where the engine cannot tell."""
    busy_seconds_total: float
    """Seconds spent in prefill and decode."""
    running_slot_seconds_total: float
    """Integral of running calls over time: numerator of the bubble ratio."""
    held_back_total: int
    """Times a call was held because its caller fell behind with saving the tokens."""
    paused: bool


class Engine(Protocol):
    """A generation engine; every method is safe to call from one asyncio loop.

    A new trajectory never sees KV of another policy version. Errors are EngineError (the engine is broken),
    GenerationRefused (this call cannot be served here) or DataError (the call is wrong and names the field).
    """

    async def start(self, folder: Path, policy_version: int) -> None:
        """Load the first policy from a verified Hugging Face folder and begin to serve."""

    def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; closing the generator early frees the slot."""

    async def interrupt(self, trajectory_ids: Sequence[str] | None = None) -> int:
        """End these calls (None: all) as ``interrupted``; returns how many."""

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        """Take how much of each trajectory, prompt included, its caller has made durable.

        A call with an ``unacknowledged_token_limit`` is held before a chunk that might go beyond it: it keeps its slot
        and cache, and other calls go on. It continues once enough is acknowledged. It ends as ``interrupted`` after
        ``backlog.hold_seconds``, and at once when a running call needs its cache.
        """

    async def stage(self, folder: Path) -> None:
        """Read the weights in ``folder`` beside the running calls, so that ``load`` of it only has to swap.

        Raises EngineError when they do not fit; an engine that cannot stage does nothing.
        """

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; returns the seconds during which decoding stood still.

        Raises EngineError when the weights do not fit the running architecture; the old ones keep serving.
        """

    async def score(self, sequences: Sequence[Int32Array]) -> list[Float32Array]:
        """Log-probabilities (T=1) of each token given its predecessors, [tokens - 1] per sequence (canary, audit)."""

    async def pause(self) -> None:
        """Stop decoding; running calls are held, ``status`` stays answerable."""

    async def resume(self) -> None:
        """Continue decoding."""

    def status(self) -> EngineStatus:
        """Load and counters, without waiting for a decode step; EngineError when the engine has failed."""

    async def aclose(self) -> None:
        """End running calls as ``interrupted`` and stop."""
