"""Arrays of per-slot numbers of the running calls, so that a decode step reads no Python objects.

A call keeps its slot index until it ends, while rows of the cache move. ``arrange`` gathers the row order once per
change of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from rollmesh.generator.engines.torch.adapter_stack import BASE
from rollmesh.generator.engines.torch.running_call import RunningCall
from rollmesh.generator.engines.torch.sampled_tokens import CAPACITY, Int64Array, SampledTokens
from rollmesh.generator.engines.torch.sampling import Restriction, StepSampling, UInt64Array, uniforms
from rollmesh.types import Chunk, FinishReason, Float32Array

BoolArray = npt.NDArray[np.bool_]

_NOISE_STEPS = 8
"""Steps whose noise is computed at once."""


@dataclass(slots=True, kw_only=True)
class RowOrder:
    """The running slots in cache order, with the arrays that each step reads."""

    slots: Int64Array  # [rows]
    stops: Int64Array  # [rows, most stop ids], -1 where unused
    common_stop: np.int64 | None
    """Single stop id shared by every row, or None; compared without a second dimension."""
    sampling: StepSampling
    steps_left: int
    """Steps until the next chunk is due or a budget ends."""
    keys: UInt64Array  # [rows]
    positions: Int64Array  # [rows], positions of the next tokens without ``noise``
    noise: list[torch.Tensor] = field(default_factory=list)
    """Uniform numbers of the next steps, the last step first, float64 [rows, 1] each."""
    device: torch.device

    def next_noise(self) -> torch.Tensor:
        """Return the uniform numbers of the next step, float64 [rows, 1]."""
        if not self.noise:
            ahead = np.arange(_NOISE_STEPS)[::-1, None]
            numbers = torch.from_numpy(uniforms(self.keys, self.positions + ahead)).unsqueeze(2)
            self.noise = list(numbers.to(self.device).unbind())
            self.positions = self.positions + _NOISE_STEPS
        return self.noise.pop()

    def stopped(self, tokens: Int64Array) -> BoolArray:
        """Return a mask of the rows that drew one of their stop ids, [rows]."""
        if self.common_stop is not None:
            found: BoolArray = tokens == self.common_stop
        else:
            found = (self.stops == tokens[:, None]).any(axis=1)
        return found


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
        self._temperatures = np.ones(count, np.float64)
        self._top_p = np.ones(count, np.float64)
        self._top_k = np.zeros(count, np.int64)
        self._stops = np.full((count, 1), -1, np.int64)
        self._delivered = np.zeros(count, np.int64)
        self._due_at = np.zeros(count, np.int64)
        """Number of tokens at which the next chunk is due."""
        self._budgets = np.zeros(count, np.int64)
        self.places = np.full(count, BASE)
        """Places of the calls' adapters in the stack."""

    def running(self) -> list[RunningCall]:
        """Return the running calls in slot order."""
        return [c for c in self.calls if c is not None]

    def occupy(self, call: RunningCall, last_token: int, cached: int, place: int = BASE) -> int:
        """Take a free slot for a call whose first ``cached`` tokens are in the cache, with the adapter in ``place``."""
        slot = self.free.pop()
        sampling = call.request.sampling
        call.slot = slot
        self.calls[slot] = call
        self._sampled.reset(slot)
        self.last_tokens[slot] = last_token
        self.places[slot] = place
        self.cached_total += cached
        self._prefilled[slot] = cached
        self._keys[slot] = call.noise_key
        self._positions[slot] = call.position
        self._temperatures[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._top_k[slot] = sampling.top_k
        self._set_stops(slot, sampling.stop_token_ids)
        self._delivered[slot] = 0
        self._budgets[slot] = call.budget - call.written_count
        self.schedule_chunk(call)
        return slot

    def vacate(self, slot: int) -> None:
        """Release a slot."""
        call = self.calls[slot]
        assert call is not None
        call.slot = -1
        self.cached_total -= int(self.cached(slot))
        self.calls[slot] = None
        self.free.append(slot)

    def cached(self, slots: int | Int64Array) -> Int64Array:
        """Return the cached tokens of these slots, int64 [slots]."""
        found: Int64Array = self._prefilled[slots] + self._sampled.counts(slots)
        return found

    def record(self, tokens: Int64Array, logprobs: Float32Array) -> None:
        """Store the tokens of one step, [rows] each, in the order of the last ``arrange``."""
        self._sampled.append(tokens, logprobs)
        self.cached_total += len(tokens)
        self._step_count += 1

    def undelivered(self, slot: int) -> int:
        """Return the number of tokens sampled for a slot and not yet in a chunk."""
        return int(self._sampled.counts(slot) - self._delivered[slot])

    def schedule_chunk(self, call: RunningCall) -> None:
        """Set the end of a call's next chunk; all its tokens must be delivered.

        Chunks are aligned over all calls: one wake-up of the asyncio thread delivers those of every running call.
        """
        size = min(call.request.chunk_token_count, CAPACITY)
        self._due_at[call.slot] = self._delivered[call.slot] + size - self._step_count % size

    def take_chunk(self, call: RunningCall, version: int, reason: FinishReason | None) -> Chunk:
        """Cut a chunk from the tokens not yet delivered."""
        token_ids, logprobs = self._sampled.since(call.slot, int(self._delivered[call.slot]))
        chunk = Chunk(
            token_ids=token_ids,
            behavior_logprobs=logprobs,
            policy_version=version,
            kv_min_version=call.kv_min_version,
            finish_reason=reason,
            cached_token_count=call.cached_token_count,
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
        return RowOrder(
            slots=slots,
            stops=stops,
            common_stop=stops[0, 0] if stops.shape[1] == 1 and (stops == stops[0, 0]).all() else None,
            sampling=self._step_sampling(slots),
            steps_left=self.steps_left(slots),
            keys=self._keys[slots],
            positions=self._positions[slots] + self._sampled.counts(slots),
            device=self._device,
        )

    def steps_left(self, slots: Int64Array) -> int:
        """Return the number of steps until a chunk of these slots is due or a budget ends."""
        return int((np.minimum(self._due_at[slots], self._budgets[slots]) - self._sampled.counts(slots)).min())

    def due(self, slots: Int64Array) -> tuple[BoolArray, BoolArray]:
        """Return masks of the slots whose next chunk is due and of those whose budget is used up, [slots] each."""
        counts = self._sampled.counts(slots)
        return counts >= self._due_at[slots], counts >= self._budgets[slots]

    def load(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return cached tokens, response positions and remaining budgets of the running calls, int64 [running] each."""
        slots = np.array([c.slot for c in self.running()], np.int64)
        counts = self._sampled.counts(slots)
        return self._prefilled[slots] + counts, self._positions[slots] + counts, self._budgets[slots] - counts

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
