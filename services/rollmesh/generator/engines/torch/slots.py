"""Running calls, and their numbers in arrays by slot, so that a decode step reads no Python objects.

A call keeps its slot until it ends, while rows of the cache move. ``SlotTable.arrange`` gathers the row order once per
change of rows.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.drafts import COMPARED
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.sampling import PARAMETERS, BoolArray, RowOrder, StepSampling, noise_key
from rollmesh.kept_sets import split_sets, stack_sets
from rollmesh.types import Chunk, FinishReason, Float32Array, GenerationCall, Int32Array, KeptSets

CAPACITY = 256
"""Number of undelivered tokens that a slot can hold; also the longest chunk."""
_RING = CAPACITY + COMPARED
"""Places for tokens of a slot: also for those of a wide step that are not kept, fewer than ``COMPARED``."""


@dataclass(slots=True, eq=False, kw_only=True)
class RunningCall:
    """State of a call from its arrival to its last chunk."""

    request: GenerationCall
    deliver: Callable[[Chunk | Exception], None]
    """Function that passes a chunk or the final error to the caller; runs in the asyncio thread."""
    budget: int
    """Maximum number of tokens to sample: the call's limit, or the room left in the context."""
    noise_key: int = field(init=False)
    backlog: Backlog = field(init=False)
    arrival: int = 0
    slot: int = -1
    """Slot of a running call; -1 while waiting."""
    written: list[Int32Array] = field(default_factory=list)
    """Delivered tokens, for a new prefill after a preemption."""
    written_count: int = 0
    adapter_version: int | None = None
    """Version of the adapter that the call began with and finishes on; None before that, and without adapters."""
    kv_min_version: int = 0
    newest_version: int = -1
    """Newest policy version of the call's tokens and cache; later tokens never have an older version."""
    cached_token_count: int = 0
    """Prompt tokens copied from another call's cache, reported with the next chunk."""

    def __post_init__(self) -> None:
        self.noise_key = noise_key(self.request.sampling.seed, self.request.trajectory_id)
        self.backlog = Backlog.of(self.request)

    @property
    def started(self) -> bool:
        return self.written_count > 0

    @property
    def position(self) -> int:
        """Number of response tokens so far, including those of earlier calls."""
        return len(self.request.context_ids) - self.request.prompt_token_count + self.written_count

    def context_ids(self) -> Int32Array:
        """Return all tokens before the next one, int32 [tokens]."""
        return np.concatenate((self.request.context_ids, *self.written)) if self.written else self.request.context_ids


