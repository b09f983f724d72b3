"""The gRPC GenerationService over an engine: admission, error codes and chunk streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio

from rollmesh.errors import CheckpointError, DataError, EngineError, GenerationRefused
from rollmesh.generator.call_spans import CallTrace
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.grpc import MOST_DETAIL_CHARACTERS
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.types import Chunk, VersionNeed
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_messages import (
    ERROR_KEY,
    check_ids,
    check_version,
    chunk_to_pb,
    request_from_pb,
    status_of,
)

Context = grpc.aio.ServicerContext[Any, Any]

_WAITING_PER_SLOT = 1.0
"""Calls that may wait for a slot, per slot; further calls are rejected because another generator may be free."""


class PreconditionFailed(GenerationRefused):
    """Rejection of a call that names another instance or requires another policy version."""


class Full(GenerationRefused):
    """Rejection of a call because too many calls are waiting."""


class GenerationService(stubs.GenerationServiceServicer):
    """RPCs of one engine; ``load_policy(version)`` loads one version immediately."""

    def __init__(
        self,
        engine: Engine,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        load_policy: Callable[[int], Awaitable[int]],
    ) -> None:
        self._engine = engine
        self._serving_state = serving_state
        self._metrics = metrics
        self._load_policy = load_policy
        self._log = get_logger("generation")

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the chunks of one call; cancelling the call releases its slot."""
        self._metrics.calls.inc()
        ended = "cancelled"
        trace = CallTrace.of(request, context) if tracer().on else None
        try:
            call, need = request_from_pb(request)
            self._check_instance(request.instance_id)
            with self._serving_state.admitted():
                self._check_load(need)
                async with aclosing(self._engine.generate(call)) as chunks:
                    async for chunk in chunks:
                        _check_version(chunk, need)
                        if trace is not None:
                            trace.chunk(chunk)
                        if chunk.finish_reason is not None:
                            ended = chunk.finish_reason.value
                        yield chunk_to_pb(chunk)
        except GenerationRefused as error:
            ended = "refused"
            await _abort(context, error)
        except DataError as error:
            ended = "invalid"
            await _abort(context, error)
        except EngineError as error:
            ended = "failed"
            self._log.error("call_failed", trajectory=request.trajectory_id, message=str(error))
            await _abort(context, error)
        finally:
            self._metrics.call_ended(ended)
            if trace is not None:
                trace.end(ended)

    async def Interrupt(self, request: pb.InterruptRequest, context: Context) -> pb.InterruptResponse:
        """End running calls as interrupted, with the tokens sampled so far."""
        await _checked(context, lambda: check_ids(request.trajectory_ids, "trajectory_ids"))
        count = await self._run(context, self._engine.interrupt(list(request.trajectory_ids) or None))
        return pb.InterruptResponse(interrupted_count=count)

    async def Acknowledge(self, request: pb.AcknowledgeRequest, context: Context) -> pb.AcknowledgeResponse:
        """Record the tokens that callers have made durable; held calls continue."""
        counts = {each.trajectory_id: each.context_token_count for each in request.acknowledgements}
        await _checked(context, lambda: check_ids(list(counts), "acknowledgements"))
        await _checked(context, lambda: self._check_instance(request.instance_id))
        self._engine.acknowledge(counts)
        return pb.AcknowledgeResponse()

    async def LoadPolicy(self, request: pb.LoadPolicyRequest, context: Context) -> pb.LoadPolicyResponse:
        """Load one version immediately."""
        await _checked(context, lambda: check_version(request.policy_version))
        version = await self._run(context, self._load_policy(request.policy_version))
        return pb.LoadPolicyResponse(policy_version=version)

    async def Pause(self, request: pb.PauseRequest, context: Context) -> pb.PauseResponse:
        """Stop decoding."""
        await self._run(context, self._engine.pause())
        return pb.PauseResponse()

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> pb.ResumeResponse:
        """Continue decoding."""
        await self._run(context, self._engine.resume())
        return pb.ResumeResponse()

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Reject new calls, end the running ones as interrupted, and shut down the process."""
        self._serving_state.drain()
        count = await self._run(context, self._engine.interrupt()) if self._serving_state.started else 0
        return pb.DrainResponse(interrupted_count=count)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        """Return the policy version, load and capacity."""
        serving_state = self._serving_state
        response = pb.GetStatusResponse(
            instance_id=serving_state.instance_id,
            draining=serving_state.draining,
            out_of_rotation_reason=serving_state.reason,
            policy_version=-1,
        )
        try:
            status = self._engine.status()
        except EngineError as error:
            response.out_of_rotation_reason = serving_state.reason or str(error)
            return response
        response.policy_version = status.policy_version
        response.running_count = status.running_count
        response.waiting_count = status.waiting_count
        response.slot_count = status.slot_count
        response.paused = status.paused
        return response

    def _check_instance(self, instance_id: str) -> None:
        """Raise GenerationRefused if the call is for another generator, which had this address before."""
        if instance_id != self._serving_state.instance_id:
            raise PreconditionFailed(
                f"instance_id={instance_id}: this address now belongs to instance {self._serving_state.instance_id}; "
                "look the generator up again"
            )

    def _check_load(self, need: VersionNeed) -> None:
        """Raise GenerationRefused unless the engine serves the version and has room for the call."""
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

    async def _run(self, context: Context, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except (GenerationRefused, DataError, EngineError) as error:
            await _abort(context, error)
        except CheckpointError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error)[:MOST_DETAIL_CHARACTERS])


def _check_version(chunk: Chunk, need: VersionNeed) -> None:
    """Raise PreconditionFailed if the version changed while the call waited for a slot."""
    # docs/architecture.md: The staleness bound
    if len(chunk.token_ids) and not need.allows(chunk.policy_version):
        raise PreconditionFailed(f"policy version {chunk.policy_version} was put in service while the call waited")


async def _checked(context: Context, check: Callable[[], None]) -> None:
    """Abort the call with the error that ``check`` raises."""
    try:
        check()
    except (DataError, GenerationRefused) as error:
        await _abort(context, error)


async def _abort(context: Context, error: DataError | EngineError | GenerationRefused) -> NoReturn:
    code = status_of(error)
    if isinstance(error, PreconditionFailed):
        code = grpc.StatusCode.FAILED_PRECONDITION
    elif isinstance(error, Full):
        code = grpc.StatusCode.RESOURCE_EXHAUSTED
    kind = next(k.__name__ for k in (GenerationRefused, DataError, EngineError) if isinstance(error, k))
    await context.abort(code, str(error)[:MOST_DETAIL_CHARACTERS], trailing_metadata=((ERROR_KEY, kind),))
    raise asyncio.CancelledError  # unreachable, for the type checker: abort raises
