"""The gRPC TeacherService: scores sequences with the process's engine, each streamed as soon as it is there."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import grpc.aio
import numpy as np
from prometheus_client import Counter, Gauge

from rollmesh.errors import DataError, EngineError
from rollmesh.runtime.grpc import MOST_DETAIL_CHARACTERS
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.teacher.teacher_engine import ScoreRequest, TeacherEngine, TokenScores, check_request, check_scores
from rollmesh.teacher.teacher_model import TeacherModel
from rollmesh.types import LOWEST_TEMPERATURE, TeacherColumn
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import ids_from_pb, teacher_to_pb


class TeacherMetrics:
    """Counters of one process of a teacher."""

    def __init__(self, metrics: Metrics, teacher: str) -> None:
        labels = {"teacher": (teacher,)}

        def counter(name: str, text: str) -> Counter:
            return metrics.counter(name, text, labels).labels(teacher)

        def gauge(name: str, text: str) -> Gauge:
            return metrics.gauge(name, text, labels).labels(teacher)

        self._count, self._changed = 0, time.monotonic()
        self._running = gauge(
            "rollmesh_teacher_running_sequences", "Sequences received and not scored yet, waiting ones included."
        )
        self._busy = counter("rollmesh_teacher_busy_seconds_total", "Seconds with a sequence in the service.")
        self._received = counter("rollmesh_teacher_sequences_total", "Sequences received.")
        self._tokens = counter("rollmesh_teacher_scored_tokens_total", "Response tokens scored.")
        self._context_tokens = counter(
            "rollmesh_teacher_context_tokens_total", "Tokens of prompt and response of the scored sequences."
        )
        self._seconds = metrics.histogram(
            "rollmesh_teacher_score_seconds", "Time from receipt of a sequence to its scores.", labels=labels
        ).labels(teacher)
        self.errors = counter("rollmesh_teacher_errors_total", "Sequences without scores.")
        self._last = gauge(
            "rollmesh_teacher_last_score_timestamp_seconds", "Unix time of the newest scores; 0 before the first."
        )

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Count a sequence that is in the service during the block."""
        self._received.inc()
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def note_busy(self) -> None:
        """Count the busy seconds so far, which a long sequence would else show at its end only."""
        self._add(0)

    def _add(self, number: int) -> None:
        now = time.monotonic()
        if self._count:
            self._busy.inc(now - self._changed)
        self._count, self._changed = self._count + number, now
        self._running.set(self._count)

    def scored(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._context_tokens.inc(context_tokens)
        self._seconds.observe(seconds)
        self._last.set(time.time())


SERVICE_NAME = "rollmesh.v1.TeacherService"
MOST_ITEMS = 100_000
"""Maximum number of sequences in the service at once; further requests are rejected."""
MOST_BYTES = 1 << 30
"""Maximum bytes of requests in the service at once."""
_MOST_LOGGED_REASONS = 20


class TeacherService(stubs.TeacherServiceServicer):
    """RPCs that score sequences and describe the teacher."""

    def __init__(
        self,
        teacher: TeacherModel,
        manifest_digest: str,
        engine: TeacherEngine,
        metrics: TeacherMetrics,
        most_items: int = MOST_ITEMS,
    ) -> None:
        self._teacher = teacher
        self._digest = manifest_digest
        self._engine = engine
        self._metrics = metrics
        self._most_items = most_items
        self._item_count = 0
        self._byte_count = 0
        self._logged: set[str] = set()

    async def DescribeTeacher(
        self, request: pb.DescribeTeacherRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.DescribeTeacherResponse:
        """Describe the teacher."""
        teacher = self._teacher
        return pb.DescribeTeacherResponse(
            teacher=teacher.name,
            manifest_digest=self._digest,
            vocabulary_digest=teacher.vocabulary_digest,
            context_token_count=teacher.context_token_count,
        )

    async def ScoreTokens(
        self, request: pb.ScoreTokensRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.ScoreTokensResponse]:
        """Score every sequence of a request.

        Fails with INVALID_ARGUMENT for settings that no sequence can be scored with, RESOURCE_EXHAUSTED if the service
        is full, UNAVAILABLE if the engine has failed. Cancelling the call drops its sequences that wait.
        """
        if problem := self._problem(request):
            _set(context, grpc.StatusCode.INVALID_ARGUMENT, problem)
            return
        item_count, byte_count = len(request.items), request.ByteSize()
        for name, used, asked, most in (
            ("items", self._item_count, item_count, self._most_items),
            ("bytes", self._byte_count, byte_count, MOST_BYTES),
        ):
            if used + asked > most:
                _set(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{name}: {used} of {most} are in progress; retry later",
                )
                return
        self._item_count += item_count
        self._byte_count += byte_count
        tasks = [asyncio.create_task(self._one(i, item, request)) for i, item in enumerate(request.items)]
        try:
            for scored in asyncio.as_completed(tasks):
                yield await scored
        except EngineError as error:
            _set(context, grpc.StatusCode.UNAVAILABLE, str(error))
        finally:
            await cancel_and_wait(*tasks)
            self._item_count -= item_count
            self._byte_count -= byte_count

    def _problem(self, request: pb.ScoreTokensRequest) -> str:
        """Return what is wrong with the settings of a request; empty if nothing is."""
        temperature, only, teacher = request.temperature, self._teacher.only_temperature, self._teacher
        if not (math.isfinite(temperature) and temperature >= LOWEST_TEMPERATURE):
            return f"temperature={temperature}: expected at least {LOWEST_TEMPERATURE}"
        if only is not None and temperature != only:
            return (
                f"temperature={temperature}: the engine of teachers.{teacher.name} scores at temperature {only:g} only"
            )
        most = min(teacher.vocab_size, teacher.policy_vocab_size)
        if not 0 <= request.top_k <= most:
            return f"top_k={request.top_k}: expected 0 to {most}, the tokens of the vocabulary"
        return ""

    async def _one(self, index: int, item: pb.TokenScoreItem, request: pb.ScoreTokensRequest) -> pb.ScoreTokensResponse:
        teacher, start = self._teacher, time.monotonic()
        span = tracer().span(
            "teach", item.traceparent, kind="server", trajectory=item.trajectory_id, teacher=teacher.name
        )
        with self._metrics.sequence(), span:
            try:
                ids = ids_from_pb(item.token_ids)
                wanted = ScoreRequest(
                    token_ids=ids,
                    prompt_token_count=item.prompt_token_count,
                    temperature=request.temperature,
                    top_k=request.top_k,
                )
                scores = await self._score(wanted)
            except DataError as error:
                self._note(item.trajectory_id, str(error))
                span.set(outcome="none")
                return pb.ScoreTokensResponse(item_index=index, message=str(error))
            self._metrics.scored(len(scores.logprobs), len(ids), time.monotonic() - start)
            span.set(outcome="scored", tokens=len(scores.logprobs))
        column = TeacherColumn(
            teacher=teacher.name,
            manifest_digest=self._digest,
            logprobs=scores.logprobs,
            top_ids=scores.top_ids if wanted.top_k else None,
            top_logprobs=scores.top_logprobs if wanted.top_k else None,
        )
        return pb.ScoreTokensResponse(item_index=index, column=teacher_to_pb(column))

    async def _score(self, wanted: ScoreRequest) -> TokenScores:
        teacher = self._teacher
        check_request(wanted, vocab_size=teacher.vocab_size, context_tokens=teacher.context_token_count)
        if wanted.prompt_token_count == len(wanted.token_ids):
            none = np.empty((0, wanted.top_k), np.float32)
            return TokenScores(logprobs=np.empty(0, np.float32), top_ids=none.astype(np.int32), top_logprobs=none)
        scores = await self._engine.score(wanted)
        check_scores(scores, wanted, teacher.policy_vocab_size)
        return scores

    def _note(self, trajectory_id: str, reason: str) -> None:
        """Count a sequence without scores, and log the first few distinct reasons."""
        self._metrics.errors.inc()
        if reason not in self._logged and len(self._logged) < _MOST_LOGGED_REASONS:
            self._logged.add(reason)
            get_logger("teacher").warning("sequence_without_scores", trajectory=trajectory_id[:200], message=reason)


def _set(context: grpc.aio.ServicerContext[Any, Any], code: grpc.StatusCode, details: str) -> None:
    # A status instead of an exception, which would keep the request in a reference cycle.
    context.set_code(code)
    context.set_details(details[:MOST_DETAIL_CHARACTERS])
