"""Emulated generators of the scale bench: the real service, registration and contract over an engine without a model.

They always run this build, even if the other processes run another one, so that two builds have the same load.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import NoReturn

from benchmarks.scale_processes import Answers
from rollmesh.config import RunConfig
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import Backlog, check_call, hold_seconds
from rollmesh.generator.engines.engine_protocol import EngineStatus
from rollmesh.generator.generation_service import GenerationService, empty_chunk_interval
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import Registration, ServingState
from rollmesh.recipes.countdown.tokenizer import VOCABULARY_SIZE
from rollmesh.runtime.grpc import HealthReporter, create_server
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.store import TrajectoryStore
from rollmesh.types import Chunk, FinishReason, GenerationCall, GeneratorRecord
from rollmesh.v1 import generation_service_pb2_grpc as stubs

_HOST = "127.0.0.1"
_POLICY_SECONDS = 0.5
_BEATS_AT_ONCE = 20


@dataclass(slots=True, eq=False)
class _Call:
    backlog: Backlog
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    interrupted: bool = False

    async def wait_until(self, deadline: float) -> None:
        """Wait until a loop time, or until the call is interrupted or acknowledged."""
        self.changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                await self.changed.wait()


class EmulatedEngine:
    """Engine that streams known answers at a steady rate per call; as in the torch engine, chunks arrive complete.

    A new policy version takes effect at once, as with ``on_new_version: keep_kv``.
    """

    def __init__(self, config: RunConfig, answers: Answers, tokens_per_second: float) -> None:
        self.policy_version = -1
        self._slots = config.generator.slots
        self._context = config.generator.max_context_tokens
        self._answers = answers
        self._rate = tokens_per_second
        self._calls: dict[str, _Call] = {}
        self._generated = self._prefilled = self._held_back = 0

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        """Stream the rest of the trajectory's answer."""
        budget = check_call(call, vocab_size=VOCABULARY_SIZE, longest=self._context)
        if len(self._calls) >= self._slots:
            raise GenerationRefused(f"all {self._slots} slots are in use")
        done = len(call.context_ids) - call.prompt_token_count
        length = self._answers.length(call.trajectory_id)
        end = min(length, done + budget)
        running = self._calls[call.trajectory_id] = _Call(Backlog.of(call))
        self._prefilled += len(call.context_ids)
        oldest, sampled_at, finish = self.policy_version, asyncio.get_running_loop().time(), None
        rate = self._rate * self._answers.pace(call.trajectory_id)
        try:
            while finish is None:
                sampled_at = await self._until_acknowledged(running, sampled_at)
                count = await self._sample(running, min(call.chunk_token_count, end - done), sampled_at, rate)
                sampled_at += count / rate
                ids, logprobs = self._answers.tokens(call.trajectory_id, done, count)
                done += count
                running.backlog.add(count)
                self._generated += count
                if done == end:
                    finish = FinishReason.STOP if end == length else FinishReason.LENGTH
                elif running.interrupted:
                    finish = FinishReason.INTERRUPTED
                yield Chunk(
                    token_ids=ids,
                    behavior_logprobs=logprobs,
                    policy_version=self.policy_version,
                    kv_min_version=oldest,
                    finish_reason=finish,
                )
        finally:
            self._calls.pop(call.trajectory_id, None)

    async def _sample(self, running: _Call, count: int, since: float, rate: float) -> int:
        """Wait until ``count`` tokens are sampled; return their number, which is smaller after an interrupt."""
        now, due = asyncio.get_running_loop().time, since + count / rate
        while now() < due and not running.interrupted:
            await running.wait_until(due)
        return min(count, max(0, int((now() - since) * rate))) if running.interrupted else count

    async def _until_acknowledged(self, running: _Call, sampled_at: float) -> float:
        """Wait for a slow caller and interrupt the call after a time limit; return the time at which sampling began."""
        if not running.backlog.blocked:
            return sampled_at
        self._held_back += 1
        now = asyncio.get_running_loop().time
        deadline = now() + hold_seconds(contended=False)
        while running.backlog.blocked and not running.interrupted:
            await running.wait_until(deadline)
            running.interrupted = running.interrupted or now() >= deadline
        return now()

    async def interrupt(self, trajectory_ids: Sequence[str] | None = None) -> int:
        names = self._calls.keys() if trajectory_ids is None else self._calls.keys() & set(trajectory_ids)
        for running in [self._calls[name] for name in names]:
            running.interrupted = True
            running.changed.set()
        return len(names)

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        for name, count in context_token_counts.items():
            if (running := self._calls.get(name)) is not None:
                running.backlog.acknowledge(count)
                running.changed.set()

    def status(self) -> EngineStatus:
        return EngineStatus(
            policy_version=self.policy_version,
            running_count=len(self._calls),
            slot_count=self._slots,
            kv_tokens_used=sum(call.backlog.sampled for call in self._calls.values()),
            kv_token_capacity=self._slots * self._context,
            generated_token_total=self._generated,
            prefill_token_total=self._prefilled,
            decode_step_total=None,
            held_back_total=self._held_back,
        )

    async def respond(self) -> None:
        """Return at once: a task of this loop samples the tokens."""

    async def _reject(self, *_arguments: object, **_options: object) -> NoReturn:
        raise EngineError("the scale bench emulates token streams only")

    start = stage = load = score = pause = resume = _reject

    async def aclose(self) -> None:
        await self.interrupt()


