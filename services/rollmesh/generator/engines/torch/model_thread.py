"""The model thread: runs commands, admits waiting calls, decodes, and delivers chunks to asyncio.

commands   from the asyncio thread, run between two steps; without running calls the thread sleeps on them
waiting    calls in order of arrival; preempted calls return to their position
outbox     chunks of the last few steps, delivered to the asyncio thread in one wake-up
"""

import asyncio
import threading
import time
from bisect import insort
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, Queue

import numpy as np
import torch

from rollmesh.config.generator import GeneratorConfig
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.call_limits import empty_chunk, hold_seconds
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.running_batch import RunningBatch
from rollmesh.generator.engines.torch.slots import RunningCall
from rollmesh.generator.engines.torch.weights import Weights
from rollmesh.types import FinishReason

_STRIDE, _STRIDE_SECONDS = 4, 0.01
"""Steps between two admissions and between two deliveries, fewer if they take longer; batches prefills and wake-ups."""
_PREFILL_TOKENS = 2048
"""Prefilled tokens between two decode steps, and between two looks for commands."""
_QUIET_SECONDS = 0.0005
_LONGEST_GATHERING_SECONDS = 0.01
_FILL = 0.85
"""Share of the cache that an estimated peak may take; tier widths and estimates are rounded."""
_QUANTILE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap:
    """Request to put a policy in service."""

    weights: Weights
    policy_version: int
    mode: OnNewVersion
    done: Future[float]


class _Stride:
    """Decode steps since an admission or a delivery."""

    def __init__(self) -> None:
        self._first_step, self._began = -_STRIDE, 0.0

    def restart(self, step: int) -> None:
        self._first_step, self._began = step, time.monotonic()

    def is_over(self, step: int) -> bool:
        return step - self._first_step >= _STRIDE or time.monotonic() - self._began >= _STRIDE_SECONDS