class SlotTable:
    """Arrays indexed by slot; numbers of tokens count from the start of the call in the slot."""

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self.calls: list[RunningCall | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.last_tokens = np.zeros(count, np.int64)
        self.cached_total = 0
        """Cached tokens of all slots."""
        self._vocab_size = vocab_size
        self._device = device
        self._step_count = 0
        self._sampled = SampledTokens(count)
        self._prefilled = np.zeros(count, np.int64)
        self._keys = np.zeros(count, np.uint64)
        self._positions = np.zeros(count, np.int64)
        """Response positions of the first tokens."""
        self._sampling = np.zeros(count, PARAMETERS)
        self._sets: list[list[Int32Array]] = [[] for _ in range(count)]
        """Kept sets of the undelivered tokens."""
        self._keeping = np.zeros(0, np.int64)
        """Slots of the arranged rows that keep sets."""
        self._stops = np.full((count, 1), -1, np.int64)
        self._delivered = np.zeros(count, np.int64)
        self._due_at = np.zeros(count, np.int64)
        """Number of tokens at which the next chunk is due."""
        self._budgets = np.zeros(count, np.int64)
        self.places = np.full(count, BASE)
        """Places of the calls' adapters in the stack."""

    def running(self) -> list[RunningCall]:
        return [c for c in self.calls if c is not None]

    def occupy(self, call: RunningCall, last_token: int, cached: int, place: int = BASE) -> int:
        """Take a free slot for a call whose first ``cached`` tokens are in the cache, with the adapter in ``place``."""
        slot = self.free.pop()
        sampling = call.request.sampling
        call.slot = slot
        self.calls[slot] = call
        self._sampled.reset(slot, call.context_ids()[-COMPARED:])
        self.last_tokens[slot] = last_token
        self.places[slot] = place
        self.cached_total += cached
        self._prefilled[slot] = cached
        self._keys[slot] = call.noise_key
        self._positions[slot] = call.position
        self._sampling[slot] = tuple(getattr(sampling, name) for name in PARAMETERS.names or ())
        self._sets[slot] = []
        stops = sampling.stop_token_ids
        if (missing := len(stops) - self._stops.shape[1]) > 0:
            self._stops = np.pad(self._stops, ((0, 0), (0, missing)), constant_values=-1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops
        self._delivered[slot] = 0
        self._budgets[slot] = call.budget - call.written_count
        self.schedule_chunk(call)
        return slot

    def vacate(self, slot: int) -> None:
        call = self.calls[slot]
        assert call is not None
        call.slot = -1
        self.cached_total -= int(self.cached(slot))
        self.calls[slot] = None
        self.free.append(slot)

    def cached(self, slots: int | Int64Array) -> Int64Array:
        found: Int64Array = self._prefilled[slots] + self._sampled.counts(slots)
        return found

    def record(self, tokens: Int64Array, logprobs: Float32Array, sets: KeptSets | None) -> None:
        """Store the tokens of one step, [rows] each, in the order of the last ``arrange``."""
        self._sampled.append(tokens, logprobs)
        if sets is not None:
            for slot, ids in zip(self._keeping, split_sets(sets), strict=True):
                self._sets[slot].append(ids)
        self.cached_total += len(tokens)
        self._step_count += 1

    def record_wide(
        self,
        counts: Int64Array,
        total: int,
        tokens: Int64Array,
        logprobs: Float32Array,
        sets: Iterable[tuple[int, Int32Array]],
    ) -> None:
        """Store the first ``counts`` tokens of each row of a wide step, ``total``, and kept sets with their slots."""
        self._sampled.append_uneven(counts, tokens, logprobs)
        for slot, ids in sets:
            self._sets[slot].append(ids)
        self.cached_total += total
        self._step_count += 1

    def recent(self, slot: int) -> bytes:
        """Return the last ``COMPARED`` tokens of a call, int32, with zeros before its context."""
        return self._sampled.newest(slot)

    def room(self, slots: Int64Array) -> Int64Array:
        """Return the tokens that each slot may sample until its next chunk is due or its budget ends, [slots]."""
        left: Int64Array = np.minimum(self._due_at[slots], self._budgets[slots]) - self._sampled.counts(slots)
        return left

    def sampling_of(self, slots: Int64Array) -> StepSampling:
        """Return the sampling parameters of a step with a token of each of the ``slots``."""
        return StepSampling.of_rows(self._sampling[slots], self._vocab_size, self._device)

    def undelivered(self, slot: int) -> int:
        return int(self._sampled.counts(slot) - self._delivered[slot])

    def schedule_chunk(self, call: RunningCall) -> None:
        """Set the end of a call's next chunk; all its tokens must be delivered.

        Chunks are aligned over all calls: one wake-up of the asyncio thread delivers those of every running call.
        """
        size = min(call.request.chunk_token_count, CAPACITY)
        self._due_at[call.slot] = self._delivered[call.slot] + size - self._step_count % size

    def take_chunk(self, call: RunningCall, version: int, reason: FinishReason | None) -> Chunk:
        token_ids, logprobs = self._sampled.since(call.slot, int(self._delivered[call.slot]))
        sets, self._sets[call.slot] = self._sets[call.slot], []
        chunk = Chunk(
            token_ids=token_ids,
            behavior_logprobs=logprobs,
            policy_version=version,
            kv_min_version=call.kv_min_version,
            finish_reason=reason,
            cached_token_count=call.cached_token_count,
            kept_sets=stack_sets(sets) if sets else None,
        )
        call.cached_token_count = 0
        call.written.append(token_ids)
        call.written_count += len(token_ids)
        self._delivered[call.slot] += len(token_ids)
        self.schedule_chunk(call)
        return chunk

    def arrange(self, slots: Int64Array) -> RowOrder:
        """Gather the arrays in the order of ``slots`` (the rows of the cache)."""
        self._sampled.arrange(slots)
        stops = self._stops[slots]
        sampling = self.sampling_of(slots)
        self._keeping = slots[sampling.keeping]
        return RowOrder(
            slots=slots,
            stops=stops,
            stop_ids=frozenset(stops[stops >= 0].tolist()),
            sampling=sampling,
            steps_left=self.steps_left(slots),
            keys=self._keys[slots],
            positions=self._positions[slots] + self._sampled.counts(slots),
            device=self._device,
        )

    def steps_left(self, slots: Int64Array) -> int:
        """Return the number of steps until a chunk of these slots is due or a budget ends."""
        return int(self.room(slots).min())

    def due(self, slots: Int64Array) -> tuple[BoolArray, BoolArray]:
        """Return masks of the slots whose next chunk is due and of those whose budget is used up, [slots] each."""
        counts = self._sampled.counts(slots)
        return counts >= self._due_at[slots], counts >= self._budgets[slots]

    def load(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return cached tokens, response positions and remaining budgets of the running calls, int64 [running] each."""
        slots = np.array([c.slot for c in self.running()], np.int64)
        counts = self._sampled.counts(slots)
        return self._prefilled[slots] + counts, self._positions[slots] + counts, self._budgets[slots] - counts


class SampledTokens:
    """Token count and latest tokens of every slot.

    A decode step only appends its tokens to a list. They move to the slots when a count or a token is read, so many
    steps cost little more than one. No other class knows how many tokens a step samples for a row.
    """

    def __init__(self, slot_count: int) -> None:
        self._counts = np.zeros(slot_count, np.int64)
        self._tokens = np.zeros((slot_count, _RING), np.int32)
        self._logprobs = np.zeros((slot_count, _RING), np.float32)
        self._rows = np.zeros(0, np.int64)
        """Slot of each row of a step."""
        self._steps: list[tuple[Int64Array, Float32Array]] = []
        """Token ids and log-probabilities of the steps that the slots do not have yet, [rows] each."""

    def arrange(self, slots: Int64Array) -> None:
        """Set the slot of each row of the next steps; slots without a row sample no token."""
        self._store()
        self._rows = slots

    def append(self, tokens: Int64Array, logprobs: Float32Array) -> None:
        self._steps.append((tokens, logprobs))

    def append_uneven(self, counts: Int64Array, tokens: Int64Array, logprobs: Float32Array) -> None:
        """Append the first ``counts`` tokens of each row, [rows, tokens]; those behind them are overwritten later."""
        assert tokens.shape[1] <= COMPARED
        self._store()
        before = self._counts[self._rows]
        place = (self._rows[:, None], (before[:, None] + np.arange(tokens.shape[1])) % _RING)
        self._tokens[place] = tokens
        self._logprobs[place] = logprobs
        self._counts[self._rows] = before + counts

    def reset(self, slot: int, before: Int32Array) -> None:
        """Start to count the tokens of a slot, which continue those ``before``."""
        self._store()
        self._counts[slot] = 0
        self._tokens[slot, -COMPARED:] = 0
        self._tokens[slot, _RING - len(before) :] = before

    def counts(self, slots: int | Int64Array) -> Int64Array:
        self._store()
        found: Int64Array = self._counts[slots]
        return found

    def since(self, slot: int, start: int) -> tuple[Int32Array, Float32Array]:
        """Return the token ids and log-probabilities of a slot after its first ``start`` tokens."""
        self._store()
        columns = np.arange(start, self._counts[slot]) % _RING
        return self._tokens[slot, columns], self._logprobs[slot, columns]

    def newest(self, slot: int) -> bytes:
        """Return the last ``COMPARED`` tokens of a slot and those before, int32."""
        stop = int(self.counts(slot)) % _RING
        row = self._tokens[slot]
        parts = (row[stop - COMPARED : stop],) if stop >= COMPARED else (row[stop - COMPARED :], row[:stop])
        return b"".join(part.tobytes() for part in parts)

    def _store(self) -> None:
        if not self._steps:
            return
        if len(self._steps) == 1:
            place = (self._rows, self._counts[self._rows] % _RING)
            self._tokens[place], self._logprobs[place] = self._steps.pop()
            self._counts[self._rows] += 1
            return
        tokens, logprobs = (np.stack(column, axis=1) for column in zip(*self._steps, strict=True))
        numbers = self._counts[self._rows][:, None] + np.arange(len(self._steps))
        place = (self._rows[:, None], numbers % _RING)
        self._tokens[place] = tokens
        self._logprobs[place] = logprobs
        self._counts[self._rows] += len(self._steps)
        self._steps.clear()
