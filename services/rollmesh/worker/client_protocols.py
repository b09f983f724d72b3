"""What holding a trajectory needs of its neighbours; ``wire/`` implements both over gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol

from rollmesh.types import Chunk, GenerationCall, GeneratorRecord, RewardOutcome, Trajectory


class GenerationPort(Protocol):
    """Calls on generators."""

    def generate(
        self,
        record: GeneratorRecord,
        call: GenerationCall,
        *,
        min_policy_version: int = 0,
        pinned_policy_version: int | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; the last one carries a finish reason.

        A call with an ``unacknowledged_token_limit`` is held while ``acknowledge`` is behind, and ends as
        ``interrupted`` when it stays behind.
        Raises GenerationRefused (not now, not here), EngineError (the generator or the way to it is broken) or
        DataError (the call can never work).
        """

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        """End these calls as ``interrupted`` with the tokens they have; returns how many were running."""

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        """Tell a generator how much of each trajectory, prompt included, is durable."""


class RewardPort(Protocol):
    """Calls on reward services."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """One outcome per finished trajectory, in order; many calls at once travel together.

        Raises RewardUnavailable when no service answers, DataError for a trajectory that cannot travel.
        """