class ModelThread(threading.Thread):
    """Owner of the batch; every method but ``post`` runs in this thread."""

    def __init__(self, batch: RunningBatch, config: GeneratorConfig, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name="torch-engine", daemon=True)
        self.batch = batch
        self.waiting: list[RunningCall] = []
        self.paused = False
        """True while decoding is stopped; running calls stay in their slots."""
        self.failure: Exception | None = None
        self._config = config
        self._loop = loop
        # Not a SimpleQueue: where another thread delays it past its timeout, its `get` waits for ever (CPython 3.11).
        self._commands: Queue[Callable[[], None]] = Queue()
        self._stopping = False
        self._arrivals = 0
        self._admission, self._delivery = _Stride(), _Stride()
        self._filling = False
        """True while calls that start together are prefilled in parts, between which commands run."""
        self._stuck = False
        """True while waiting calls cannot start next to held ones, until a command or the end of a hold."""
        self._swaps: list[Swap] = []
        self._ended = False
        self._ending = threading.Lock()

    def post(self, command: Callable[[], None]) -> bool:
        """Run ``command`` in the model thread between two steps; return False if the thread has ended."""
        with self._ending:
            if not self._ended:
                self._commands.put(command)
            return not self._ended

    def submit(self, call: RunningCall) -> None:
        if self._stopping or self.failure is not None:
            self.batch.outbox.append((call, self.failure or GenerationRefused("the engine has stopped")))
            return
        call.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(call)

    def cancel(self, call: RunningCall) -> None:
        """Remove a call whose caller has disconnected."""
        if call.slot >= 0:
            self.batch.remove(call, kept=True)
        elif call in self.waiting:
            self.waiting.remove(call)

    def interrupt(self, trajectory_ids: Iterable[str] | None) -> int:
        wanted = None if trajectory_ids is None else set(trajectory_ids)
        running = [c for c in self.batch.slots.running() if wanted is None or c.request.trajectory_id in wanted]
        queued = [c for c in self.waiting if wanted is None or c.request.trajectory_id in wanted]
        self.batch.interrupt(running)
        self._end_waiting(queued)
        self._deliver()
        return len(running) + len(queued)

    def acknowledge(self, context_token_counts: Mapping[str, int]) -> None:
        """Record the tokens that callers have saved; calls held for them continue."""
        for call in (*self.batch.slots.running(), *self.waiting):
            count = context_token_counts.get(call.request.trajectory_id)
            if count is not None:
                call.backlog.acknowledge(count)
        self.batch.release_unblocked()

    def serve_adapter(self, version: int, kept_versions: int) -> None:
        """Let calls that start from now on use a version that is loaded, and keep the newest ones ready."""
        waiting = (c.adapter_version for c in self.waiting if c.adapter_version is not None)
        self.batch.serve_adapter(version, kept_versions, set(waiting))

    def set_paused(self, paused: bool) -> None:
        self.paused = paused

    def request_swap(self, swap: Swap) -> None:
        """Put a policy in service now, or as soon as the running calls have finished (drain)."""
        self._swaps.append(swap)
        if not self._stopping:
            self._try_swaps()

    def stop(self) -> None:
        self.interrupt(None)
        self._stopping = True

    def run(self) -> None:
        try:
            with torch.inference_mode():
                while not self._stopping:
                    self._run_commands()
                    if not self._stopping and not self.paused:
                        self._iterate()
        except Exception as error:
            self.failure = EngineError(f"the engine failed: {error!r}")
            self.failure.__cause__ = error
            self.batch.outbox += [(call, self.failure) for call in (*self.batch.slots.running(), *self.waiting)]
            self.waiting.clear()
        self._stopping = True
        self._close()

    def _iterate(self) -> None:
        """Start waiting calls, advance every running call by one token, and put a new policy in service between."""
        started = time.perf_counter()
        counters = self.batch.counters
        self.batch.end_held(since=time.monotonic() - self._hold_seconds())
        self._admit()
        self._requeue(self.batch.make_room())
        running = self.batch.active_count
        if running and not self._filling:
            step_started = time.perf_counter()
            self.batch.step()
            rest = step_seconds(self._config.pace, running) - (time.perf_counter() - started)
            if rest > 0:
                time.sleep(rest)
            self.batch.decode_seconds += time.perf_counter() - step_started
        seconds = time.perf_counter() - started
        counters.busy_seconds_total += seconds
        counters.running_slot_seconds_total += seconds * running
        self._try_swaps()
        if not self.batch.active_count or self._delivery.is_over(self.batch.decode_steps):
            self._deliver()
        self._stuck = not running and self.batch.held_since is not None

    def _run_commands(self) -> None:
        """Run the posted commands; with no call to decode, sleep until the next command."""
        idle = self.paused or not (self.batch.active_count or (self.waiting and not self._stuck))
        if idle:
            self._deliver()
            since = self.batch.held_since
            asleep = None  # until a command; with held calls, until the oldest hold must end
            if since is not None and not self.paused:
                asleep = max(0.0, since + self._hold_seconds() - time.monotonic())
            with suppress(Empty):
                self._commands.get(timeout=asleep)()
        while not self._commands.empty():
            self._commands.get()()
        if idle and self.waiting:
            # Wait for a short pause in arrivals, so that calls that arrive together start together.
            deadline = time.monotonic() + _LONGEST_GATHERING_SECONDS
            with suppress(Empty):
                while time.monotonic() < deadline:
                    self._commands.get(timeout=_QUIET_SECONDS)()

    def _hold_seconds(self) -> float:
        return hold_seconds(contended=bool(self.waiting or self._swaps))

    def _admit(self) -> None:
        """Move waiting calls into slots, oldest first, within the limits of slots, cache and prefill budget."""
        batch = self.batch
        due = self._filling or not batch.active_count or self._admission.is_over(batch.decode_steps)
        if not self.waiting or not batch.slots.free or not due:
            self._filling = False
            return
        self._admission.restart(batch.decode_steps)
        filling = self._filling or not batch.active_count
        most = max(_PREFILL_TOKENS, batch.model.forward_tokens) if filling else _PREFILL_TOKENS
        self._filling = False
        chosen: list[RunningCall] = []
        widths: list[int] = []
        prefill = 0
        for call in self.waiting[: len(batch.slots.free)]:
            count = len(call.request.context_ids) + call.written_count
            uncached = count - batch.cached_count(call)
            if chosen and prefill + uncached > most:
                self._filling = filling
                break
            if self._swaps and not call.started:
                break
            widths.append(batch.cache.width_for(count - 1))
            if not batch.cache.has_room(widths) or not self._expected_to_fit([*chosen, call]):
                break
            chosen.append(call)
            prefill += uncached
        if chosen:
            del self.waiting[: len(chosen)]
            batch.admit(chosen)

    def _expected_to_fit(self, candidates: list[RunningCall]) -> bool:
        """Tell whether the estimated peak of running and candidate calls fits in the cache."""
        cache = self.batch.cache
        if cache.token_capacity >= self._config.slots * cache.longest:
            return True
        if not self.batch.running_count and len(candidates) == 1:
            return True
        lengths, positions, budgets = self.batch.slots.load()
        lengths = np.append(lengths, [len(c.request.context_ids) + c.written_count for c in candidates])
        positions = np.append(positions, [c.position for c in candidates])
        budgets = np.append(budgets, [c.budget - c.written_count for c in candidates])
        history: Int64Array = np.sort(np.fromiter(self.batch.response_lengths, np.int64))
        remaining = remaining_estimate(positions, budgets, history)
        return peak_tokens(lengths, remaining) <= _FILL * cache.token_capacity

    def _try_swaps(self) -> None:
        """Run pending swaps in order; a drain waits for every call that has started."""
        while self._swaps:
            swap = self._swaps[0]
            begun = self.batch.running_count or any(c.started for c in self.waiting)
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
            self.batch.interrupt(self.batch.slots.running(), kept=False)
            self._end_waiting([c for c in self.waiting if c.started])
        # A swap between two parts of a prefill: a call must not begin on the cache of another version.
        self._requeue(self.batch.remove_calls_without_tokens())
        self._end_waiting([c for c in self.waiting if c.newest_version > swap.policy_version])
        self.batch.swap(swap.policy_version)
        self.batch.model.swap(swap.weights)
        self._deliver()
        return time.perf_counter() - started

    def _requeue(self, calls: Iterable[RunningCall]) -> None:
        for call in calls:
            insort(self.waiting, call, key=lambda c: c.arrival)

    def _end_waiting(self, calls: list[RunningCall]) -> None:
        """End calls without a slot as interrupted; all their tokens have been delivered."""
        for call in calls:
            self.waiting.remove(call)
            self.batch.outbox.append((call, empty_chunk(self.batch.policy_version, FinishReason.INTERRUPTED)))

    def _deliver(self) -> None:
        self._delivery.restart(self.batch.decode_steps)
        items, self.batch.outbox = self.batch.outbox, []
        if not items:
            return

        def hand_over() -> None:
            for call, chunk in items:
                call.deliver(chunk)

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


