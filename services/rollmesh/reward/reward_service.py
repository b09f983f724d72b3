"""The gRPC RewardService, and the way of each answer: to a judge or the worker pool, with retries.

Requests arrive as bytes, and their items are sent as bytes to the worker processes, which decode them. A message that
is large when decoded costs this process only its encoded size, even if it is rejected.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from rollmesh.errors import ConfigError, DataError
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.scored_answer import InlineVerifier, Judge, timed_out, verifier_error
from rollmesh.reward.worker_pool import WorkerDied, WorkerPool, WorkerTimedOut
from rollmesh.runtime.grpc import MOST_DETAIL_CHARACTERS
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.wire.codec import outcome_to_pb
from rollmesh.wire.reward_messages import ScoreItemHead, outcome_from_bytes, score_item_head, score_items

SERVICE_NAME = "rollmesh.v1.RewardService"
MOST_ITEMS = 100_000
"""Maximum number of answers in the service at once; further requests are rejected."""
MOST_BYTES = 1 << 30
"""Maximum bytes of answers in the service at once."""
_RETRIES_AFTER_CRASH = 1
_RETRIES_AFTER_TEMPLATE_EXIT = 3
"""Retries of an answer whose worker exited with its template; the retry may use the same template and fail again."""
_UNKNOWN = "unknown"
_MAX_LOGGED_REASONS = 20
_MAX_LOGGED_CHARACTERS = 500
"""Maximum length of a verifier's name and of a message in a log line: the caller chooses both."""
UNSCORED_ANSWER_LIMIT = 256
"""Number of answers without a value since startup, with no scored answer, that ends the service."""


class RewardService:
    """RPCs that score answers; each outcome is streamed as soon as it is available."""

    def __init__(self, scoring: "Scoring", most_items: int = MOST_ITEMS) -> None:
        self._scoring = scoring
        self._most_items = most_items
        self._item_count = 0
        self._byte_count = 0

    def add_to(self, server: grpc.aio.Server) -> None:
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
        if self._byte_count + byte_count > MOST_BYTES:
            context.set_code(grpc.StatusCode.RESOURCE_EXHAUSTED)
            context.set_details(f"bytes: {self._byte_count} of {MOST_BYTES} are in progress; retry later")
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


class Scoring:
    """Scorer of any number of concurrent answers."""

    def __init__(
        self,
        pool: WorkerPool,
        judges: Mapping[str, Judge | InlineVerifier],
        metrics: RewardMetrics,
        *,
        default_verifier: str,
        timeout_seconds: float,
        on_unusable_verifier: Callable[[ConfigError], None],
    ) -> None:
        """``on_unusable_verifier`` is called if the first ``UNSCORED_ANSWER_LIMIT`` answers all have no value."""
        self._pool = pool
        self._judges = judges
        self._metrics = metrics
        self._default = default_verifier
        self._timeout_seconds = timeout_seconds
        self._on_unusable_verifier = on_unusable_verifier
        self._logged: set[str] = set()
        self._failures: int | None = 0
        """Number of answers without a value so far; None once an answer was scored."""

    async def score(self, verifier: str, payload: bytes) -> RewardOutcome:
        """Score one encoded item with ``verifier`` (empty: the run's verifier); never raises for an answer."""
        name = verifier or self._default
        start = time.monotonic()
        self._metrics.received.inc()
        self._metrics.running.inc()
        try:
            judge = self._judges.get(name)
            outcome = await (judge.score(payload) if judge is not None else self._in_pool(name, payload))
        finally:
            self._metrics.running.dec()
        known = name in self._judges or name in self._pool.timeout_means_wrong
        self._metrics.scored(name if known else _UNKNOWN, outcome, time.monotonic() - start)
        if outcome.kind is OutcomeKind.SCORED:
            self._failures = None
        else:
            self._note_failure(name, outcome)
        return outcome

    def _note_failure(self, name: str, outcome: RewardOutcome) -> None:
        """Log the first few distinct reasons for answers without a value; the metrics count all answers.

        Report a verifier that has never scored an answer, because the run would consume prompts without training.
        """
        message = outcome.message[:_MAX_LOGGED_CHARACTERS]
        if message not in self._logged and len(self._logged) < _MAX_LOGGED_REASONS:
            self._logged.add(message)
            shown = name[:_MAX_LOGGED_CHARACTERS]
            get_logger("reward").warning(
                "answer_without_value", verifier=shown, outcome=outcome.kind.value, message=message
            )
        if self._failures is None:
            return
        self._failures += 1
        if self._failures == UNSCORED_ANSWER_LIMIT:
            self._on_unusable_verifier(
                ConfigError(
                    f"reward.verifier: none of the first {UNSCORED_ANSWER_LIMIT} answers could be scored; the last: "
                    f"{outcome.message or name}"
                )
            )

    async def _in_pool(self, name: str, payload: bytes) -> RewardOutcome:
        crashes = lost_templates = 0
        while True:
            try:
                return outcome_from_bytes(await self._pool.run(payload, self._timeout_seconds))
            except WorkerTimedOut as error:
                return timed_out(f"{name}: {error}", self._pool.timeout_means_wrong.get(name, False))
            except WorkerDied as error:
                # The answer is retried once after any crash; a second crash is attributed to the answer. The exit of a
                # template ends all its workers, and a retry may use another of them before the pool detects the exit.
                if error.with_template and lost_templates < _RETRIES_AFTER_TEMPLATE_EXIT:
                    lost_templates += 1
                    continue
                crashes += 1
                if crashes > _RETRIES_AFTER_CRASH:
                    return verifier_error(f"{name}: the verifier's process ended twice; the last time: {error}")
            except DataError as error:
                return verifier_error(f"{name}: the verifier's process sent an invalid outcome: {error}")
