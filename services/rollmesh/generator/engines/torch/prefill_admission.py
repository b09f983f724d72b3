"""Which calls may start and how their prefill is batched: pure functions over lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_QUANTILE = 0.8


def remaining_estimate(generated: Int64Array, budget: Int64Array, history: Int64Array) -> Int64Array:
    """Tokens that calls will still generate, int64 [calls].

    The 0.8 quantile of the finished response lengths in ``history`` (ascending) among those longer than what a call
    has ``generated`` already, bounded by its ``budget``; the whole budget where history knows no longer response.
    """
    shorter = np.searchsorted(history, generated, side="right")
    longer = len(history) - shorter
    pick = shorter + (_QUANTILE * np.maximum(longer - 1, 0)).astype(np.int64)
    known = history[np.minimum(pick, len(history) - 1)] - generated if len(history) else budget
    return np.where(longer > 0, np.minimum(known, budget), budget)


def peak_tokens(lengths: Int64Array, remaining: Int64Array) -> int:
    """Most tokens in the cache at any moment until all calls have finished, if none joins.

    Past-Future scheduling: the total peaks just before some call ends. Sorted by remaining tokens, descending, the
    peak before call i ends is the sum of the first i lengths plus i times its remaining tokens.
    """
    if not len(lengths):
        return 0
    order = np.argsort(-remaining, kind="stable")
    left = remaining[order]
    return int((np.cumsum(lengths[order]) + np.arange(1, len(left) + 1) * left).max())


def prefill_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of ``lengths`` in batches: longest first, each at most ``token_budget`` tokens with padding.

    A single context longer than the budget is a batch of its own.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
