"""Calls on their way through the server: wait for a turn, send a slice, take its answer, end early."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine, Iterable
from collections.abc import Sequence as Many
from typing import Any

from rollmesh.errors import EngineError
from rollmesh.generator.engines.backlog import hold_seconds
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.engines.sglang.engine_state import EngineState
from rollmesh.generator.engines.sglang.server import SglangServer
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.engines.sglang.slices import Slice, check_finite, chunks_of, read_slice, slice_body, without
from rollmesh.generator.engines.sglang.slot_queue import ServerCall
from rollmesh.types import Chunk, FinishReason

_ABORT_AGAIN_SECONDS = 0.25
"""An abort that overtakes its request is lost, so it is sent again."""
_MOST_ABORTS = 40
_LOOK_SECONDS = 0.002


class Calls:
    """Runs the seats of one engine."""

    def __init__(self, options: SglangOptions, state: EngineState, server: SglangServer) -> None:
        self._options = options
        self._state = state
        self._server = server
        self._last_answer = server.clock.seconds()
        self._errands: set[asyncio.Task[None]] = set()

    async def turn(self, seat: ServerCall) -> bool:
        """Wait until the call may send a request; False when it has to end as interrupted."""
        state = self._state
        state.held_back += seat.backlog.blocked
        since = time.monotonic()
        while True:
            if seat.interrupted:
                return False
            state.serving()
            held = state.paused or state.loading or (state.draining and not seat.begun)
            if not (held or seat.backlog.blocked) and (seat.running or state.seats.take(seat)):
                return True
            left = self._hold_seconds_left(seat, since)
            if left is not None and left <= 0:
                return False
            seat.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await seat.changed.wait()

    def _hold_seconds_left(self, seat: ServerCall, since: float) -> float | None:
        """Return how long the call may still wait for its caller to save; None where it waits for something else."""
        state = self._state
        if state.paused or not seat.backlog.blocked:
            return None
        return since + hold_seconds(contended=state.draining or state.seats.waiting_count > 0) - time.monotonic()

    async def next_chunks(self, seat: ServerCall) -> list[Chunk]:
        """One slice of a call: send, wait, drop what must not be delivered, account for the rest."""
        state = self._state
        first = not seat.cache_key
        if first:
            # For the whole call: that cache is of its own version, or was dropped, or kv_min_version tells.
            seat.cache_key = state.cache_key
            seat.kv_min = {self._server.policy_version: self._server.policy_version}
        piece = await self._request(seat, min(seat.call.chunk_token_count, seat.budget))
        self._count(seat, piece, first)
        await self._approval(seat)
        piece, fell = without(piece, seat.refused | self._server.doubtful_versions, seat.floor)
        check_finite(piece)  # weights that are dropped may have been anything
        seat.slicing = False
        seat.refused.clear()
        seat.context.extend(piece.token_ids.tolist())
        seat.backlog.add(len(piece))
        seat.budget -= len(piece)
        if piece.spans:
            seat.floor = piece.spans[-1].policy_version
        elif state.failure is not None:
            raise state.failure
        return chunks_of(
            piece,
            seat.kv_min_version,
            _finish_reason(seat, piece, fell),
            cached_token_count=piece.cached_token_count if first else 0,
            idle_version=state.in_service,
        )

    def mark_interrupted(self, seats: Iterable[ServerCall]) -> int:
        """Let these calls end with what they have; returns how many had not been told yet."""
        count = 0
        for seat in seats:
            count += not seat.interrupted
            seat.interrupted = True
            seat.changed.set()
        return count

    async def end_requests(self, seats: Many[ServerCall]) -> None:
        """Abort the requests of these calls and wait until they have been answered, with what they have sampled.

        The caller holds the server lock.
        """
        under_way = [s for s in seats if s.request_id]
        if not under_way:
            return
        held = self._server.paused
        if held:  # a paused server may lose what it has sampled
            await self._server.resume()
        try:
            for _ in range(_MOST_ABORTS):
                await asyncio.gather(*(self._server.api.abort(s.request_id) for s in under_way if s.request_id))
                if await self._answered(under_way, _ABORT_AGAIN_SECONDS):
                    return
        finally:
            if held and self._state.failure is None:
                await self._server.pause(self._options.pause_mode)

    def forget(self, seat: ServerCall) -> None:
        """The caller has gone: abort what the server still does for it."""
        left_behind, seat.request_id = seat.request_id, ""  # nobody waits for its answer any more
        if left_behind and not self._state.closed and self._state.failure is None:
            task = asyncio.ensure_future(self._quietly(self._server.api.abort(left_behind)))
            self._errands.add(task)
            task.add_done_callback(self._errands.discard)

    async def aclose(self) -> None:
        """Drop what runs in the background."""
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)

    async def _request(self, seat: ServerCall, asked: int) -> Slice:
        """Send one slice and wait for its answer."""
        seat.request_id = uuid.uuid4().hex  # of fixed length: the server aborts by prefix
        seat.slicing, seat.met_load = True, False
        version = self._server.policy_version
        sampling, vocab_size = seat.call.sampling, self._state.serving().vocab_size
        body = slice_body(seat.context, asked, sampling, request_id=seat.request_id, cache_key=seat.cache_key)
        answer = await self._answer(seat, body)
        seat.request_id = ""
        sole = None if seat.met_load else version
        piece = read_slice(answer, sampling, vocab_size=vocab_size, budget=asked, sole_version=sole)
        if not len(piece) and not piece.aborted:  # the next one would be the same, and so on for ever
            raise EngineError(
                f"the SGLang server sampled none of {asked} tokens after a context of {len(seat.context)}"
            )
        for span in piece.spans:
            if span.policy_version not in self._server.known_versions:
                self._state.lose(self._server.not_ours(str(span.policy_version)))
                raise self._state.failure or EngineError("the engine has stopped")
        return piece

    async def _answer(self, seat: ServerCall, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a slice within its deadline; time in a paused server does not count."""
        limit, state, clock = self._options.request_timeout_seconds, self._state, self._server.clock
        deadline = clock.seconds() + limit
        seat.request = request = asyncio.ensure_future(self._server.api.generate(body))
        try:
            while not request.done():
                left = deadline - clock.seconds()
                if left <= 0:
                    raise self._late(limit)
                await asyncio.wait([request], timeout=left)
            if request.cancelled():
                raise state.failure or EngineError("the request was given up")
            answer = request.result()
            self._last_answer = clock.seconds()
            return answer
        except EngineLost:
            raise
        except EngineError as error:
            raise state.failure or await self._server.explained(error) from error
        finally:
            seat.request = None
            request.cancel()

    def _late(self, limit: float) -> EngineError:
        message = f"no answer to a slice within generator.sglang.request_timeout_seconds={limit:g}"
        if self._server.clock.seconds() - self._last_answer >= limit:
            self._state.lose(EngineLost(f"the SGLang server gave {message}, nor to any other request"))
        return self._state.failure or EngineError(f"the SGLang server gave {message}")

    async def _approval(self, seat: ServerCall) -> None:
        """Hold a slice back while weights are on trial."""
        state = self._state
        while (state.on_trial is not None or state.loading) and not seat.interrupted and state.failure is None:
            seat.changed.clear()
            await seat.changed.wait()
        if state.on_trial is not None:
            seat.refused.add(state.on_trial)

    def _count(self, seat: ServerCall, piece: Slice, first: bool) -> None:
        state = self._state
        state.generated_tokens += len(piece)
        # The last token of a context is the input of the first decode step, not prefill.
        wanted = piece.prompt_token_count - 1
        state.prefill_tokens += max(0, wanted - piece.cached_token_count)
        state.reprefill_tokens += max(0, wanted - max(piece.cached_token_count, seat.call.prompt_token_count))
        for span in piece.spans[1:]:
            if seat.kv_min_version(span.policy_version) == span.policy_version:
                # A load that dropped the cache: everything before this token was computed again by the new weights.
                state.prefill_tokens += wanted + span.start
                state.reprefill_tokens += max(0, wanted + span.start - seat.call.prompt_token_count)
        if first:  # later slices find their own tokens in the cache, which is no news
            state.cached_tokens += piece.cached_token_count

    async def _answered(self, seats: Many[ServerCall], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(s.request_id for s in seats) and self._state.failure is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_LOOK_SECONDS)
        return True

    async def _quietly(self, work: Coroutine[Any, Any, None]) -> None:
        with contextlib.suppress(EngineError):
            await work


def _finish_reason(seat: ServerCall, piece: Slice, fell: bool) -> FinishReason | None:
    if piece.stopped:
        return FinishReason.STOP
    if seat.budget == 0:
        return FinishReason.LENGTH
    # An abort that nobody here asked for: whoever did it wants the call to end.
    if seat.interrupted or fell or (piece.aborted and not piece.cut):
        return FinishReason.INTERRUPTED
    return None
