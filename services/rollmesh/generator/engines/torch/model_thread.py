"""The model thread: runs commands, admits waiting calls, decodes, and delivers chunks to asyncio.

commands   from the asyncio thread, run between two steps; without running calls the thread sleeps on them
waiting    calls in order of arrival; preempted calls return to their position
outbox     chunks of the last few steps, delivered to the asyncio thread in one wake-up
"""

from __future__ import annotations

import asyncio
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np
import torch

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.backlog import hold_seconds
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.counters import Counters
from rollmesh.generator.engines.torch.prefill_admission import peak_tokens, remaining_estimate
from rollmesh.generator.engines.torch.running_batch import RunningBatch
from rollmesh.generator.engines.torch.running_call import RunningCall
from rollmesh.generator.engines.torch.slots import Int64Array
from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions
from rollmesh.generator.engines.torch.weights import Weights
from rollmesh.types import Chunk, FinishReason

_STRIDE = 4
"""Steps between two admissions and between two deliveries; batches prefills and wake-ups."""
_QUIET_SECONDS = 0.0005
_LONGEST_GATHERING_SECONDS = 0.01
_FILL = 0.85
"""Share of the cache that an estimated peak may take; tier widths and estimates are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Request to put a policy in service."""

    weights: Weights
    policy_version: int
    mode: OnNewVersion
    done: Future[float]


