"""An engine behind its gRPC service, and workers that call it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.generation_service import GenerationService, empty_chunk_interval
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import FinishReason, GeneratorRecord, PolicyRecord, Prompt, SamplingParams, Trajectory
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.generation_calls import Caller, CallLimits, SaveLimits
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.known_policies import NewestPolicy

from ...kit.records import generator_record

T = TypeVar("T")


class CallHung(AssertionError):
    """A call got nothing for its timeout: the engine is at fault, or the machine stalled."""


async def despite_stalls(attempt: Callable[[float], Awaitable[None]]) -> None:
    """Run ``attempt`` with a timeout of 2 seconds for a chunk or slice, and if a call ends as hung, with 8 and then 32.

    Client, server and timers share one event loop: a machine that stops it for the timeout ends a call as hung.
    """
    for timeout in (2.0, 8.0):
        try:
            return await attempt(timeout)
        except CallHung:
            pass
    return await attempt(32.0)


@dataclass
class Registry:
    """One generator of policy version 0."""

    record: GeneratorRecord

    async def live(self) -> list[GeneratorRecord]:
        return [self.record]

    async def latest(self) -> PolicyRecord:
        return PolicyRecord(policy_version=0, train_step=0, path="p", manifest_digest="")


@dataclass
class Worker:
    """A worker's caller; ``ended`` counts its calls by the reason of their end."""

    caller: Caller
    metrics: Metrics = field(repr=False)

    def ended(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("rollmesh_rollout_calls_ended_total", {"reason": reason}) or 0.0

    async def sample(
        self, name: str, budget: int, prompt_token_count: int = 3
    ) -> tuple[ActiveTrajectory, FinishReason]:
        """Sample a trajectory of its own, of ``budget`` tokens."""
        prompt = Prompt(prompt_id=name, token_ids=np.ones(prompt_token_count, np.int32), verifier="exact")
        active = ActiveTrajectory(Trajectory(trajectory_id=name, group_id=name, member_index=0, prompt=prompt))
        return active, await self.caller.sample(active, budget, SamplingParams(seed=7), save=None)


@dataclass
class Served:
    """An engine behind its port, and the client of its workers."""

    client: GenerationClient
    record: GeneratorRecord
    limits: CallLimits
    workers: list[Worker] = field(default_factory=list)

    async def unless_hung(self, exchange: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``exchange``; raises CallHung as soon as a call of a worker has ended as hung."""
        task = asyncio.create_task(exchange)
        try:
            while not (await asyncio.wait([task], timeout=0.05))[0] and not self._hung():
                pass
            if self._hung():
                raise CallHung
            return task.result()
        finally:
            await cancel_and_wait(task)

    def _hung(self) -> bool:
        return any(worker.ended("hung") for worker in self.workers)

    async def worker(self) -> Worker:
        registry, metrics = Registry(self.record), Metrics("rollout")
        generators, policies = GeneratorPool(registry), NewestPolicy(registry)  # type: ignore[arg-type]
        await generators.refresh()
        caller = Caller(self.client, generators, policies, self.limits, RolloutMetrics(metrics))
        self.workers.append(Worker(caller, metrics))
        return self.workers[-1]


async def _no_load(version: int) -> int:
    raise AssertionError("no test loads a version through the service")


@asynccontextmanager
async def served(
    engine: Engine, *, vocab_size: int, max_context_tokens: int, chunk_token_count: int, chunk_timeout_seconds: float
) -> AsyncIterator[Served]:
    """Serve a started engine."""
    server, state = create_server(), ServingState()
    state.address = f"127.0.0.1:{OPEN.bind(server, '127.0.0.1:0')}"
    state.put_in_service()
    metrics = GeneratorMetrics(Metrics("generator"))
    service = GenerationService(engine, state, metrics, _no_load, empty_chunk_interval(chunk_timeout_seconds))
    stubs.add_GenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    await server.start()
    record = generator_record(state.instance_id, address=state.address, slot_count=engine.status().slot_count)
    limits = CallLimits(
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        saving=SaveLimits(chunk_token_count=chunk_token_count, unacknowledged_token_limit=0),
        chunk_timeout_seconds=chunk_timeout_seconds,
    )
    try:
        async with GenerationClient() as client:
            yield Served(client, record, limits)
    finally:
        await server.stop(0.5)
