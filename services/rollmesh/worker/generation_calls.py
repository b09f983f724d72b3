"""Generation calls that continue one trajectory, on any generator able to serve it.

A call ends when the answer is complete, its budget is used up, the generator is interrupted, or an error occurs. In
every case the tokens that arrived and passed the checks are kept and saved, and the next call continues from them.

A generator keeps sampling while its chunks are saved. To limit the loss of a killed worker to ``partial_save_tokens``
per trajectory, the worker acknowledges every save, and the generator holds a call that gets further ahead
(``SaveLimits``). No call begins before all earlier tokens are saved.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from rollmesh.errors import EngineError, GenerationRefused, RollmeshError
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import Chunk, FinishReason, GenerationCall, GeneratorRecord, SamplingParams, Segment
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.worker.active_trajectory import ActiveTrajectory, Parked
from rollmesh.worker.chunk_checks import Expected, GarbageAnswer, check_chunk
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot
from rollmesh.worker.known_policies import NewestPolicy
from rollmesh.worker.worker_metrics import TrajectoryMetrics

_LIMIT_SECONDS = 5.0
GARBAGE_AVOID_SECONDS = 5.0
"""Seconds to avoid a generator after its first invalid chunk, hang or failure."""
MOST_FAILED_CALLS = 16
"""Calls in a row that may fail without a token, on any generator, before the attempt fails."""
SaveTokens = Callable[[ActiveTrajectory], Awaitable[None]]
_LEAST_CHUNK_TOKENS = 16
"""Smallest useful chunk: below it, messages and saves cost too much per token."""
_WAIT = "generation"


class Acknowledger:
    """Background sender of acknowledgements: one call at a time per generator, later ones wait and are sent together.

    A lost acknowledgement is not an error. The generator holds the call for a while and ends it as interrupted; the
    next call continues from the tokens in the queue.
    """

    def __init__(self, client: GenerationClient) -> None:
        self._client = client
        self._waiting: dict[str, dict[str, int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._log = get_logger("acknowledging")

    def saved(self, record: GeneratorRecord, trajectory_id: str, context_token_count: int) -> None:
        """Acknowledge the durable length of a trajectory, prompt included, to the generator that continues it."""
        name = record.instance_id
        self._waiting.setdefault(name, {})[trajectory_id] = context_token_count
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._send(record), name="acknowledge")

    async def _send(self, record: GeneratorRecord) -> None:
        name = record.instance_id
        try:
            while batch := self._waiting.pop(name, None):
                try:
                    async with asyncio.timeout(_LIMIT_SECONDS):
                        await self._client.acknowledge(record, batch)
                except (RollmeshError, TimeoutError) as error:
                    self._log.debug("acknowledgement_failed", generator=name, message=str(error))
        finally:
            del self._tasks[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLimits:
    """Limits on the unsaved tokens of a trajectory that is saved while it grows."""

    chunk_token_count: int
    unacknowledged_token_limit: int
    """Most tokens that a generator may have sampled beyond the acknowledged ones; 0 is no limit."""

    @classmethod
    def of(cls, partial_save_tokens: int) -> Self:
        """Return the limits under which at most ``partial_save_tokens`` of a trajectory are unsaved.

        The limit covers two chunks. The second is sampled while the first is saved, and the call continues beyond it
        only once the first is acknowledged. Smaller chunks would leave more time for a save, but need more saves.
        """
        chunk = min(partial_save_tokens, max(_LEAST_CHUNK_TOKENS, partial_save_tokens // 2))
        return cls(chunk_token_count=chunk, unacknowledged_token_limit=partial_save_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """Limits shared by all calls of a run."""

    vocab_size: int
    max_context_tokens: int
    saving: SaveLimits
    chunk_timeout_seconds: float
    """Longest wait for a chunk, an empty one included; a generator that takes longer has hung."""
    segment_tokens: int = 0
    """Tokens of one policy version after which a trajectory rests; 0 for no rest."""


class Caller:
    """Client that samples tokens for trajectories, for programs and evaluations."""

    def __init__(
        self,
        client: GenerationClient,
        generators: GeneratorPool,
        policies: NewestPolicy,
        limits: CallLimits,
        metrics: TrajectoryMetrics,
        waits: Waits | None = None,
    ) -> None:
        """Create a caller; ``waits`` shows the error of a generator until another call has a token."""
        self._client = client
        self._acknowledger = Acknowledger(client)
        self._generators = generators
        self._policies = policies
        self._limits = limits
        self._metrics = metrics
        self._waits = waits or Waits()
        self._log = get_logger("calls")

    async def sample(
        self,
        active: ActiveTrajectory,
        budget: int,
        params: SamplingParams,
        *,
        save: SaveTokens | None,
        durable: bool = True,
        pinned_version: int | None = None,
        unserved_seconds: float | None = None,
    ) -> FinishReason:
        """Append up to ``budget`` tokens to the trajectory; returns STOP or LENGTH.

        ``save`` is called before every call and after every chunk except a call's last; None saves nothing before the
        end. With ``durable`` False, ``save`` does not make tokens durable, generators hold no call back, and the
        trajectory does not rest. Raises Parked when it rests, Parked or LetGo (``active.check``) when it must stop,
        DataError if the generator rejects the request as invalid, EngineError after too many calls in a row without a
        token, and NoGenerator if ``unserved_seconds`` pass without a generator that may serve the next call.
        """
        goal = active.token_count + budget
        durable = durable and save is not None
        with active.generation():
            while active.token_count < goal:
                if save is not None:
                    await save(active)
                slot = await self._generators.acquire(active, pinned_version, unserved_seconds=unserved_seconds)
                with slot:
                    end = self._end_of_call(slot, goal) if durable else goal
                    reason = await self._call(slot, end, params, save, durable)
                if active.failed_calls >= MOST_FAILED_CALLS:
                    raise EngineError(f"{active.failed_calls} generation calls in a row failed without a token")
                if reason is FinishReason.LENGTH and active.token_count == end < goal:
                    await self._rest(active)
                elif reason in (FinishReason.STOP, FinishReason.LENGTH):
                    return reason
        return FinishReason.LENGTH

    def _end_of_call(self, slot: GeneratorSlot, goal: int) -> int:
        """Return the number of tokens of the trajectory at the end of its segment, at most ``goal``.

        The segment is full there if the generator loads no other version during the call.
        """
        segment, active = self._limits.segment_tokens, slot.active
        if not segment:
            return goal
        return min(goal, active.token_count + segment - active.count_under(slot.record.policy_version) % segment)

    async def _rest(self, active: ActiveTrajectory) -> None:
        """Raise Parked at the end of a segment, unless the policy has moved on: then the trajectory continues at once.

        Where the policy moves on before the queue has the rest, the next lease ends it.
        """
        version = active.newest_version
        if active.count_under(version) % self._limits.segment_tokens:
            return  # A version that was loaded during the call has begun another segment.
        if await self._policies.newest_at_least(version + 1) <= version:
            raise Parked(ReleaseReason.RESTED)

    async def _call(
        self, slot: GeneratorSlot, goal: int, params: SamplingParams, save: SaveTokens | None, durable: bool
    ) -> FinishReason | None:
        """Make one call; returns None if it failed."""
        active, before = slot.active, slot.active.token_count
        try:
            with tracer().span(
                "generate", active.traceparent, kind="client", generator=slot.record.instance_id, kept_tokens=before
            ) as span:
                traceparent = span.traceparent or active.traceparent
                reason = await self._stream(slot, goal, params, save, durable, traceparent)
                span.set(tokens=active.token_count - before, ended=reason.value if reason is not None else "")
            active.failed_calls = 0
            return reason
        except GenerationRefused as error:
            # Not a fault: the generator drains, loads a policy or is full. Its record shows that a moment later.
            self._generators.avoid(slot.record.instance_id)
            self._metrics.calls_ended.labels(reason="refused").inc()
            self._log.debug("call_refused", generator=slot.record.instance_id, message=str(error))
        except GarbageAnswer as error:
            self._misbehaved(slot, error.reason, str(error))
        except EngineError as error:
            self._misbehaved(slot, "broken", str(error))
        except TimeoutError:
            if slot.aborted:
                self._metrics.calls_ended.labels(reason="cut_off").inc()
            else:
                self._misbehaved(slot, "hung", f"no chunk for {self._limits.chunk_timeout_seconds:g} s")
        if active.token_count > before:
            active.failed_calls = 0
        else:
            self._metrics.fruitless_calls.inc()
        return None

    def _misbehaved(self, slot: GeneratorSlot, reason: str, message: str) -> None:
        slot.active.failed_calls += 1
        where = "" if slot.record.address in message else f"{slot.record.address}: "
        self._waits.begin(_WAIT, f"generation: {where}{message}")
        seconds = self._generators.avoid(slot.record.instance_id, GARBAGE_AVOID_SECONDS)
        self._metrics.calls_ended.labels(reason=reason).inc()
        self._log.warning(
            "generator_misbehaved",
            generator=slot.record.instance_id,
            address=slot.record.address,
            trajectory=slot.active.trajectory_id,
            reason=reason,
            message=message,
            avoided_seconds=round(seconds, 1),
        )

    async def _stream(
        self,
        slot: GeneratorSlot,
        goal: int,
        params: SamplingParams,
        save: SaveTokens | None,
        durable: bool,
        traceparent: str,
    ) -> FinishReason | None:
        active = slot.active
        call = GenerationCall(
            trajectory_id=active.trajectory_id,
            context_ids=active.context_ids(),
            prompt_token_count=active.prompt_token_count,
            max_new_token_count=goal - active.token_count,
            sampling=params,
            chunk_token_count=self._limits.saving.chunk_token_count,
            group_id=active.trajectory.group_id,
            unacknowledged_token_limit=self._limits.saving.unacknowledged_token_limit if durable else 0,
        )
        chunks = self._client.generate(slot.record, call, slot.need, traceparent=traceparent)
        try:
            while True:
                async with asyncio.timeout(self._limits.chunk_timeout_seconds) as deadline:
                    slot.set_deadline(deadline)
                    chunk = await anext(chunks, None)
                slot.set_deadline(None)
                if chunk is None:
                    raise GarbageAnswer("no_finish_reason", "the stream ended without a finish reason")
                await self._keep(slot, chunk, goal, params)
                if len(chunk.token_ids) or chunk.finish_reason is not None:
                    self._generators.clear_avoidance(slot.record.instance_id)
                    self._waits.end(_WAIT)
                if active.stop_requested:
                    self._metrics.calls_ended.labels(reason="enough").inc()
                    return FinishReason.STOP
                if chunk.finish_reason is not None:
                    self._metrics.calls_ended.labels(reason=chunk.finish_reason.value).inc()
                    return chunk.finish_reason
                if save is not None:
                    await save(active)
                if durable:
                    saved = active.prompt_token_count + active.saved_token_count
                    self._acknowledger.saved(slot.record, active.trajectory_id, saved)
                active.check_lost()
        finally:
            await chunks.aclose()

    async def _keep(self, slot: GeneratorSlot, chunk: Chunk, goal: int, params: SamplingParams) -> None:
        active, need = slot.active, slot.need
        if need.pinned_version is not None and chunk.policy_version > need.pinned_version:
            raise GenerationRefused(f"switched to policy version {chunk.policy_version} during the call")
        expected = Expected(
            vocab_size=self._limits.vocab_size,
            min_version=max(need.min_version, active.newest_version),
            newest_version=await self._policies.newest_at_least(chunk.policy_version),
            pinned_version=need.pinned_version,
            stop_token_ids=params.stop_token_ids,
            max_context_tokens=self._limits.max_context_tokens,
            kept_tokens=params.kept_tokens,
        )
        context = active.prompt_token_count + active.token_count
        check_chunk(chunk, expected, remaining=goal - active.token_count, context_tokens=context)
        active.cached_token_count = max(active.cached_token_count, chunk.cached_token_count)
        active.add(
            Segment(
                token_ids=chunk.token_ids,
                behavior_logprobs=chunk.behavior_logprobs,
                policy_version=chunk.policy_version,
                kv_min_version=chunk.kv_min_version,
                temperature=params.temperature,
                kept_sets=chunk.kept_sets,
            )
        )
        slot.grow(len(chunk.token_ids))
        if need.pinned_version is None:
            self._metrics.sampled(len(chunk.token_ids), expected.newest_version - chunk.policy_version)
        else:
            self._metrics.evaluation_tokens.inc(len(chunk.token_ids))
