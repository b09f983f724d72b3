"""The asyncio face of the SGLang engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.errors import ConfigError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.protocol import EngineLost, EngineStatus, OnNewVersion
from rollmesh.generator.engines.sglang.folders import PolicyFolder, difference, read_folder
from rollmesh.generator.engines.sglang.options import SglangOptions
from rollmesh.generator.engines.sglang.reload import ReloadPlan, plan_reload
from rollmesh.generator.engines.sglang.seats import Seat, Seats
from rollmesh.generator.engines.sglang.server import SglangServer
from rollmesh.generator.engines.sglang.slices import (
    Slice,
    check_call,
    check_ids,
    chunks_of,
    empty_chunk,
    read_scores,
    read_slice,
    score_body,
    slice_body,
    without,
)
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array

_ABORT_AGAIN_SECONDS = 0.25
"""An abort that overtakes its request is lost, so it is sent again."""
_MOST_ABORTS = 40


@dataclass(slots=True)
class _Counters:
    generated_tokens: int = 0
    prefill_tokens: int = 0
    reprefill_tokens: int = 0
    cached_tokens: int = 0


class SglangEngine:
    """Calls in slices on one SGLang server; implements ``protocol.Engine``.

    Calls are queued here, at most ``slots`` of them have a request in the server. Weights that were loaded into the
    paused engine are on trial until ``resume``: what the server samples under them meanwhile is held back, and dropped
    if other weights take their place.
    """

    def __init__(self, options: SglangOptions) -> None:
        self._options = options
        self._seats = Seats(options.slots)
        self._server = SglangServer(options, self._lose)
        self._counters = _Counters()
        self._folder: PolicyFolder | None = None
        self._failure: EngineLost | None = None
        self._closed = False
        self._paused = False
        self._loading = False
        self._draining = False
        self._in_service = -1
        self._on_trial: int | None = None
        self._cache_space = secrets.token_hex(4)
        self._load_count = 0
        self._load_lock = asyncio.Lock()
        self._server_lock = asyncio.Lock()
        self._last_answer = 0.0
        self._errands: set[asyncio.Task[None]] = set()

    async def start(self, folder: Path, policy_version: int) -> None:
        """Start or find the server with the first policy; EngineLost when there is none in time."""
        if self._folder is not None:
            raise EngineError("the engine has been started already")
        policy = await asyncio.to_thread(read_folder, folder)
        if self._options.max_context_tokens > policy.max_positions:
            raise EngineError(
                f"generator.max_context_tokens={self._options.max_context_tokens} is more than the model's "
                f"max_position_embeddings={policy.max_positions}"
            )
        try:
            await self._server.start(folder, policy_version)
        except ConfigError:
            raise
        except EngineError as error:
            raise error if isinstance(error, EngineLost) else EngineLost(str(error)) from error
        self._folder = policy
        self._in_service = policy_version
        self._last_answer = time.monotonic()

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; closing the generator early frees its slot."""
        folder = self._serving()
        budget = check_call(call, vocab_size=folder.vocab_size, longest=self._options.max_context_tokens)
        seat = Seat(call=call, budget=budget, context=call.context_ids.tolist())
        self._seats.enter(seat)
        try:
            while True:
                if not await self._turn(seat):
                    yield empty_chunk(FinishReason.INTERRUPTED, self._in_service)
                    return
                for chunk in await self._next_chunks(seat):
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        finally:
            self._seats.leave(seat)
            if seat.request_id:
                self._run_errand(self._abort_once(seat.request_id))

    async def interrupt(self, trajectory_ids: Many[str] | None = None) -> int:
        """End these calls (None: all) as ``interrupted``; returns how many."""
        self._serving()
        wanted = None if trajectory_ids is None else set(trajectory_ids)
        chosen = [s for s in self._seats if wanted is None or s.call.trajectory_id in wanted]
        fresh = self._mark_interrupted(chosen)
        async with self._server_lock:
            await self._end_requests(chosen)
        return fresh

    async def stage(self, folder: Path) -> None:
        """Find out whether the weights fit; EngineError when they do not. The server reads them in ``load``."""
        self._serving()
        await asyncio.to_thread(self._read_fitting, folder)

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; returns the seconds during which decoding stood still.

        EngineError when it cannot be served and the old weights go on; EngineLost when the server's state is unknown.
        """
        self._serving()
        async with self._load_lock:
            await asyncio.to_thread(self._read_fitting, folder)
            try:
                if mode is OnNewVersion.DRAIN:
                    await self._drain()
                async with self._server_lock:
                    return await self._swap(folder, policy_version, mode)
            finally:
                self._draining = False
                self._seats.wake_all()

    async def score(self, sequences: Many[Int32Array]) -> list[Float32Array]:
        """Log-probabilities (T=1) of each token given its predecessors, [tokens - 1] per sequence."""
        folder = self._serving()
        longest = self._options.max_context_tokens
        for number, ids in enumerate(sequences):
            if not 1 <= len(ids) <= longest:
                raise DataError(f"sequences[{number}]: {len(ids)} tokens, expected 1 to {longest}")
            check_ids(ids, folder.vocab_size, f"sequences[{number}]")
        async with self._server_lock:
            held = self._server.paused
            if held:  # a paused server answers nothing
                await self._server.resume()
            try:
                return list(await asyncio.gather(*(self._score(ids) for ids in sequences)))
            finally:
                if held and self._failure is None:
                    await self._server.pause(self._options.pause_mode)

    async def _score(self, ids: Int32Array) -> Float32Array:
        if len(ids) < 2:
            return np.empty(0, np.float32)
        answer = await self._server.api.generate(score_body(ids.tolist(), request_id=uuid.uuid4().hex))
        return read_scores(answer, len(ids))

    async def pause(self) -> None:
        """Stop decoding; running calls are held."""
        self._serving()
        async with self._server_lock:
            self._paused = True
            if not self._server.paused:
                await self._server.pause(self._options.pause_mode)
            self._seats.stand_still(True)

    async def resume(self) -> None:
        """Continue decoding; weights that were on trial are in service."""
        self._serving()
        async with self._server_lock:
            self._paused = False
            if self._server.paused:
                await self._server.resume()
            self._in_service, self._on_trial = self._server.policy_version, None
            self._seats.stand_still(False)
            self._seats.wake_all()

    def status(self) -> EngineStatus:
        """Load and counters as this side of the server sees them; EngineError when the server is lost."""
        if self._folder is None:
            raise EngineError("the engine has not been started")
        if self._failure is not None:
            raise self._failure
        seats, counters = self._seats, self._counters
        seats.account()
        return EngineStatus(
            policy_version=self._server.policy_version,
            running_count=seats.running_count,
            waiting_count=seats.waiting_count,
            slot_count=self._options.slots,
            kv_tokens_used=seats.context_tokens,
            kv_token_capacity=self._server.kv_token_capacity,
            generated_token_total=counters.generated_tokens,
            prefill_token_total=counters.prefill_tokens,
            reprefill_token_total=counters.reprefill_tokens,
            cached_token_total=counters.cached_tokens,
            decode_step_total=0,  # the server does not tell
            busy_seconds_total=seats.busy_seconds,
            running_slot_seconds_total=seats.running_seconds,
            paused=self._paused,
        )

    async def aclose(self) -> None:
        """End running calls as ``interrupted``, then the server if it is ours."""
        if self._closed:
            return
        self._closed = True
        calls = list(self._seats)
        self._mark_interrupted(calls)
        if self._folder is not None and self._failure is None:
            with contextlib.suppress(EngineError):
                async with self._server_lock:
                    await self._end_requests(calls)
        for errand in self._errands:
            errand.cancel()
        await asyncio.gather(*self._errands, return_exceptions=True)
        await self._server.aclose()

    def _serving(self) -> PolicyFolder:
        if self._folder is None:
            raise EngineError("the engine has not been started")
        if self._closed:
            raise GenerationRefused("the engine has stopped")
        if self._failure is not None:
            raise self._failure
        return self._folder

    def _lose(self, error: EngineLost) -> None:
        """The server is of no use any more: every call ends, and so does every later one."""
        if self._failure is None and not self._closed:
            self._failure = error
            self._seats.wake_all()

    async def _turn(self, seat: Seat) -> bool:
        """Wait until the call may send a request; False when it has been interrupted."""
        while True:
            if seat.interrupted:
                return False
            self._serving()
            held = self._paused or self._loading or (self._draining and not seat.begun)
            if not held and (seat.running or self._seats.take(seat)):
                return True
            seat.changed.clear()
            await seat.changed.wait()

    async def _next_chunks(self, seat: Seat) -> list[Chunk]:
        """One slice of a call: send, wait, drop what must not be delivered, account for the rest."""
        call = seat.call
        first = not seat.cache_key
        if first:
            version = self._server.policy_version
            # Fixed for the call: its cache is its own version's, or was dropped, or is stamped by kv_min_version.
            seat.cache_key = f"{self._cache_space}-{self._load_count}"
            seat.kv_min = {version: version}
        asked = min(call.chunk_token_count, seat.budget)
        piece = await self._request(seat, asked)
        self._count(seat, piece, first)
        await self._approval(seat)
        piece, fell = without(piece, seat.refused, seat.floor)
        seat.slicing = False
        seat.refused.clear()
        seat.context.extend(piece.token_ids.tolist())
        seat.budget -= len(piece)
        if piece.spans:
            seat.floor = piece.spans[-1].policy_version
        if self._failure is not None and not len(piece):
            raise self._failure
        return chunks_of(
            piece,
            seat.kv_min_version,
            self._reason(seat, piece, fell),
            cached_token_count=piece.cached_token_count if first else 0,
            idle_version=self._in_service,
        )

    def _reason(self, seat: Seat, piece: Slice, fell: bool) -> FinishReason | None:
        if piece.stopped:
            return FinishReason.STOP
        if seat.budget == 0:
            return FinishReason.LENGTH
        # An abort that nobody here asked for: whoever did it wants the call to end.
        if seat.interrupted or fell or (piece.aborted and not piece.cut):
            return FinishReason.INTERRUPTED
        return None

    async def _request(self, seat: Seat, asked: int) -> Slice:
        """Send one slice and wait for its answer."""
        seat.request_id = uuid.uuid4().hex
        seat.slicing, seat.met_load = True, False
        version = self._server.policy_version
        body = slice_body(seat.context, asked, seat.call.sampling, request_id=seat.request_id, cache_key=seat.cache_key)
        answer = await self._answer(body)
        seat.request_id = ""
        return read_slice(
            answer,
            seat.call.sampling,
            vocab_size=self._serving_vocab(),
            budget=asked,
            sole_version=None if seat.met_load else version,
        )

    def _serving_vocab(self) -> int:
        assert self._folder is not None
        return self._folder.vocab_size

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a slice within its deadline; time in a paused server does not count."""
        limit = self._options.request_timeout_seconds
        request = asyncio.ensure_future(self._server.api.generate(body))
        try:
            while True:
                await asyncio.wait([request], timeout=limit)
                if request.done():
                    break
                if not self._paused and not self._loading:
                    raise self._late(limit)
            self._last_answer = time.monotonic()
            return request.result()
        except EngineLost:
            raise
        except EngineError as error:
            raise self._failure or await self._server.explained(error) from error
        finally:
            request.cancel()

    def _late(self, limit: float) -> EngineError:
        message = f"no answer to a slice within generator.sglang.request_timeout_seconds={limit:g}"
        if time.monotonic() - self._last_answer >= limit:
            self._lose(EngineLost(f"the SGLang server gave {message}, nor to any other request"))
        return self._failure or EngineError(f"the SGLang server gave {message}")

    async def _approval(self, seat: Seat) -> None:
        """Hold a slice back while weights are on trial."""
        while (self._on_trial is not None or self._loading) and not seat.interrupted and self._failure is None:
            seat.changed.clear()
            await seat.changed.wait()
        if self._on_trial is not None:
            seat.refused.add(self._on_trial)

    def _count(self, seat: Seat, piece: Slice, first: bool) -> None:
        counters = self._counters
        counters.generated_tokens += len(piece)
        # The last token of a context is the input of the first decode step, not prefill.
        prefilled = max(0, piece.prompt_token_count - 1 - piece.cached_token_count)
        own = max(piece.cached_token_count, seat.call.prompt_token_count)
        counters.prefill_tokens += prefilled
        counters.reprefill_tokens += max(0, piece.prompt_token_count - 1 - own)
        if first:  # later slices find their own tokens in the cache, which is no news
            counters.cached_tokens += piece.cached_token_count

    def _mark_interrupted(self, seats: Iterable[Seat]) -> int:
        count = 0
        for seat in seats:
            count += not seat.interrupted
            seat.interrupted = True
            seat.changed.set()
        return count

    async def _end_requests(self, seats: Many[Seat]) -> None:
        """Abort the requests of these calls and wait until they have been answered, with what they have sampled."""
        under_way = [s for s in seats if s.request_id]
        if not under_way:
            return
        held = self._server.paused
        if held:  # a paused server ends nothing
            await self._server.resume()
        try:
            for _ in range(_MOST_ABORTS):
                await asyncio.gather(*(self._server.api.abort(s.request_id) for s in under_way if s.request_id))
                if await self._answered(under_way, _ABORT_AGAIN_SECONDS):
                    return
        finally:
            if held and self._failure is None:
                await self._server.pause(self._options.pause_mode)

    async def _answered(self, seats: Many[Seat], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while any(s.request_id for s in seats) and self._failure is None:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.002)
        return True

    async def _abort_once(self, request_id: str) -> None:
        with contextlib.suppress(EngineError):
            await self._server.api.abort(request_id)

    def _run_errand(self, work: Any) -> None:
        if self._closed or self._failure is not None:
            work.close()
            return
        task = asyncio.ensure_future(work)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _read_fitting(self, folder: Path) -> PolicyFolder:
        policy = read_folder(folder)
        assert self._folder is not None
        if differs := difference(self._folder, policy):
            raise EngineError(f"{folder}: another architecture: {differs}")
        return policy

    async def _drain(self) -> None:
        """Wait until every call that has begun has ended; the others wait for the load."""
        self._draining = True
        while any(seat.begun for seat in self._seats):
            self._serving()
            await asyncio.sleep(0.005)

    async def _swap(self, folder: Path, version: int, mode: OnNewVersion) -> float:
        plan = plan_reload(
            mode,
            interrupt=self._options.interrupt,
            version=version,
            in_service=self._in_service,
            on_trial=self._on_trial,
        )
        started = time.monotonic()
        before = self._server.policy_version
        self._loading = True
        try:
            await self._hold(plan)
            self._seats.stand_still(True)
            await self._server.load(folder, version, flush=plan.flush)
            self._stamp(before, version, plan)
        except EngineLost as error:
            self._lose(error)
            raise
        finally:
            if not self._paused and self._failure is None:
                await self._server.resume()
                self._seats.stand_still(False)
            self._loading = False
        return time.monotonic() - started

    async def _hold(self, plan: ReloadPlan) -> None:
        """End the running calls if they must, and pause the server as the plan says."""
        if plan.end_running:
            ending = [seat for seat in self._seats if seat.begun]
            self._mark_interrupted(ending)
            await self._end_requests(ending)
        if not self._server.paused or plan.pause_mode != "in_place":  # also from held in place to retracted
            await self._server.pause(plan.pause_mode)

    def _stamp(self, before: int, version: int, plan: ReloadPlan) -> None:
        """The weights have changed: what tokens from here on are called, and what running slices may deliver."""
        for seat in self._seats:
            seat.met_load = True
            if self._on_trial is not None and seat.slicing:
                seat.refused.add(self._on_trial)
            if seat.kv_min:
                seat.kv_min[version] = version if plan.flush else seat.kv_min.get(before, before)
        self._load_count += 1
        if self._paused:
            self._on_trial = version if version != self._in_service else None
        else:
            self._in_service, self._on_trial = version, None
