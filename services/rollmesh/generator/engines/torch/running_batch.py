"""The running calls: admission, decode steps and end of calls. Model thread only."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.counters import Counters
from rollmesh.generator.engines.torch.decoder_model import DecoderModel
from rollmesh.generator.engines.torch.kv_cache import KvCache, Tier
from rollmesh.generator.engines.torch.prefill_admission import prefill_batches
from rollmesh.generator.engines.torch.running_call import RunningCall
from rollmesh.generator.engines.torch.sampling import sample
from rollmesh.generator.engines.torch.slots import Int64Array, RowOrder, SlotTable
from rollmesh.generator.engines.torch.stepper import Stepper
from rollmesh.types import Chunk, FinishReason, Int32Array

BoolArray = npt.NDArray[np.bool_]

_HISTORY = 512

Emit = Callable[[RunningCall, Chunk | Exception], None]


class RunningBatch:
    """Calls in slots over one model and one cache.

    A call's context is prefilled without its last token, which is the input of the call's first decode step. So every
    token is sampled in a decode step, and calls with the same context share one prefill by copying rows.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        stepper: Stepper,
        slots: int,
        forward_tokens: int,
        counters: Counters,
        emit: Emit,
        policy_version: int,
    ) -> None:
        self.model = model
        self.cache = cache
        self.policy_version = policy_version
        self.response_lengths: deque[int] = deque(maxlen=_HISTORY)
        """Lengths of finished responses, for ``remaining_estimate``."""
        self._slots = SlotTable(slots, model.arch.vocab_size, model.device)
        self._stepper = stepper
        self._forward_tokens = forward_tokens
        self._counters = counters
        self._emit = emit
        self._step = 0
        self._order: RowOrder | None = None
        self._plan_until = 0
        self._tokens = torch.empty(0, dtype=torch.int64)
        self._rows = np.zeros(0, np.int64)
        """Slots of all rows of the cache, in order, while ``_order`` is valid."""
        self._held: dict[RunningCall, float] = {}
        """Calls held because their callers are late to save, with the start of the hold (monotonic seconds)."""
        self._donors: dict[bytes, set[int]] = {}
        self._donated: dict[int, bytes] = {}

    @property
    def running_count(self) -> int:
        """Calls in slots."""
        return len(self._slots.sequences) - len(self._slots.free)

    @property
    def active_count(self) -> int:
        """Calls for which the next step samples a token: calls in slots that are not held."""
        return self.running_count - len(self._held)

    @property
    def held_since(self) -> float | None:
        """Start of the oldest hold in monotonic seconds; None without held calls."""
        return min(self._held.values(), default=None)

    @property
    def free_slots(self) -> int:
        """Number of free slots."""
        return len(self._slots.free)

    @property
    def tokens_used(self) -> int:
        """Valid tokens in the cache."""
        return self._slots.length_sum + self.active_count * self._step

    def running(self) -> list[RunningCall]:
        """Return the running calls."""
        return self._slots.running()

    def load(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return cached tokens, response positions and remaining budgets of the running calls, int64 [running] each."""
        positions, budgets = self._slots.generated(self._step)
        slots = np.array([s.slot for s in self._slots.running()], np.int64)
        return self._slots.cached(slots, self._step), positions, budgets

    def admit(self, sequences: Sequence[RunningCall]) -> None:
        """Prefill calls and put them into slots; the caller has checked free slots and cache room."""
        self._write_back()
        contexts = {s: s.context_ids() for s in sequences}
        prefilled: dict[bytes, RunningCall] = {}
        copies: list[tuple[RunningCall, int]] = []
        for sequence in sequences:
            context = contexts[sequence]
            cached = len(context) - 1
            slot = self._slots.occupy(sequence, int(context[-1]), cached, self._step)
            self.cache.add(slot, cached)
            sequence.kv_min_version = sequence.newest_version = self.policy_version
            key = context.tobytes()
            donor = next(iter(self._donors.get(key, ())), None)
            if donor is None:
                prefilled[key] = sequence
            elif cached:
                copies.append((sequence, donor))
            self._donors.setdefault(key, set()).add(slot)
            self._donated[slot] = key
        self._prefill([(s, contexts[s]) for s in prefilled.values()])
        for sequence, donor in copies:
            count = len(contexts[sequence]) - 1
            self.cache.write(sequence.slot, *self.cache.read(donor, count))
            sequence.cached_token_count = count
            self._counters.cached_tokens += count
        for sequence in sequences:
            self._hold_if_blocked(sequence)

    def _prefill(self, calls: list[tuple[RunningCall, Int32Array]]) -> None:
        calls = [(s, context) for s, context in calls if len(context) > 1]
        for batch in prefill_batches([len(context) - 1 for _, context in calls], self._forward_tokens):
            chosen = [calls[i] for i in batch]
            longest = len(chosen[0][1]) - 1
            tokens = np.zeros((len(chosen), longest), np.int64)
            for row, (sequence, context) in enumerate(chosen):
                tokens[row, : len(context) - 1] = context[:-1]
                self._counters.prefill_tokens += len(context) - 1
                self._counters.reprefill_tokens += max(0, len(context) - 1 - sequence.call.prompt_token_count)
            keys, values = self._compute_keys(tokens)
            for row, (sequence, context) in enumerate(chosen):
                count = len(context) - 1
                self.cache.write(sequence.slot, keys[:, row, ..., :count], values[:, row, :, :count])

    def _compute_keys(self, tokens: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return keys [layers, batch, kv_heads, d, tokens] and values [layers, batch, kv_heads, tokens, d], padded."""
        arch = self.model.arch
        (batch, length), size = tokens.shape, arch.head_size
        like = self.model.weights.embedding
        keys = like.new_empty((arch.layer_count, batch, arch.kv_head_count, size, length))
        values = like.new_empty((arch.layer_count, batch, arch.kv_head_count, length, size))

        def store(layer: int, layer_keys: Tensor, layer_values: Tensor) -> None:
            keys[layer] = layer_keys.transpose(2, 3)
            values[layer] = layer_values

        self.model.prefill(torch.from_numpy(tokens).to(self.model.device), store)
        return keys, values

    def step(self) -> None:
        """Sample one token for every active call and emit the chunks that are due; requires an active call."""
        order = self._prepare_step()
        logits = self._stepper.logits(self._tokens)
        self._tokens, drawn = sample(logits, order.noise_at(self._step), order.sampling)
        tokens, logprobs = self._tokens.cpu().numpy(), drawn.cpu().numpy()
        self._slots.record(tokens, logprobs)
        self._step += 1
        self._counters.decode_steps += 1
        self._counters.generated_tokens += len(tokens)
        stopped = order.stopped(tokens)
        if self._step >= order.next_event or stopped.any() or not logprobs.min() > -np.inf:  # NaN compares as False
            self._handle_events(order, stopped, np.isfinite(logprobs))

    def _handle_events(self, order: RowOrder, stopped: BoolArray, finite: BoolArray) -> None:
        spent = order.finish_at <= self._step
        due = stopped | spent | (order.emit_at <= self._step) | ~finite
        for row in np.flatnonzero(due):
            sequence = self._slots.sequences[order.slots[row]]
            assert sequence is not None
            if not finite[row]:
                self._fail(sequence)
            elif stopped[row]:
                self._finish(sequence, FinishReason.STOP)
            elif spent[row]:
                self._finish(sequence, FinishReason.LENGTH)
            else:
                self._emit(sequence, self._chunk(sequence, None))
                self._hold_if_blocked(sequence)
        if self._order is not None:
            self._slots.refresh(order)

    def _hold_if_blocked(self, sequence: RunningCall) -> None:
        if sequence.backlog.blocked:
            self._write_back()
            self._slots.hold(sequence.slot, self._step)
            self._held[sequence] = time.monotonic()
            self._counters.held_back += 1

    def release_unblocked(self) -> None:
        """Continue held calls whose callers have saved enough tokens."""
        for sequence in [s for s in self._held if not s.backlog.blocked]:
            self._write_back()
            del self._held[sequence]
            self._slots.release(sequence.slot, self._step)
            self.cache.trim(sequence.slot, int(self._slots.cached(sequence.slot, self._step)))

    def end_held(self, since: float) -> None:
        """End calls as interrupted that have been held since ``since`` (monotonic seconds) or longer."""
        self.interrupt([s for s, at in self._held.items() if at <= since])

    def interrupt(self, sequences: Iterable[RunningCall]) -> None:
        """End running calls as interrupted with their current tokens."""
        for sequence in sequences:
            self._finish(sequence, FinishReason.INTERRUPTED)

    def drop(self, sequence: RunningCall) -> None:
        """Remove a running call whose caller has disconnected."""
        self._leave(sequence)

    def swap(self, policy_version: int) -> None:
        """Close every open chunk under the old version; further tokens carry the new one.

        Running calls keep their cache and its kv_min_version. A call with tokens of a newer version than the new one
        ends as interrupted. Cached prompts have the old version, so calls that start later must not copy them.
        """
        for sequence in self._slots.running():
            undelivered = self._slots.undelivered(sequence.slot, self._step)
            if policy_version < (self.policy_version if undelivered else sequence.newest_version):
                self._finish(sequence, FinishReason.INTERRUPTED)
            elif undelivered:
                self._emit(sequence, self._chunk(sequence, None))
        if self._order is not None:
            self._slots.refresh(self._order)
        self.policy_version = policy_version
        self._donors.clear()
        self._donated.clear()

    def make_room(self) -> list[RunningCall]:
        """Move rows that have outgrown their tier; returns the calls preempted for lack of cache.

        Held calls end first, as interrupted. Then the youngest call is preempted, so the oldest call always continues
        and the queue always advances.
        """
        preempted: list[RunningCall] = []
        if self._order is not None and self._step < self._plan_until:
            return preempted
        # Widest first: a tier must move its outgrown rows before it receives others.
        for tier in reversed(self.cache.tiers[:-1]):
            while grown := self._grown(tier):
                gain = self.cache.next_width(grown[0]) - tier.width
                if self.cache.has_room([gain] * len(grown)):
                    self._write_back()
                    self.cache.promote(tier, grown)
                elif self._held:
                    self.interrupt([max(self._held, key=lambda s: s.arrival)])
                else:
                    preempted.append(self._preempt_youngest())
        return preempted

    def _preempt_youngest(self) -> RunningCall:
        victim = max(self._slots.running(), key=lambda s: s.arrival)
        if self._slots.undelivered(victim.slot, self._step):
            self._emit(victim, self._chunk(victim, None))
        self._leave(victim)
        self._counters.preemptions += 1
        return victim

    def _grown(self, tier: Tier) -> list[int]:
        lengths = self._slots.cached(np.array(tier.slots, np.int64), self._step)
        return [tier.slots[i] for i in np.flatnonzero(lengths >= tier.width)]

    def _chunk(self, sequence: RunningCall, reason: FinishReason | None) -> Chunk:
        chunk = self._slots.take_chunk(sequence, self._step, self.policy_version, reason)
        if len(chunk.token_ids):
            sequence.newest_version = self.policy_version
            sequence.backlog.add(len(chunk.token_ids))
        return chunk

    def _finish(self, sequence: RunningCall, reason: FinishReason) -> None:
        self._emit(sequence, self._chunk(sequence, reason))
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.response_lengths.append(sequence.position)
        self._leave(sequence)

    def _fail(self, sequence: RunningCall) -> None:
        name = sequence.call.trajectory_id
        error = EngineError(f"the logits of {name} are not finite under policy version {self.policy_version}")
        self._emit(sequence, error)
        self._leave(sequence)

    def _leave(self, sequence: RunningCall) -> None:
        self._write_back()
        slot = sequence.slot
        self._held.pop(sequence, None)
        self.cache.remove(slot)
        self._slots.vacate(slot)
        key = self._donated.pop(slot, None)
        if key is not None:
            self._donors[key].discard(slot)
            if not self._donors[key]:
                del self._donors[key]

    def _write_back(self) -> None:
        """Write the state in row order back to the slots before rows move."""
        if self._order is not None:
            self._slots.last_tokens[self._order.slots] = self._tokens.cpu().numpy()
            self._order = None
            self._plan_until = self._step
            self._stepper.release()

    def _prepare_step(self) -> RowOrder:
        if self._order is None:
            self.cache.hold({s.slot for s in self._held})
            tiers = self.cache.tiers
            self._rows = np.array([slot for tier in tiers for slot in tier.slots], np.int64)
            slots = np.array([slot for tier in tiers for slot in tier.slots[: tier.active_count]], np.int64)
            self._order = self._slots.arrange(slots, self._step)
            self._tokens = torch.from_numpy(self._slots.last_tokens[slots]).to(self.model.device)
            self._plan_until = self._step
        if self._step >= self._plan_until:
            lengths = self._slots.cached(self._rows, self._step)
            self._plan_until = self._step + self._stepper.prepare(lengths)
        return self._order