def step_seconds(pace: Sequence[tuple[int, float]] | None, running: int) -> float:
    """Return the minimum duration of a decode step with ``running`` calls: piecewise linear, 0 without a curve."""
    if not pace:
        return 0.0
    counts, seconds = zip(*sorted(pace), strict=True)
    return float(np.interp(running, counts, seconds))


def remaining_estimate(generated: Int64Array, budget: Int64Array, history: Int64Array) -> Int64Array:
    """Estimate the tokens that calls will still generate, int64 [calls].

    The estimate is the 0.8 quantile of the response lengths in ``history`` (ascending) that exceed the tokens that a
    call has ``generated``, at most its ``budget``. It is the whole budget if no response in the history is longer.
    """
    shorter = np.searchsorted(history, generated, side="right")
    longer = len(history) - shorter
    pick = shorter + (_QUANTILE * np.maximum(longer - 1, 0)).astype(np.int64)
    known = history[np.minimum(pick, len(history) - 1)] - generated if len(history) else budget
    return np.where(longer > 0, np.minimum(known, budget), budget)


def peak_tokens(lengths: Int64Array, remaining: Int64Array) -> int:
    """Return the peak of tokens in the cache until all calls have finished, if no other call starts.

    Past-Future scheduling: the total peaks just before a call ends. With calls sorted by remaining tokens, descending,
    the total before call i ends is the sum of the first i lengths plus i times its remaining tokens.
    """
    if not len(lengths):
        return 0
    order = np.argsort(-remaining, kind="stable")
    left = remaining[order]
    return int((np.cumsum(lengths[order]) + np.arange(1, len(left) + 1) * left).max())
