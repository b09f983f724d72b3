"""The gRPC RewardService.

Requests arrive as bytes, and their items are sent as bytes to the worker processes, which decode them. A message that
is large when decoded costs this process only its encoded size, even if it is rejected.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from rollmesh.errors import DataError
from rollmesh.reward.scoring import Scoring
from rollmesh.runtime.grpc import MOST_DETAIL_CHARACTERS
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.wire.codec import outcome_to_pb
from rollmesh.wire.reward_messages import ScoreItemHead, score_item_head, score_items

SERVICE_NAME = "rollmesh.v1.RewardService"
MOST_ITEMS = 100_000
"""Maximum number of answers in the service at once; further requests are rejected."""
MOST_BYTES = 1 << 30
"""Maximum bytes of answers in the service at once."""


class RewardService:
    """RPCs that score answers; each outcome is streamed as soon as it is available."""

    def __init__(self, scoring: Scoring, most_items: int = MOST_ITEMS, most_bytes: int = MOST_BYTES) -> None:
        self._scoring = scoring
        self._most_items = most_items
        self._most_bytes = most_bytes
        self._item_count = 0
        self._byte_count = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with ``server``."""
        method: grpc.RpcMethodHandler[bytes, pb.ScoreResponse] = grpc.unary_stream_rpc_method_handler(
            self.score, response_serializer=pb.ScoreResponse.SerializeToString
        )
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, {"Score": method}),))

    async def score(
        self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScoreResponse]:
        """Score every item of an encoded ScoreRequest.

        Fails with INVALID_ARGUMENT for malformed bytes, RESOURCE_EXHAUSTED if the service is full. Cancelling the call
        stops the scoring of its items.
        """
        # Errors set a status and return: an exception would keep this frame and the request in a reference cycle.
        free_items, byte_count = self._most_items - self._item_count, len(request)
        if self._byte_count + byte_count > self._most_bytes:
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(f"bytes: {self._byte_count} of {self._most_bytes} are in progress; retry later")
            return
        try:
            items = score_items(request, MOST_ITEMS)
            heads = [score_item_head(item) for item in items] if len(items) <= free_items else []
        except DataError as error:
            context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
            context.set_details(f"items: {error}"[:MOST_DETAIL_CHARACTERS])
            return
        if len(items) > free_items:
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(f"items: {self._item_count} of {self._most_items} are in progress; retry later")
            return
        self._item_count += len(items)
        self._byte_count += byte_count
        tasks = [
            asyncio.create_task(self._one(index, head, item))
            for index, (head, item) in enumerate(zip(heads, items, strict=True))
        ]
        try:
            for scored in asyncio.as_completed(tasks):
                yield await scored
        finally:
            await cancel_and_wait(*tasks)
            self._item_count -= len(items)
            self._byte_count -= byte_count

    async def _one(self, index: int, head: ScoreItemHead, item: bytes) -> pb.ScoreResponse:
        span = tracer().span(
            "score", head.traceparent, kind="server", trajectory=head.trajectory_id, verifier=head.verifier
        )
        with span:
            outcome = await self._scoring.score(head.verifier, item)
            span.set(outcome=outcome.kind.value, reward=outcome.value)
        return pb.ScoreResponse(item_index=index, outcome=outcome_to_pb(outcome))
