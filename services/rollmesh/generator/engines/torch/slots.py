"""Arrays of per-slot numbers of the running calls, so that a decode step reads no Python objects.

A call keeps its slot index until it ends, while rows of the cache move. A number that increases by one per step is
stored minus the step count, so that a step updates no array. ``arrange`` gathers the row order once per change of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rollmesh.generator.engines.torch.running_call import RunningCall
from rollmesh.generator.engines.torch.sampling import Restriction, StepSampling, UInt64Array, uniforms
from rollmesh.types import Chunk, FinishReason

BoolArray = npt.NDArray[np.bool_]
Float32Array = npt.NDArray[np.float32]
Int64Array = npt.NDArray[np.int64]

_NOT_HELD = np.iinfo(np.int64).max

HISTORY = 256
"""Capacity of a slot for tokens not yet delivered; also the longest chunk."""


_NOISE_STEPS = 8
"""Steps whose noise is computed at once."""


@dataclass(slots=True, kw_only=True)
class RowOrder:
    """The running slots in cache order, with the arrays that each step reads."""

    slots: Int64Array  # [rows]
    keys: UInt64Array  # [rows]
    positions: Int64Array  # [rows], positions of the next tokens, minus the step count
    stops: Int64Array  # [rows, most stop ids], -1 where unused
    common_stop: np.int64 | None
    """Single stop id shared by every row, or None; compared without a second dimension."""
    emit_at: Int64Array  # [rows]
    finish_at: Int64Array  # [rows]
    sampling: StepSampling
    next_event: int
    """Step count at which the next chunk is due or a budget ends."""
    noise: torch.Tensor  # float64 [steps, rows, 1]
    noise_from: int
    """Step count of the first row of ``noise``."""

    def noise_at(self, step: int) -> torch.Tensor:
        """Return the uniform numbers of one step, float64 [rows, 1]."""
        ahead = step - self.noise_from
        if ahead >= len(self.noise):
            steps = step + np.arange(_NOISE_STEPS)[:, None]
            self.noise = (
                torch.from_numpy(uniforms(self.keys, self.positions + steps)).unsqueeze(2).to(self.noise.device)
            )
            self.noise_from, ahead = step, 0
        return self.noise[ahead]

    def stopped(self, tokens: Int64Array) -> BoolArray:
        """Return a mask of the rows that drew one of their stop ids, [rows]."""
        if self.common_stop is not None:
            found: BoolArray = tokens == self.common_stop
        else:
            found = (self.stops == tokens[:, None]).any(axis=1)
        return found

    def schedule(self) -> None:
        """Recompute ``next_event``."""
        self.next_event = int(min(self.emit_at.min(), self.finish_at.min()))


class SlotTable:
    """Arrays indexed by slot, and the ring buffer of tokens not yet delivered."""

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self.sequences: list[RunningCall | None] = [None] * count
        self.free = list(range(count - 1, -1, -1))
        self.last_tokens = np.zeros(count, np.int64)
        self.lengths = np.zeros(count, np.int64)
        """Cached tokens minus the step count."""
        self.length_sum = 0
        """Sum of ``lengths`` over the active calls and of cached tokens over the held calls."""
        self._held_at = np.full(count, _NOT_HELD)
        """Step count at which a call was held; the numbers of its slot count no later step."""
        self._vocab_size = vocab_size
        self._device = device
        self._keys = np.zeros(count, np.uint64)
        self._positions = np.zeros(count, np.int64)
        self._temperatures = np.ones(count, np.float64)
        self._top_p = np.ones(count, np.float64)
        self._top_k = np.zeros(count, np.int64)
        self._stops = np.full((count, 1), -1, np.int64)
        self._emit_at = np.zeros(count, np.int64)
        self._sent_at = np.zeros(count, np.int64)
        self._finish_at = np.zeros(count, np.int64)
        self._tokens = np.zeros((count, HISTORY), np.int32)
        self._logprobs = np.zeros((count, HISTORY), np.float32)
        self._recorded: list[tuple[Int64Array, Float32Array]] = []
        self._recorded_slots = np.zeros(0, np.int64)
        self._recorded_from = 0

    def running(self) -> list[RunningCall]:
        """Return the running calls in slot order."""
        return [s for s in self.sequences if s is not None]

    def occupy(self, sequence: RunningCall, last_token: int, cached: int, step: int) -> int:
        """Take a free slot for a call whose first ``cached`` tokens are in the cache."""
        slot = self.free.pop()
        sampling = sequence.call.sampling
        sequence.slot = slot
        self.sequences[slot] = sequence
        self.last_tokens[slot] = last_token
        self.lengths[slot] = cached - step
        self.length_sum += cached - step
        self._keys[slot] = sequence.noise_key
        self._positions[slot] = sequence.position - step
        self._temperatures[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._set_stops(slot, sampling.stop_token_ids)
        self._sent_at[slot] = step
        self._emit_at[slot] = self._next_emit(sequence, step)
        self._finish_at[slot] = step + sequence.budget - sequence.written_count
        return slot

    def vacate(self, slot: int) -> None:
        """Release a slot."""
        sequence = self.sequences[slot]
        assert sequence is not None
        sequence.slot = -1
        held_at = int(self._held_at[slot])
        self.length_sum -= int(self.lengths[slot]) + (held_at if held_at != _NOT_HELD else 0)
        self._held_at[slot] = _NOT_HELD
        self.sequences[slot] = None
        self.free.append(slot)

    def hold(self, slot: int, step: int) -> None:
        """Stop counting steps for a slot; all its tokens must be delivered."""
        self._held_at[slot] = step
        self.length_sum += step

    def release(self, slot: int, step: int) -> None:
        """Count steps for a held slot again; steps during the hold do not count."""
        sequence = self.sequences[slot]
        assert sequence is not None
        missed = step - self._held_at[slot]
        self.lengths[slot] -= missed
        self._positions[slot] -= missed
        self._finish_at[slot] += missed
        self._sent_at[slot] = step
        self._emit_at[slot] = self._next_emit(sequence, step)
        self._held_at[slot] = _NOT_HELD
        self.length_sum -= step

    def cached(self, slots: int | Int64Array, step: int) -> Int64Array:
        """Return the cached tokens of these slots, int64 [slots]."""
        found: Int64Array = self.lengths[slots] + self._now(slots, step)
        return found

    def record(self, tokens: Int64Array, logprobs: Float32Array) -> None:
        """Store the tokens of one step, [rows] each, in the order of the last ``arrange``."""
        self._recorded.append((tokens, logprobs))

    def _store_recorded(self) -> None:
        """Move recorded tokens from row order to the slots; many steps cost little more than one."""
        if not self._recorded:
            return
        tokens, logprobs = (np.stack(column, axis=1) for column in zip(*self._recorded, strict=True))
        columns = np.arange(self._recorded_from, self._recorded_from + len(self._recorded)) % HISTORY
        place = (self._recorded_slots[:, None], columns)
        self._tokens[place] = tokens
        self._logprobs[place] = logprobs
        self._recorded_from += len(self._recorded)
        self._recorded.clear()

    def undelivered(self, slot: int, step: int) -> int:
        """Return the number of tokens sampled for a slot and not yet in a chunk."""
        return int(self._now(slot, step) - self._sent_at[slot])

    def take_chunk(self, sequence: RunningCall, step: int, version: int, reason: FinishReason | None) -> Chunk:
        """Cut a chunk from the tokens not yet delivered."""
        self._store_recorded()
        slot = sequence.slot
        step = int(self._now(slot, step))
        columns = np.arange(self._sent_at[slot], step) % HISTORY
        chunk = Chunk(
            token_ids=self._tokens[slot, columns],
            behavior_logprobs=self._logprobs[slot, columns],
            policy_version=version,
            kv_min_version=sequence.kv_min_version,
            finish_reason=reason,
            cached_token_count=sequence.cached_token_count,
        )
        sequence.cached_token_count = 0
        sequence.written.append(chunk.token_ids)
        sequence.written_count += len(chunk.token_ids)
        self._sent_at[slot] = step
        self._emit_at[slot] = self._next_emit(sequence, step)
        return chunk

    def arrange(self, slots: Int64Array, step: int) -> RowOrder:
        """Gather the arrays in the order of ``slots`` (the rows of the cache)."""
        self._store_recorded()
        self._recorded_slots, self._recorded_from = slots, step
        stops = self._stops[slots]
        order = RowOrder(
            slots=slots,
            keys=self._keys[slots],
            positions=self._positions[slots],
            stops=stops,
            common_stop=stops[0, 0] if stops.shape[1] == 1 and (stops == stops[0, 0]).all() else None,
            emit_at=self._emit_at[slots],
            finish_at=self._finish_at[slots],
            sampling=self._step_sampling(slots),
            next_event=0,
            noise=torch.empty(0, dtype=torch.float64, device=self._device),
            noise_from=step,
        )
        order.schedule()
        return order

    def refresh(self, order: RowOrder) -> None:
        """Copy new chunk times into ``order`` after an event that moved no row."""
        order.emit_at = self._emit_at[order.slots]
        order.schedule()

    def generated(self, step: int) -> tuple[Int64Array, Int64Array]:
        """Return response positions and remaining budgets of the running calls, int64 [running] each."""
        slots = np.array([s.slot for s in self.running()], np.int64)
        now = self._now(slots, step)
        return self._positions[slots] + now, self._finish_at[slots] - now

    def _now(self, slots: int | Int64Array, step: int) -> Int64Array:
        """Return the step count to which the numbers of these slots are relative."""
        now: Int64Array = np.minimum(step, self._held_at[slots])
        return now

    def _next_emit(self, sequence: RunningCall, step: int) -> int:
        # Aligned over all calls: one wake-up of the asyncio thread delivers the chunks of every running call.
        size = min(sequence.call.chunk_token_count, HISTORY)
        return (step // size + 1) * size

    def _set_stops(self, slot: int, stops: tuple[int, ...]) -> None:
        width = self._stops.shape[1]
        if len(stops) > width:
            wider = np.full((len(self._stops), len(stops) - width), -1, np.int64)
            self._stops = np.concatenate((self._stops, wider), axis=1)
        self._stops[slot] = -1
        self._stops[slot, : len(stops)] = stops

    def _step_sampling(self, slots: Int64Array) -> StepSampling:
        temperature = self._temperatures[slots]
        greedy = temperature == 0
        inverse = None
        if (temperature != 1.0).any():
            factors = 1.0 / np.where(greedy, 1.0, temperature)
            inverse = self._column(factors.astype(np.float32))
        top_p, top_k = self._top_p[slots], self._top_k[slots]
        restricted = np.flatnonzero((top_p < 1.0) | (top_k > 0))
        restriction = None
        if len(restricted):
            keep = np.where(top_k > 0, top_k, self._vocab_size)[restricted]
            restriction = Restriction(
                rows=torch.from_numpy(restricted).to(self._device),
                top_p=self._column(top_p[restricted]),
                top_k=self._column(keep),
            )
        return StepSampling(
            inverse_temperature=inverse,
            greedy=self._column(greedy) if greedy.any() else None,
            restriction=restriction,
        )

    def _column(self, values: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(values).unsqueeze(1).to(self._device)
