"""Tokens sampled by the running calls: how many each has, and those not yet delivered."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rollmesh.types import Float32Array, Int32Array

Int64Array = npt.NDArray[np.int64]

CAPACITY = 256
"""Number of undelivered tokens that a slot can hold; also the longest chunk."""


class SampledTokens:
    """Token count and latest tokens of every slot.

    A decode step only appends its tokens to a list. They move to the slots when a count or a token is read, so many
    steps cost little more than one. No other class knows how many tokens a step samples for a row.
    """

    def __init__(self, slot_count: int) -> None:
        self._counts = np.zeros(slot_count, np.int64)
        self._tokens = np.zeros((slot_count, CAPACITY), np.int32)
        self._logprobs = np.zeros((slot_count, CAPACITY), np.float32)
        self._rows = np.zeros(0, np.int64)
        """Slot of each row of a step."""
        self._steps: list[tuple[Int64Array, Float32Array]] = []
        """Token ids and log-probabilities of the steps that the slots do not have yet, [rows] each."""

    def arrange(self, slots: Int64Array) -> None:
        """Set the slot of each row of the next steps; slots without a row sample no token."""
        self._store()
        self._rows = slots

    def append(self, tokens: Int64Array, logprobs: Float32Array) -> None:
        """Add the tokens of one step, [rows] each."""
        self._steps.append((tokens, logprobs))

    def reset(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._store()
        self._counts[slot] = 0

    def counts(self, slots: int | Int64Array) -> Int64Array:
        """Return the number of tokens sampled for these slots, int64 [slots]."""
        self._store()
        found: Int64Array = self._counts[slots]
        return found

    def since(self, slot: int, start: int) -> tuple[Int32Array, Float32Array]:
        """Return the token ids and log-probabilities of a slot after its first ``start`` tokens."""
        self._store()
        columns = np.arange(start, self._counts[slot]) % CAPACITY
        return self._tokens[slot, columns], self._logprobs[slot, columns]

    def _store(self) -> None:
        if not self._steps:
            return
        tokens, logprobs = (np.stack(column, axis=1) for column in zip(*self._steps, strict=True))
        numbers = self._counts[self._rows][:, None] + np.arange(len(self._steps))
        place = (self._rows[:, None], numbers % CAPACITY)
        self._tokens[place] = tokens
        self._logprobs[place] = logprobs
        self._counts[self._rows] += len(self._steps)
        self._steps.clear()
