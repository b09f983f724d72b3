"""The gRPC GenerationService over an engine: admission, error codes, chunk streams and their spans.

A caller takes a generator that sends nothing for ``rollout.chunk_timeout_seconds`` for hung. A call may have nothing to
send for longer: it waits for a slot, it is held during a load, or its next chunk is long. Then an empty chunk follows
every few seconds, as long as the engine responds. A caller also takes an older version than that of its newest token,
or than it asked for, for a fault; an engine may serve an older one by the time that a call ends without a token.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any, NoReturn

import grpc
import grpc.aio

from rollmesh.errors import CheckpointError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import empty_chunk
from rollmesh.generator.engines.engine_protocol import Engine, EngineStatus
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.grpc import MOST_DETAIL_CHARACTERS
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.types import Chunk, GenerationCall, VersionNeed
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.codec import same_fields
from rollmesh.wire.generation_client import ERROR_KEY, ERRORS, check_ids, check_version, chunk_to_pb, request_from_pb

Context = grpc.aio.ServicerContext[Any, Any]

_WAITING_PER_SLOT = 1.0
"""Calls that may wait for a slot, per slot; further calls are rejected because another generator may be free."""


class PreconditionFailed(GenerationRefused):
    """Rejection of a call that names another instance or requires another policy version."""


class Full(GenerationRefused):
    """Rejection of a call because too many calls are waiting."""


_FAILURES: tuple[tuple[type[Exception], grpc.StatusCode, str], ...] = (
    (PreconditionFailed, grpc.StatusCode.FAILED_PRECONDITION, "refused"),
    (Full, grpc.StatusCode.RESOURCE_EXHAUSTED, "refused"),
    (GenerationRefused, grpc.StatusCode.UNAVAILABLE, "refused"),
    (DataError, grpc.StatusCode.INVALID_ARGUMENT, "invalid"),
    (EngineError, grpc.StatusCode.INTERNAL, "failed"),
)
"""Status code of each error, and the end of its call in the metrics; the first matching row applies."""


class GenerationService(stubs.GenerationServiceServicer):
    """RPCs of ``generation_service.proto`` over one engine; ``load_policy(version)`` loads one version immediately.

    A call without a token for ``empty_chunk_seconds`` sends an empty chunk if the engine responds.
    """

    def __init__(
        self,
        engine: Engine,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        load_policy: Callable[[int], Awaitable[int]],
        empty_chunk_seconds: float,
    ) -> None:
        self._engine = engine
        self._serving_state = serving_state
        self._metrics = metrics
        self._load_policy = load_policy
        self._empty_chunk_seconds = empty_chunk_seconds
        self._log = get_logger("generation")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self._metrics.calls.inc()
        ended = "cancelled"
        trace = CallTrace(request, context) if tracer().on else None
        try:
            call, need = request_from_pb(request)
            self._check_instance(request.instance_id)
            with self._serving_state.admitted():
                version = self._check_load(need)
                stream = with_empty_chunks(self._engine, call, version, self._empty_chunk_seconds)
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        # docs/architecture.md: The staleness bound
                        if len(chunk.token_ids) and not need.allows(chunk.policy_version):
                            version = chunk.policy_version
                            raise PreconditionFailed(
                                f"policy version {version} was put in service while the call waited"
                            )
                        if trace is not None:
                            trace.chunk(chunk)
                        if chunk.finish_reason is not None:
                            ended = chunk.finish_reason.value
                        yield chunk_to_pb(chunk)
        except (GenerationRefused, DataError, EngineError) as error:
            ended = next(ended for kind, _, ended in _FAILURES if isinstance(error, kind))
            if isinstance(error, EngineError):
                self._log.error("call_failed", trajectory=request.trajectory_id, message=str(error))
            await _abort(context, error)
        finally:
            self._metrics.call_ended(ended)
            if trace is not None:
                trace.end(ended)

    async def Interrupt(self, request: pb.InterruptRequest, context: Context) -> pb.InterruptResponse:
        async with _aborting(context):
            check_ids(request.trajectory_ids, "trajectory_ids")
            count = await self._engine.interrupt(list(request.trajectory_ids) or None)
        return pb.InterruptResponse(interrupted_count=count)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: Context) -> pb.AcknowledgeResponse:
        counts = {each.trajectory_id: each.context_token_count for each in request.acknowledgements}
        async with _aborting(context):
            check_ids(list(counts), "acknowledgements")
            self._check_instance(request.instance_id)
        self._engine.acknowledge(counts)
        return pb.AcknowledgeResponse()

    async def LoadPolicy(self, request: pb.LoadPolicyRequest, context: Context) -> pb.LoadPolicyResponse:
        async with _aborting(context):
            check_version(request.policy_version)
            version = await self._load_policy(request.policy_version)
        return pb.LoadPolicyResponse(policy_version=version)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        async with _aborting(context):
            await self._engine.pause()
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        async with _aborting(context):
            await self._engine.resume()
        return pb.ResumeResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        self._serving_state.drain()
        async with _aborting(context):
            count = await self._engine.interrupt() if self._serving_state.started else 0
        return pb.DrainResponse(interrupted_count=count)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        try:
            status, failure = self._engine.status(), ""
        except EngineError as error:
            status, failure = EngineStatus(), str(error)
        return pb.GetStatusResponse(
            instance_id=self._serving_state.instance_id,
            draining=self._serving_state.draining,
            out_of_rotation_reason=self._serving_state.reason or failure,
            **same_fields(status, ("policy_version", "running_count", "waiting_count", "slot_count", "paused")),
        )

    def _check_instance(self, instance_id: str) -> None:
        if instance_id != self._serving_state.instance_id:
            raise PreconditionFailed(
                f"instance_id={instance_id}: this address now belongs to instance {self._serving_state.instance_id}; "
                "look the generator up again"
            )

    def _check_load(self, need: VersionNeed) -> int:
        """Return the version in service; GenerationRefused unless the call accepts it and the engine has room."""
        status = self._engine.status()
        # docs/architecture.md: The staleness bound
        if status.policy_version < need.min_version:
            raise PreconditionFailed(
                f"min_policy_version={need.min_version}: this generator serves {status.policy_version}"
            )
        if not need.allows(status.policy_version):
            raise PreconditionFailed(
                f"pinned policy version {need.pinned_version}: this generator serves {status.policy_version}"
            )
        if status.waiting_count >= _WAITING_PER_SLOT * status.slot_count:
            raise Full(f"{status.waiting_count} calls wait for {status.slot_count} slots")
        return status.policy_version


@asynccontextmanager
async def _aborting(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except (GenerationRefused, DataError, EngineError) as error:
        await _abort(context, error)
    except CheckpointError as error:
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MOST_DETAIL_CHARACTERS])


async def _abort(context: Context, error: Exception) -> NoReturn:
    code = next(code for kind, code, _ in _FAILURES if isinstance(error, kind))
    kind = next(name for name, kind in ERRORS.items() if isinstance(error, kind))
    await context.abort(code, str(error)[:MOST_DETAIL_CHARACTERS], trailing_metadata=((ERROR_KEY, kind),))
    raise asyncio.CancelledError  # unreachable, for the type checker: abort raises


class CallTrace:
    """Span of one call. Its events are ``prefilled`` at the first token and ``segment`` at each change of version."""

    def __init__(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._span = tracer().span(
            "generate",
            str(metadata.get("traceparent", "")),
            kind="server",
            trajectory=request.trajectory_id,
            context_tokens=len(request.context_ids.data) // 4,
        )
        self._tokens = 0
        self._policy_versions: list[int] = []
        self._segment: dict[str, int] = {}

    def chunk(self, chunk: Chunk) -> None:
        if not len(chunk.token_ids):
            return
        if not self._tokens:
            self._span.event("prefilled", cached_tokens=chunk.cached_token_count)
        versions = {"policy_version": chunk.policy_version, "kv_min_version": chunk.kv_min_version}
        if versions != self._segment:
            self._span.event("segment", **versions, first_token=self._tokens)
            if self._policy_versions[-1:] != [chunk.policy_version]:
                self._policy_versions.append(chunk.policy_version)
            self._segment = versions
        self._tokens += len(chunk.token_ids)

    def end(self, ended: str) -> None:
        self._span.set(tokens=self._tokens, policy_versions=self._policy_versions, ended=ended)
        if ended in ("failed", "invalid"):
            self._span.fail(ended)
        self._span.end()


def empty_chunk_interval(chunk_timeout_seconds: float) -> float:
    """Return the seconds without a chunk after which an empty one is due."""
    return min(5.0, chunk_timeout_seconds / 4)


async def with_empty_chunks(
    engine: Engine, call: GenerationCall, policy_version: int, interval_seconds: float
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a call, and an empty one after ``interval_seconds`` without one if the engine responds.

    Every chunk without a token, the engine's last one included, has the versions of the newest token, and before the
    first one ``policy_version``, the one in service when the call was accepted: they pass the caller's checks.
    """
    kv_min_version = policy_version
    async with aclosing(engine.generate(call)) as chunks:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            try:
                while not (await asyncio.wait([coming], timeout=interval_seconds))[0]:
                    if await _responds(engine, coming):
                        yield replace(empty_chunk(policy_version), kv_min_version=kv_min_version)
            finally:
                await cancel_and_wait(coming)  # done or not: if this call is closed, nobody else reads its error
            chunk = coming.result()
            if chunk is None:
                return
            if len(chunk.token_ids):
                policy_version, kv_min_version = chunk.policy_version, chunk.kv_min_version
            else:
                chunk = replace(chunk, policy_version=policy_version, kv_min_version=kv_min_version)
            yield chunk


async def _responds(engine: Engine, coming: asyncio.Future[Chunk | None]) -> bool:
    """Wait until the engine responds or the next chunk arrives; return True in the first case."""
    response = asyncio.ensure_future(engine.respond())
    either: list[asyncio.Future[Any]] = [coming, response]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        (failure,) = await cancel_and_wait(response)
    return failure is None and not coming.done()  # the call itself gets the error of an engine that has failed