class ModelThread:
    """Owner of the batch; every method but ``post``, ``start`` and ``join`` runs in the model thread."""

    def __init__(
        self,
        make_batch: Callable[[Counters, Callable[[RunningCall, Chunk | Exception], None]], RunningBatch],
        options: TorchEngineOptions,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.counters = Counters()
        self.batch = make_batch(self.counters, self._emit)
        self.waiting: list[RunningCall] = []
        self.paused = False
        self.failure: Exception | None = None
        self._options = options
        self._loop = loop
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._outbox: list[tuple[RunningCall, Chunk | Exception]] = []
        self._stopping = False
        self._arrivals = 0
        self._steps_since_admission = _STRIDE
        self._stuck = False
        """True while waiting calls cannot start next to held ones, until a command or the end of a hold."""
        self._swaps: list[Swap] = []
        self._ended = False
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)

    def start(self) -> None:
        """Start the model thread."""
        self._thread.start()

    def join(self) -> None:
        """Wait for the model thread to end."""
        self._thread.join()

    def post(self, command: Callable[[], None]) -> bool:
        """Run ``command`` in the model thread between two steps; return False if the thread has ended."""
        with self._ending:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    def submit(self, sequence: RunningCall) -> None:
        """Queue a call."""
        if self._stopping or self.failure is not None:
            self._emit(sequence, self.failure or GenerationRefused("the engine has stopped"))
            return
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def cancel(self, sequence: RunningCall) -> None:
        """Remove a call whose caller has disconnected."""
        if sequence.slot >= 0:
            self.batch.drop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def interrupt(self, trajectory_ids: Iterable[str] | None) -> int:
        """End these calls (None: all) as interrupted; returns the number of calls ended."""
        wanted = None if trajectory_ids is None else set(trajectory_ids)
        running = [s for s in self.batch.running() if wanted is None or s.call.trajectory_id in wanted]
        queued = [s for s in self.waiting if wanted is None or s.call.trajectory_id in wanted]
        self.batch.interrupt(running)
        self._end_waiting(queued)
        self._deliver()
        return len(running) + len(queued)

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        """Record the tokens that callers have saved; calls held for them continue."""
        for sequence in (*self.batch.running(), *self.waiting):
            count = context_token_counts.get(sequence.call.trajectory_id)
            if count is not None:
                sequence.backlog.acknowledge(count)
        self.batch.release_unblocked()

    def request_swap(self, swap: Swap) -> None:
        """Put a policy in service now, or as soon as the running calls have finished (drain)."""
        self._swaps.append(swap)
        if not self._stopping:
            self._try_swaps()

    def stop(self) -> None:
        """End every call as interrupted and end the thread."""
        self.interrupt(None)
        self._stopping = True

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_commands()
                    if not self._stopping and not self.paused:
                        self._iterate()
        except Exception as error:
            self.failure = EngineError(f"the engine failed: {error!r}")
            self.failure.__cause__ = error
            for sequence in (*self.batch.running(), *self.waiting):
                self._emit(sequence, self.failure)
            self.waiting.clear()
        self._stopping = True
        self._close()

    def _run_commands(self) -> None:
        """Run the posted commands; with no call to decode, sleep until the next command."""
        idle = self.paused or not (self.batch.active_count or (self.waiting and not self._stuck))
        if idle:
            self._deliver()
            with suppress(Empty):
                self._commands.get(timeout=self._seconds_to_sleep())()
        while not self._commands.empty():
            self._commands.get()()
        if idle and self.waiting:
            self._gather()

    def _seconds_to_sleep(self) -> float | None:
        """Return the seconds until a held call must end; None without held calls and while decoding is paused."""
        since = self.batch.held_since
        return None if since is None or self.paused else max(0.0, since + self._hold_seconds() - time.monotonic())

    def _hold_seconds(self) -> float:
        return hold_seconds(contended=bool(self.waiting or self._swaps))

    def _gather(self) -> None:
        """Wait for a short pause in arrivals, so that calls that arrive together start together."""
        deadline = time.monotonic() + _LONGEST_GATHERING_SECONDS
        while time.monotonic() < deadline:
            try:
                self._commands.get(timeout=_QUIET_SECONDS)()
            except Empty:
                return

    def _iterate(self) -> None:
        started = time.perf_counter()
        self.batch.end_held(since=time.monotonic() - self._hold_seconds())
        self._admit()
        for sequence in self.batch.make_room():
            insort(self.waiting, sequence, key=lambda s: s.arrival)
        running = self.batch.active_count
        if running:
            self.batch.step()
            self._steps_since_admission += 1
            rest = self._options.step_seconds(running) - (time.perf_counter() - started)
            if rest > 0:
                time.sleep(rest)
        seconds = time.perf_counter() - started
        self.counters.busy_seconds += seconds
        self.counters.running_slot_seconds += seconds * running
        self._try_swaps()
        if self._outbox and (not self.batch.active_count or self.counters.decode_steps % _STRIDE == 0):
            self._deliver()
        self._stuck = not running and self.batch.held_since is not None

    def _admit(self) -> None:
        """Move waiting calls into slots, oldest first, within the limits of slots, cache and prefill budget."""
        batch = self.batch
        if not self.waiting or not batch.free_slots:
            return
        if batch.active_count and self._steps_since_admission < _STRIDE:
            return
        self._steps_since_admission = 0
        chosen: list[RunningCall] = []
        widths: list[int] = []
        prefill = 0
        for sequence in self.waiting[: batch.free_slots]:
            count = len(sequence.call.context_ids) + sequence.written_count
            if chosen and batch.active_count and prefill + count > self._options.prefill_token_budget:
                break
            if self._swaps and not sequence.started:
                break
            widths.append(batch.cache.width_for(count - 1))
            if not batch.cache.has_room(widths) or not self._expected_to_fit([*chosen, sequence]):
                break
            chosen.append(sequence)
            prefill += count
        if chosen:
            del self.waiting[: len(chosen)]
            batch.admit(chosen)

    def _expected_to_fit(self, candidates: list[RunningCall]) -> bool:
        """Tell whether the estimated peak of running and candidate calls fits in the cache."""
        cache = self.batch.cache
        if cache.token_capacity >= self._options.slots * cache.longest:
            return True
        if not self.batch.running_count and len(candidates) == 1:
            return True
        lengths, positions, budgets = self.batch.load()
        lengths = np.append(lengths, [len(s.call.context_ids) + s.written_count for s in candidates])
        positions = np.append(positions, [s.position for s in candidates])
        budgets = np.append(budgets, [s.budget - s.written_count for s in candidates])
        history: Int64Array = np.sort(np.fromiter(self.batch.response_lengths, np.int64))
        remaining = remaining_estimate(positions, budgets, history)
        return peak_tokens(lengths, remaining) <= _FILL * cache.token_capacity

    def _try_swaps(self) -> None:
        """Run pending swaps in order; a drain waits for every call that has started."""
        while self._swaps:
            swap = self._swaps[0]
            begun = self.batch.running_count or any(s.started for s in self.waiting)
            if swap.mode is OnNewVersion.DRAIN and begun and not swap.done.cancelled():
                return
            self._swaps.pop(0)
            if not swap.done.set_running_or_notify_cancel():
                continue
            try:
                swap.done.set_result(self._swap(swap))
            except Exception as error:
                # The engine has failed half-way through the swap: its caller must receive the error.
                reason = f"policy version {swap.policy_version}: the swap failed: {error!r}"
                swap.done.set_exception(EngineError(reason))
                raise

    def _swap(self, swap: Swap) -> float:
        started = time.perf_counter()
        if swap.mode is OnNewVersion.INTERRUPT:
            self.batch.interrupt(self.batch.running())
            self._end_waiting([s for s in self.waiting if s.started])
        self._end_waiting([s for s in self.waiting if s.newest_version > swap.policy_version])
        self.batch.swap(swap.policy_version)
        self.batch.model.swap(swap.weights)
        self._deliver()
        return time.perf_counter() - started

    def _end_waiting(self, sequences: list[RunningCall]) -> None:
        """End calls without a slot as interrupted; all their tokens have been delivered."""
        for sequence in sequences:
            self.waiting.remove(sequence)
            chunk = Chunk(
                token_ids=np.empty(0, np.int32),
                behavior_logprobs=np.empty(0, np.float32),
                policy_version=self.batch.policy_version,
                kv_min_version=self.batch.policy_version,
                finish_reason=FinishReason.INTERRUPTED,
            )
            self._emit(sequence, chunk)

    def _emit(self, sequence: RunningCall, chunk: Chunk | Exception) -> None:
        self._outbox.append((sequence, chunk))

    def _deliver(self) -> None:
        if not self._outbox:
            return
        items, self._outbox = self._outbox, []

        def hand_over() -> None:
            for sequence, chunk in items:
                sequence.deliver(chunk)

        self._loop.call_soon_threadsafe(hand_over)

    def _close(self) -> None:
        """Answer all pending requests, so that no caller waits for a thread that has ended."""
        with self._ending:
            self._ended = True
        while not self._commands.empty():
            self._commands.get()()
        for swap in self._swaps:
            if swap.done.set_running_or_notify_cancel():
                swap.done.set_exception(self.failure or EngineError("the engine has stopped"))
        self._swaps.clear()
        self._deliver()
