"""Execution of calls on the server: wait for a slot, send a slice, read its response, end early."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from rollmesh.errors import DataError, EngineError
from rollmesh.generator.engines.call_limits import hold_seconds
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.engines.sglang.engine_state import EngineState, ServerCall
from rollmesh.generator.engines.sglang.loaded_adapters import LoadedAdapters
from rollmesh.generator.engines.sglang.server import SglangServer
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.engines.sglang.slices import (
    Slice,
    check_finite,
    chunks_of,
    read_slice,
    slice_body,
    under_adapter,
    without,
)
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.types import Chunk, FinishReason

_ABORT_RETRY_SECONDS = 0.25
"""Time between two aborts of a request; an abort that arrives before its request is lost."""
_MAX_ABORTS = 40
_POLL_SECONDS = 0.002


class Calls:
    """Requests of the calls of one engine."""

    def __init__(
        self, options: SglangOptions, state: EngineState, server: SglangServer, adapters: LoadedAdapters | None = None
    ) -> None:
        self._options = options
        self._state = state
        self._server = server
        self._adapters = adapters
        self._last_answer = server.clock.seconds()
        self._background_tasks = BackgroundTasks()

    async def wait_until_ready(self, server_call: ServerCall) -> bool:
        """Wait until the call may send a request; return False if it must end as interrupted."""
        state = self._state
        state.queue.counters.held_back_total += server_call.backlog.blocked
        since = time.monotonic()
        while True:
            if server_call.interrupted:
                return False
            state.serving()
            held = state.paused or state.loading or (state.draining and not server_call.begun)
            if not (held or server_call.backlog.blocked) and (server_call.running or state.queue.take(server_call)):
                return True
            left: float | None = None
            # A call that waits for its caller to save has a limit, unless the server is paused.
            if server_call.backlog.blocked and not state.paused:
                contended = state.draining or bool(state.queue.waiting)
                left = since + hold_seconds(contended=contended) - time.monotonic()
                if left <= 0:
                    return False
            server_call.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await server_call.changed.wait()

    async def next_chunks(self, server_call: ServerCall) -> list[Chunk]:
        """Run one slice of a call; drop tokens that must not be delivered and count the rest."""
        state = self._state
        first = not server_call.cache_key
        if self._adapters is not None:
            self._choose_adapter(self._adapters, server_call)
        elif first:
            # One key for the whole call: its cache has the call's version, was dropped, or kv_min_version records it.
            server_call.cache_key = f"{state.cache_space}-{state.load_count}"
            server_call.kv_min = {self._server.policy_version: self._server.policy_version}
        requested = min(server_call.call.chunk_token_count, server_call.budget)
        if self._adapters is None:
            piece = await self._request(server_call, requested)
        else:
            with self._adapters.named(server_call.adapter_version) as adapter:
                piece = await self._request(server_call, requested, adapter)
            piece = under_adapter(piece, server_call.adapter_version)
        self._count(server_call, piece, first)
        while (state.on_trial is not None or state.loading) and not server_call.interrupted and state.failure is None:
            server_call.changed.clear()
            await server_call.changed.wait()
        if state.on_trial is not None:
            server_call.refused.add(state.on_trial)
        piece, fell = without(piece, server_call.refused | self._server.doubtful_versions, server_call.floor)
        check_finite(piece)  # after the drop: rejected weights may give any values
        server_call.slicing = False
        server_call.refused.clear()
        server_call.context.extend(piece.token_ids.tolist())
        server_call.backlog.add(len(piece))
        server_call.budget -= len(piece)
        if piece.spans:
            server_call.floor = piece.spans[-1].policy_version
        elif state.failure is not None:
            raise state.failure
        return chunks_of(
            piece,
            server_call.kv_min_version,
            _finish_reason(server_call, piece, fell),
            cached_token_count=piece.cached_token_count if first else 0,
            idle_version=state.in_service,
        )

    def _choose_adapter(self, adapters: LoadedAdapters, server_call: ServerCall) -> None:
        """Let the next slice name the version in service; after a return to an older one, that of the call's tokens."""
        version = self._state.in_service
        if server_call.floor > version and adapters.has(server_call.floor):
            version = server_call.floor
        server_call.adapter_version = version
        # The name of a load is unique, so no slice finds the cache of another version.
        server_call.cache_key = f"{self._state.cache_space}-{adapters.name(version) or 'base'}"
        server_call.kv_min = {version: version}

    def mark_interrupted(self, calls: Iterable[ServerCall]) -> int:
        """End these calls with their current tokens; returns the number that were not marked before."""
        count = 0
        for server_call in calls:
            count += not server_call.interrupted
            server_call.interrupted = True
            server_call.changed.set()
        return count

    async def end_requests(self, calls: Sequence[ServerCall]) -> None:
        """Abort the requests of these calls and wait for their responses with the tokens sampled so far.

        The caller holds the server lock.
        """
        in_progress = [s for s in calls if s.request_id]
        if not in_progress:
            return
        held = self._server.paused
        if held:  # a paused server may lose sampled tokens
            await self._server.resume()
        try:
            for _ in range(_MAX_ABORTS):
                await asyncio.gather(*(self._server.api.abort(s.request_id) for s in in_progress if s.request_id))
                if await self._answered(in_progress, _ABORT_RETRY_SECONDS):
                    return
        finally:
            if held and self._state.failure is None:
                await self._server.pause(self._options.pause_mode)

    def forget(self, server_call: ServerCall) -> None:
        """Abort the request of a call whose caller has disconnected."""
        request_id, server_call.request_id = server_call.request_id, ""  # no task waits for the response any more

        async def abort() -> None:
            with contextlib.suppress(EngineError):
                await self._server.api.abort(request_id)

        if request_id and not self._state.closed and self._state.failure is None:
            self._background_tasks.start(abort())

    async def aclose(self) -> None:
        await self._background_tasks.cancel()

    async def _request(self, server_call: ServerCall, requested: int, adapter: str | None = None) -> Slice:
        server_call.request_id = uuid.uuid4().hex  # of fixed length: the server aborts by prefix
        server_call.slicing, server_call.met_load = True, False
        server_call.pauses_before = self._server.retracting_pauses
        version = self._server.policy_version
        sampling, vocab_size = server_call.call.sampling, self._state.serving().vocab_size
        body = slice_body(
            server_call.context,
            requested,
            sampling,
            request_id=server_call.request_id,
            cache_key=server_call.cache_key,
            adapter=adapter,
        )
        try:
            answer = await self._answer(server_call, body)
        except DataError as error:
            if adapter is None or "LoRA" not in str(error):
                raise
            self._state.mark_lost(EngineLost(f"the SGLang server has lost {adapter}; was it restarted? {error}"))
            raise self._state.failure or EngineError("the engine has stopped") from error
        server_call.request_id = ""
        sole = None if server_call.met_load else version
        piece = read_slice(answer, sampling, vocab_size=vocab_size, budget=requested, sole_version=sole)
        if not len(piece) and not piece.aborted:  # the next slice would be the same: an endless loop
            raise EngineError(
                f"the SGLang server sampled none of {requested} tokens after a context of {len(server_call.context)}"
            )
        for span in piece.spans:
            if span.policy_version not in self._server.known_versions:
                self._state.mark_lost(self._server.unknown_version_error(str(span.policy_version)))
                raise self._state.failure or EngineError("the engine has stopped")
        return piece

    async def _answer(self, server_call: ServerCall, body: dict[str, Any]) -> dict[str, Any]:
        """Wait for the response to a slice until its deadline; time in a paused server does not count."""
        limit, state, clock = self._options.server.request_timeout_seconds, self._state, self._server.clock
        deadline = clock.seconds() + limit
        server_call.request = request = asyncio.ensure_future(self._server.api.generate(body))
        try:
            while not request.done():
                left = deadline - clock.seconds()
                if left <= 0:
                    message = f"no answer to a slice within generator.sglang.request_timeout_seconds={limit:g}"
                    if clock.seconds() - self._last_answer >= limit:
                        state.mark_lost(EngineLost(f"the SGLang server gave {message}, nor to any other request"))
                    raise state.failure or EngineError(f"the SGLang server gave {message}")
                await asyncio.wait([request], timeout=left)
            if request.cancelled():
                raise state.failure or EngineError("the request was cancelled")
            answer = request.result()
            self._last_answer = clock.seconds()
            return answer
        except EngineLost:
            raise
        except EngineError as error:
            raise state.failure or await self._server.explain(error) from error
        finally:
            server_call.request = None
            request.cancel()

    def _count(self, server_call: ServerCall, piece: Slice, first: bool) -> None:
        counters, prompt = self._state.queue.counters, server_call.call.prompt_token_count
        cached = piece.cached_token_count
        counters.generated_token_total += len(piece)
        self._state.queue.count_drafts(piece)
        pauses = self._server.retracting_pauses - server_call.pauses_before
        counters.preemption_total += max(0, piece.retraction_count - pauses)
        # The last token of a context is the input of the first decode step, not prefill.
        wanted = piece.prompt_token_count - 1
        counters.prefill_token_total += max(0, wanted - cached)
        counters.reprefill_token_total += max(0, wanted - max(cached, prompt))
        for span in piece.spans[1:]:
            if server_call.kv_min_version(span.policy_version) == span.policy_version:
                # The load dropped the cache: the new weights computed everything before this token again.
                counters.prefill_token_total += wanted + span.start
                counters.reprefill_token_total += max(0, wanted + span.start - prompt)
        if first:  # later slices find the call's tokens in the cache, which is not a saving
            counters.cached_token_total += cached

    async def _answered(self, calls: Sequence[ServerCall], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(s.request_id for s in calls) and self._state.failure is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
        return True


def _finish_reason(server_call: ServerCall, piece: Slice, fell: bool) -> FinishReason | None:
    if piece.stopped:
        return FinishReason.STOP
    if server_call.budget == 0:
        return FinishReason.LENGTH
    # An abort that this engine did not request also ends the call.
    if server_call.interrupted or fell or (piece.aborted and not piece.cut):
        return FinishReason.INTERRUPTED
    return None
