"""Protocols of the generator and reward clients; ``wire/`` implements both over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from rollmesh.types import (
    ANY_VERSION,
    Chunk,
    GenerationCall,
    GeneratorRecord,
    RewardOutcome,
    Trajectory,
    VersionNeed,
)


class GenerationPort(Protocol):
    """Calls on generators."""

    def generate(
        self,
        record: GeneratorRecord,
        call: GenerationCall,
        need: VersionNeed = ANY_VERSION,
        *,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; the last one carries a finish reason.

        A call with an ``unacknowledged_token_limit`` is held while ``acknowledge`` is behind, and ends as
        ``interrupted`` when it stays behind.
        Raises GenerationRefused (this generator cannot take the call now), EngineError (the generator or the
        connection to it fails) or DataError (the call can never work).
        """

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        """End these calls as ``interrupted`` with their tokens so far; returns how many of them ran."""

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        """Send a generator the durable token count of each trajectory, prompt included."""


class RewardPort(Protocol):
    """Calls on reward services."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """Return one outcome per finished trajectory, in order; simultaneous calls are batched.

        Raises RewardUnavailable if no service answers, DataError for a trajectory that cannot be sent.
        """
