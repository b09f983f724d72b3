"""Generation calls of one trajectory: as many as it takes, on whichever generators can continue it.

A call ends because the answer is complete, its budget is used up, the generator was interrupted, or something went
wrong. Whatever it was, tokens that arrived and passed the checks are kept, saved, and the next call goes on from there.

A generator samples on while its chunks are saved. So that a killed worker loses at most ``partial_save_tokens`` of each
rollout, every save is acknowledged to the generator, which holds a call before it gets further ahead (``SaveLimits``);
and no call begins before everything that came before it is saved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.types import Chunk, FinishReason, GenerationCall, SamplingParams, Segment
from rollmesh.worker.acknowledgements import Acknowledger
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.chunk_checks import Expected, GarbageAnswer, check_chunk
from rollmesh.worker.client_protocols import GenerationPort
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot
from rollmesh.worker.newest_policy import NewestPolicy
from rollmesh.worker.trajectory_metrics import TrajectoryMetrics

GARBAGE_AVOID_SECONDS = 5.0
"""How long a generator that answered nonsense, hung or broke is left alone at first."""

MOST_FAILED_CALLS = 16
"""Calls in a row that broke without a token, on whichever generator, before the attempt counts as failed."""

SaveTokens = Callable[[ActiveTrajectory], Awaitable[None]]

_LEAST_CHUNK_TOKENS = 16
"""Chunks below this size cost more than they bring: messages and saves of a few tokens each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLimits:
    """How far the calls of a trajectory that is saved as it grows may be ahead of its saved tokens."""

    chunk_token_count: int
    unacknowledged_token_limit: int
    """Most tokens that a generator may have sampled beyond the acknowledged ones; 0 is no limit."""

    @classmethod
    def of(cls, partial_save_tokens: int) -> Self:
        """Return the limits under which at most ``partial_save_tokens`` of a trajectory are unsaved.

        Two chunks: the second one is sampled while the first is saved, and the call continues beyond it only once the
        first is acknowledged. Smaller chunks would leave saves more time, and cost more of them.
        """
        chunk = min(partial_save_tokens, max(_LEAST_CHUNK_TOKENS, partial_save_tokens // 2))
        return cls(chunk_token_count=chunk, unacknowledged_token_limit=partial_save_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """What every call of a run shares."""

    vocab_size: int
    max_context_tokens: int
    saving: SaveLimits
    chunk_timeout_seconds: float
    """A generator that sends no chunk for so long has hung."""


class Caller:
    """Samples tokens for trajectories; used by programs and by evaluation."""

    def __init__(
        self,
        client: GenerationPort,
        generators: GeneratorPool,
        policies: NewestPolicy,
        limits: CallLimits,
        metrics: TrajectoryMetrics,
    ) -> None:
        self._client = client
        self._acknowledger = Acknowledger(client)
        self._generators = generators
        self._policies = policies
        self._limits = limits
        self._metrics = metrics
        self._log = get_logger("calls")

    async def sample(
        self,
        held: ActiveTrajectory,
        budget: int,
        params: SamplingParams,
        *,
        save: SaveTokens | None,
        durable: bool = True,
        pinned_version: int | None = None,
    ) -> FinishReason:
        """Append up to ``budget`` tokens to the trajectory; returns STOP or LENGTH.

        ``save`` is called before every call and after every chunk but a call's last; None when the queue learns nothing
        before the end. Without ``durable`` it does not make the tokens durable: then no call is held back. Raises
        Parked or LetGo (``held.check``), DataError when the generator refuses the request itself as wrong, and
        EngineError when call after call breaks without a token.
        """
        goal = held.token_count + budget
        durable = durable and save is not None
        while held.token_count < goal:
            if save is not None:
                await save(held)
            with await self._generators.acquire(held, pinned_version) as seat:
                reason = await self._call(seat, goal, params, save, durable)
            if held.failed_calls >= MOST_FAILED_CALLS:
                raise EngineError(f"{held.failed_calls} generation calls in a row broke without a token")
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                return reason
        return FinishReason.LENGTH

    async def _call(
        self, seat: GeneratorSlot, goal: int, params: SamplingParams, save: SaveTokens | None, durable: bool
    ) -> FinishReason | None:
        """One call; None when it was given up."""
        held, before = seat.held, seat.held.token_count
        try:
            with tracer().span(
                "generate", held.traceparent, kind="client", generator=seat.record.instance_id, kept_tokens=before
            ) as span:
                traceparent = span.traceparent or held.traceparent
                reason = await self._stream(seat, goal, params, save, durable, traceparent)
                span.set(tokens=held.token_count - before, ended=reason.value if reason is not None else "")
            held.failed_calls = 0
            return reason
        except GenerationRefused as error:
            # Not a fault: it drains, reloads or is full. A moment later the registry knows.
            self._generators.avoid(seat.record.instance_id)
            self._metrics.call_ended("refused")
            self._log.debug("call_refused", generator=seat.record.instance_id, message=str(error))
        except GarbageAnswer as error:
            self._misbehaved(seat, error.reason, str(error))
        except EngineError as error:
            self._misbehaved(seat, "broken", str(error))
        except TimeoutError:
            if seat.aborted:
                self._metrics.call_ended("cut_off")
            else:
                self._misbehaved(seat, "hung", f"no chunk for {self._limits.chunk_timeout_seconds:g} s")
        if held.token_count > before:
            held.failed_calls = 0
        else:
            self._metrics.fruitless_call()
        return None

    def _misbehaved(self, seat: GeneratorSlot, reason: str, message: str) -> None:
        seat.held.failed_calls += 1
        seconds = self._generators.avoid(seat.record.instance_id, GARBAGE_AVOID_SECONDS)
        self._metrics.call_ended(reason)
        self._log.warning(
            "generator_misbehaved",
            generator=seat.record.instance_id,
            address=seat.record.address,
            trajectory=seat.held.trajectory_id,
            reason=reason,
            message=message,
            avoided_seconds=round(seconds, 1),
        )

    async def _stream(
        self,
        seat: GeneratorSlot,
        goal: int,
        params: SamplingParams,
        save: SaveTokens | None,
        durable: bool,
        traceparent: str,
    ) -> FinishReason | None:
        held = seat.held
        call = GenerationCall(
            trajectory_id=held.trajectory_id,
            context_ids=held.context_ids(),
            prompt_token_count=held.prompt_token_count,
            max_new_token_count=goal - held.token_count,
            sampling=params,
            chunk_token_count=self._limits.saving.chunk_token_count,
            group_id=held.trajectory.group_id,
            unacknowledged_token_limit=self._limits.saving.unacknowledged_token_limit if durable else 0,
        )
        chunks = self._client.generate(
            seat.record,
            call,
            min_policy_version=seat.need.min_version,
            pinned_policy_version=seat.need.pinned_version,
            traceparent=traceparent,
        )
        try:
            while True:
                async with asyncio.timeout(self._limits.chunk_timeout_seconds) as deadline:
                    seat.waiting_until(deadline)
                    chunk = await anext(chunks, None)
                seat.waiting_until(None)
                if chunk is None:
                    raise GarbageAnswer("no_finish_reason", "the stream ended without a finish reason")
                await self._keep(seat, chunk, goal, params)
                self._generators.answered_well(seat.record.instance_id)
                if held.enough:
                    self._metrics.call_ended("enough")
                    return FinishReason.STOP
                if chunk.finish_reason is not None:
                    self._metrics.call_ended(chunk.finish_reason.value)
                    return chunk.finish_reason
                if save is not None:
                    await save(held)
                if durable:
                    saved = held.prompt_token_count + held.saved_token_count
                    self._acknowledger.saved(seat.record, held.trajectory_id, saved)
                held.check_lost()
        finally:
            await chunks.aclose()

    async def _keep(self, seat: GeneratorSlot, chunk: Chunk, goal: int, params: SamplingParams) -> None:
        held, need = seat.held, seat.need
        if need.pinned_version is not None and chunk.policy_version > need.pinned_version:
            raise GenerationRefused(f"swapped to policy version {chunk.policy_version} under the call")
        expected = Expected(
            vocab_size=self._limits.vocab_size,
            min_version=max(need.min_version, held.newest_version),
            newest_version=await self._policies.newest_at_least(chunk.policy_version),
            pinned_version=need.pinned_version,
            stop_token_ids=params.stop_token_ids,
            max_context_tokens=self._limits.max_context_tokens,
        )
        context = held.prompt_token_count + held.token_count
        check_chunk(chunk, expected, remaining=goal - held.token_count, context_tokens=context)
        held.add(
            Segment(
                token_ids=chunk.token_ids,
                behavior_logprobs=chunk.behavior_logprobs,
                policy_version=chunk.policy_version,
                kv_min_version=chunk.kv_min_version,
                temperature=params.temperature,
            )
        )
        if need.pinned_version is None:
            self._metrics.sampled(len(chunk.token_ids), expected.newest_version - chunk.policy_version)
        else:
            self._metrics.evaluation_tokens.inc(len(chunk.token_ids))