async def _no_policy(version: int) -> int:
    raise EngineError(f"policy version {version}: the scale bench emulates token streams only")


async def serve_generators(
    config: RunConfig,
    answers: Answers,
    shutdown: Shutdown,
    *,
    generators: int,
    registered: int,
    tokens_per_second: float,
) -> None:
    """Serve emulated generators, each with its own port and record, until ``shutdown``.

    ``registered`` further generators have a record that changes with every heartbeat, and no calls.
    ``tokens_per_second`` is the mean rate of a call (see ``Answers.pace``).
    """
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        served: list[tuple[EmulatedEngine, ServingState]] = []
        registrations = []
        for _ in range(generators):
            engine = EmulatedEngine(config, answers, tokens_per_second)
            metrics, server = GeneratorMetrics(Metrics("generator")), create_server()
            serving_state = ServingState(address=f"{_HOST}:{OPEN.bind(server, f'{_HOST}:0')}")
            interval = empty_chunk_interval(config.rollout.chunk_timeout_seconds)
            service = GenerationService(engine, serving_state, metrics, _no_policy, interval)
            stubs.add_GenerationServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
            reporter = HealthReporter(server, "rollmesh.v1.GenerationService")
            await server.start()
            stack.push_async_callback(server.stop, 0.5)
            registrations.append(
                Registration(store.generators, engine, serving_state, metrics, Health(), reporter, config.store)
            )
            served.append((engine, serving_state))
        loops = [
            shutdown.wait(),
            _follow_policies(store, served),
            _renew_records(store, registered, config),
            *(registration.run() for registration in registrations),
        ]
        tasks = [asyncio.ensure_future(loop) for loop in loops]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        raise_first_error(await cancel_and_wait(*tasks))


async def _follow_policies(store: TrajectoryStore, served: Sequence[tuple[EmulatedEngine, ServingState]]) -> NoReturn:
    while True:
        newest = await store.policies.latest()
        for engine, serving_state in served:
            if newest is not None and newest.policy_version > engine.policy_version:
                engine.policy_version = newest.policy_version
                serving_state.put_in_service()
        await asyncio.sleep(_POLICY_SECONDS)


async def _renew_records(store: TrajectoryStore, count: int, config: RunConfig) -> NoReturn:
    """Renew ``count`` records, spread over the heartbeat; their version is too old for any call."""
    record = GeneratorRecord(
        instance_id="",
        address=f"{_HOST}:1",
        policy_version=-1,
        running_count=0,
        waiting_count=0,
        slot_count=config.generator.slots,
        kv_token_capacity=config.generator.slots * config.generator.max_context_tokens,
        serving=True,
    )
    names = [secrets.token_hex(16) for _ in range(count)]
    now, heartbeat = asyncio.get_running_loop().time, config.store.heartbeat_seconds
    for beat in itertools.count(1):
        started = now()
        for at in range(0, count, _BEATS_AT_ONCE):
            renewed = (
                replace(record, instance_id=name, running_count=beat % 2) for name in names[at : at + _BEATS_AT_ONCE]
            )
            await asyncio.gather(*(store.generators.register(r, config.store.session_ttl_seconds) for r in renewed))
            await asyncio.sleep(max(0.0, started + heartbeat * (at + _BEATS_AT_ONCE) / count - now()))
        if not count:
            await asyncio.sleep(heartbeat)
    raise AssertionError("endless")
