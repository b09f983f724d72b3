"""Admission of calls and batching of their prefill: pure functions over lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_QUANTILE = 0.8


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


def prefill_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group indices of ``lengths`` into batches, longest first, of at most ``token_budget`` tokens with padding.

    A single context longer than the budget is a separate batch.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
