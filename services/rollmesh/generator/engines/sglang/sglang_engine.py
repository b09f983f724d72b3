"""The asyncio interface of the SGLang engine."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollmesh.errors import ConfigError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import (
    Backlog,
    check_call,
    check_context_length,
    check_mode,
    check_sequences,
    empty_chunk,
)
from rollmesh.generator.engines.engine_protocol import EngineLost, EngineStatus, OnNewVersion
from rollmesh.generator.engines.policy_folders import difference, read_folder
from rollmesh.generator.engines.sglang.engine_state import EngineState, ServerCall, SlotQueue
from rollmesh.generator.engines.sglang.loaded_adapters import LoadedAdapters
from rollmesh.generator.engines.sglang.server import SglangServer
from rollmesh.generator.engines.sglang.server_calls import Calls
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.engines.sglang.slices import read_scores, read_slice, score_body, slice_body
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array

_POLL_SECONDS = 0.005


class SglangEngine:
    """Engine that runs calls in slices on one SGLang server; implements ``engine_protocol.Engine``.

    Calls are queued here, and at most ``slots`` of them have a request in the server. Weights loaded while the engine
    is paused are on trial until ``resume``: tokens sampled under them are held, and dropped if other weights replace
    them.
    """

    def __init__(self, options: SglangOptions) -> None:
        self._options = options
        self._queue = SlotQueue(options.generator.slots)
        self._state = EngineState(self._queue)
        self._server = SglangServer(options, self._state.mark_lost)
        self._adapters: LoadedAdapters | None = None
        if options.adapter is not None:
            limit = options.server.update_timeout_seconds
            self._adapters = LoadedAdapters(options.adapter, lambda: self._server.api, limit)
        self._calls = Calls(options, self._state, self._server, self._adapters)
        self._load_lock = asyncio.Lock()

    async def start(self, folder: Path, policy_version: int) -> None:
        """Start or connect to the server with the first policy; EngineLost if it is not ready in time."""
        state = self._state
        if state.folder is not None:
            raise EngineError("the engine has been started already")
        policy = await asyncio.to_thread(read_folder, folder)
        check_context_length(self._options.generator.max_context_tokens, policy.max_positions)
        if self._adapters is not None:
            self._adapters.start_above(policy.tensors, policy_version)
            self._server.adapter_targets = self._adapters.layers.names
        try:
            await self._server.start(folder, policy_version)
            if self._adapters is not None and self._options.server.url is not None:
                await self._adapters.unload_leftovers()
            await self._check_kept_sets(policy.vocab_size)
        except ConfigError:
            raise
        except EngineError as error:
            raise error if isinstance(error, EngineLost) else EngineLost(str(error)) from error
        state.folder, state.in_service = policy, policy_version

    async def _check_kept_sets(self, vocab_size: int) -> None:
        """Sample a token as training does; ConfigError unless its kept set comes with it."""
        sampling = self._options.sampling
        if not sampling.kept_tokens:
            return
        body = slice_body([0], 1, sampling, request_id=uuid.uuid4().hex, cache_key="check")
        try:
            answer = await self._server.api.generate(body)
            call = replace(sampling, kept_tokens=vocab_size)  # a larger set than the run's is no fault of the server
            read_slice(answer, call, vocab_size=vocab_size, budget=1, sole_version=self._server.policy_version)
        except (DataError, EngineError) as error:
            raise ConfigError(
                "rollout.top_p, top_k and min_p truncate sampling, but the SGLang server does not return the set that "
                f"each token was drawn from: {error}; it needs SGLang 0.5.23 or later, an option "
                f"--sampling-mask-max-tokens above rollout.kept_tokens={sampling.kept_tokens} (default 4096), and a "
                "sampling backend that captures the sets"
            ) from error

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        vocab_size = self._state.serving().vocab_size
        budget = check_call(call, vocab_size=vocab_size, longest=self._options.generator.max_context_tokens)
        server_call = ServerCall(call=call, budget=budget, backlog=Backlog.of(call), context=call.context_ids.tolist())
        self._queue.enter(server_call)
        try:
            while True:
                if not await self._calls.wait_until_ready(server_call):
                    yield empty_chunk(self._state.in_service, FinishReason.INTERRUPTED)
                    return
                for chunk in await self._calls.next_chunks(server_call):
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
        finally:
            self._queue.leave(server_call)
            self._calls.forget(server_call)

    async def interrupt(self, trajectory_ids: Sequence[str] | None = None) -> int:
        self._state.serving()
        wanted = None if trajectory_ids is None else set(trajectory_ids)
        chosen = [s for s in self._queue if wanted is None or s.call.trajectory_id in wanted]
        count = self._calls.mark_interrupted(chosen)
        async with self._state.server_lock:
            await self._calls.end_requests(chosen)
        return count

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        for server_call in self._queue:
            count = context_token_counts.get(server_call.call.trajectory_id)
            if count is not None:
                server_call.backlog.acknowledge(count)
                server_call.changed.set()

    async def stage(self, folder: Path, policy_version: int) -> bool:
        """Check that the weights fit; EngineError if they do not. The server reads them in ``load``, adapters now."""
        self._state.serving()
        if self._adapters is not None:
            async with self._load_lock:
                await self._load_adapter(self._adapters, folder, policy_version)
            return True
        await asyncio.to_thread(self._check_fits, folder)
        return False

    async def load(self, folder: Path, policy_version: int, mode: OnNewVersion) -> float:
        """Swap to the policy in ``folder``; returns the seconds during which decoding stopped.

        Raises EngineError if it cannot be served and the old weights keep serving, EngineLost if the server's state is
        unknown.
        """
        state = self._state
        state.serving()
        check_mode(mode, with_adapter=self._adapters is not None)
        async with self._load_lock:
            if self._adapters is not None:
                if not self._adapters.has(policy_version):
                    await self._load_adapter(self._adapters, folder, policy_version)
                state.in_service = policy_version
                self._adapters.retain(policy_version)
                return 0.0
            await asyncio.to_thread(self._check_fits, folder)
            try:
                if mode is OnNewVersion.DRAIN:  # until every call that has started has ended; the others wait
                    state.draining = True
                    self._queue.wake_all()
                    while any(server_call.begun for server_call in self._queue):
                        state.serving()
                        await asyncio.sleep(_POLL_SECONDS)
                async with state.server_lock:
                    return await self._swap(folder, policy_version, mode)
            finally:
                state.draining = False
                self._queue.wake_all()

    async def score(self, sequences: Sequence[Int32Array], policy_version: int | None = None) -> list[Float32Array]:
        vocab_size, longest = self._state.serving().vocab_size, self._options.generator.max_context_tokens
        check_sequences(sequences, vocab_size=vocab_size, longest=longest)
        adapters = self._adapters
        if adapters is None:
            return await self._score(sequences, None)
        if policy_version is not None and not adapters.has(policy_version):
            raise EngineError(f"policy version {policy_version} is not loaded; stage it before it is scored")
        with adapters.named(self._state.in_service if policy_version is None else policy_version) as adapter:
            return await self._score(sequences, adapter)

    async def pause(self) -> None:
        state = self._state
        state.serving()
        async with state.server_lock:
            state.paused = True
            if not self._server.paused:
                await self._server.pause(self._options.pause_mode)
            self._queue.set_paused(True)

    async def resume(self) -> None:
        """Continue decoding; weights on trial are put in service."""
        state = self._state
        state.serving()
        async with state.server_lock:
            state.paused = False
            if self._server.paused:
                await self._server.resume()
            if self._adapters is None:
                state.in_service, state.on_trial = self._server.policy_version, None
            self._queue.set_paused(False)
            self._queue.wake_all()

    async def respond(self) -> None:
        """Return at once: probes and the deadlines of requests detect a server that hangs."""
        self._state.serving()

    def status(self) -> EngineStatus:
        state = self._state
        if state.folder is None:
            raise EngineError("the engine has not been started")
        if state.failure is not None:
            raise state.failure
        return replace(
            self._queue.status(),
            policy_version=self._server.policy_version if self._adapters is None else state.in_service,
            kv_token_capacity=self._server.kv_token_capacity,
            paused=state.paused,
            decode_step_total=None,  # the server does not report it
            decode_seconds_total=None,
        )

    async def aclose(self) -> None:
        """End running calls as ``interrupted``, then stop the server if this process started it."""
        state = self._state
        if state.closed:
            return
        state.closed = True
        calls = list(self._queue)
        self._calls.mark_interrupted(calls)
        if state.folder is not None and state.failure is None:
            with contextlib.suppress(EngineError):
                async with state.server_lock:
                    await self._calls.end_requests(calls)
        await self._calls.aclose()
        if self._adapters is not None:
            await self._adapters.aclose()
        await self._server.aclose()

    async def _load_adapter(self, adapters: LoadedAdapters, folder: Path, version: int) -> None:
        """Check an adapter and load it into the server beside the others; the base is there already."""
        if version == adapters.base_version:
            return
        await asyncio.to_thread(adapters.layers.check, folder)
        try:
            await adapters.load(folder, version)
        except EngineError as error:
            raise self._state.failure or await self._server.explain(error) from error

    async def _score(self, sequences: Sequence[Int32Array], adapter: str | None) -> list[Float32Array]:
        """Score sequences on the server, which continues for that time if it is paused."""
        async with self._state.server_lock:
            held = self._server.paused
            if held:  # a paused server does not answer requests
                await self._server.resume()
            try:
                return await self._scores(sequences, adapter)
            finally:
                # Tokens of weights on trial are held anyway. A second pause would drop the cache that the running calls
                # have just computed, and cost another prefill.
                if held and self._state.on_trial is None and self._state.failure is None:
                    await self._server.pause(self._options.pause_mode)

    async def _scores(self, sequences: Sequence[Int32Array], adapter: str | None) -> list[Float32Array]:
        limit = self._options.server.request_timeout_seconds

        async def score(ids: Int32Array) -> Float32Array:
            if len(ids) < 2:
                return np.empty(0, np.float32)
            body = score_body(ids.tolist(), request_id=uuid.uuid4().hex, adapter=adapter)
            return read_scores(await self._server.api.generate(body), len(ids))

        requests = [asyncio.ensure_future(score(ids)) for ids in sequences]
        try:
            async with asyncio.timeout(limit):
                return list(await asyncio.gather(*requests))
        except TimeoutError as error:
            lost = EngineLost(
                f"the SGLang server scored no sequence within generator.sglang.request_timeout_seconds={limit:g}"
            )
            self._state.mark_lost(lost)
            raise lost from error
        except EngineLost:
            raise
        except EngineError as error:
            raise self._state.failure or await self._server.explain(error) from error
        except (DataError, GenerationRefused) as error:  # unexpected: the sequences were checked
            raise EngineError(f"the SGLang server rejects the canary sequences: {error}") from error
        finally:
            await cancel_and_wait(*requests)

    def _check_fits(self, folder: Path) -> None:
        if differs := difference(self._state.serving(), read_folder(folder)):
            raise EngineError(f"{folder}: another architecture: {differs}")

    async def _swap(self, folder: Path, version: int, mode: OnNewVersion) -> float:
        """Update the weights.

        mode        running requests                    server's cache     order
        interrupt   retract: back to its queue,         dropped            pause(retract), update(flush), continue
                    prefilled again under the new weights
                    abort: end as interrupted           dropped            abort each, then the same
        keep_kv     continue in place                   kept               pause(in_place), update(no flush), continue
        drain       finished before                     dropped            pause(retract), update(flush), continue

        A version below the one in service (a pin) ends running calls: the versions of one call never decrease. A load
        that replaces a version on trial drops all tokens sampled under that version, and its cache.
        """
        state = self._state
        falls, replaces = version < state.in_service, state.on_trial is not None
        keeps_cache = mode is OnNewVersion.KEEP_KV and not (falls or replaces)
        aborts = mode is OnNewVersion.INTERRUPT and self._options.server.interrupt == "abort" and not replaces
        started = time.monotonic()
        before = self._server.policy_version
        state.loading = True
        try:
            if falls or aborts:
                ending = [server_call for server_call in self._queue if server_call.begun]
                self._calls.mark_interrupted(ending)
                await self._calls.end_requests(ending)
            if not (self._server.paused and keeps_cache):  # also changes a pause in place to retract
                await self._server.pause("in_place" if keeps_cache else "retract")
            self._queue.set_paused(True)
            await self._server.load(folder, version, flush=not keeps_cache)
            self._stamp(before, version, keeps_cache=keeps_cache)
        finally:
            if not state.paused and state.failure is None:
                await self._server.resume()
                self._queue.set_paused(False)
            state.loading = False
        return time.monotonic() - started

    def _stamp(self, before: int, version: int, *, keeps_cache: bool) -> None:
        """Record the new version: the version of further tokens, and the tokens that running slices may deliver."""
        state = self._state
        for server_call in self._queue:
            server_call.met_load = True
            if state.on_trial is not None and server_call.slicing:
                server_call.refused.add(state.on_trial)
            if server_call.kv_min:
                oldest = server_call.kv_min.get(before, before) if keeps_cache else version
                server_call.kv_min[version] = min(version, oldest)
        state.load_count += 1
        if state.paused:
            state.on_trial = version if version != state.in_service else None
        else:
            state.in_service, state.on_trial = version, None
