"""RewardService over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from rollmesh.reward.scoring import Scoring
from rollmesh.runtime.tracing import tracer
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_to_pb

SERVICE_NAME = "rollmesh.v1.RewardService"
MOST_ITEMS = 100_000
"""Answers in the service at once; more are refused, so that a flood is felt by its sender."""


class RewardService(stubs.RewardServiceServicer):
    """Scores answers; each outcome leaves as soon as it is there."""

    def __init__(self, scoring: Scoring, most_items: int = MOST_ITEMS) -> None:
        self._scoring = scoring
        self._most_items = most_items
        self._item_count = 0

    async def Score(
        self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScoreResponse]:
        """Score every item; RESOURCE_EXHAUSTED when the service is full. A cancelled call is not scored further."""
        count = len(request.items)
        if self._item_count + count > self._most_items:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"items: {self._item_count} of {self._most_items} are in the service",
            )
        self._item_count += count
        tasks = [asyncio.create_task(self._one(index, item)) for index, item in enumerate(request.items)]
        try:
            for scored in asyncio.as_completed(tasks):
                yield await scored
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._item_count -= count

    async def _one(self, index: int, item: pb.ScoreItem) -> pb.ScoreResponse:
        verifier = item.prompt.verifier
        span = tracer().span("score", item.traceparent, kind="server", trajectory=item.trajectory_id, verifier=verifier)
        with span:
            outcome = await self._scoring.score(verifier, item.SerializeToString())
            span.set(outcome=outcome.kind.value, reward=outcome.value)
        return pb.ScoreResponse(item_index=index, outcome=outcome_to_pb(outcome))
