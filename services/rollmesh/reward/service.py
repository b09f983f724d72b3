"""RewardService over gRPC."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from rollmesh.reward.scoring import Scoring
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_to_pb

SERVICE_NAME = "rollmesh.v1.RewardService"
MOST_ITEMS = 100_000
"""Answers in the service at once; more are refused, so that a flood is felt by its sender."""


class RewardService(stubs.RewardServiceServicer):
    """Scores answers; one outcome per item, in order."""

    def __init__(self, scoring: Scoring, most_items: int = MOST_ITEMS) -> None:
        self._scoring = scoring
        self._most_items = most_items
        self._item_count = 0

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ScoreResponse:
        """Score every item; RESOURCE_EXHAUSTED when the service is full."""
        count = len(request.items)
        if self._item_count + count > self._most_items:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"items: {self._item_count} of {self._most_items} are in the service",
            )
        self._item_count += count
        try:
            outcomes = await asyncio.gather(
                *(self._scoring.score(item.prompt.verifier, item.SerializeToString()) for item in request.items)
            )
        finally:
            self._item_count -= count
        return pb.ScoreResponse(outcomes=[outcome_to_pb(outcome) for outcome in outcomes])
