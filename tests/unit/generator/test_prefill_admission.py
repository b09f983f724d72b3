"""Estimates of the cache's peak and the batching of prefills."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generator.engines.torch.decoder_model import prefill_batches
from rollmesh.generator.engines.torch.model_thread import peak_tokens, remaining_estimate

lengths = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), min_size=1, max_size=12)


@given(lengths)
def test_the_peak_is_what_a_step_by_step_simulation_finds(calls):
    length, remaining = (np.array(x, np.int64) for x in zip(*calls, strict=True))
    peak = 0
    for step in range(int(remaining.max()) + 1):
        alive = remaining >= step
        peak = max(peak, int((length[alive] + step).sum()))
    assert peak_tokens(length, remaining) == peak


def test_nothing_running_has_no_peak():
    assert peak_tokens(np.empty(0, np.int64), np.empty(0, np.int64)) == 0


def test_estimates_use_longer_responses_only_and_never_exceed_the_budget():
    history = np.array([10, 20, 30, 40, 1000])
    estimate = remaining_estimate(np.array([0, 35, 2000, 0]), np.array([500, 500, 70, 12]), history)
    assert estimate.tolist() == [40, 5, 70, 12]
    assert remaining_estimate(np.array([3]), np.array([9]), np.empty(0, np.int64)).tolist() == [9]


@given(st.lists(st.integers(1, 300), max_size=30), st.integers(1, 400))
def test_prefill_batches_cover_everything_once_within_the_budget(counts, budget):
    batches = prefill_batches(counts, budget)
    assert sorted(i for b in batches for i in b) == list(range(len(counts)))
    for batch in batches:
        widths = [counts[i] for i in batch]
        assert widths == sorted(widths, reverse=True)
        assert len(batch) == 1 or len(batch) * widths[0] <= budget
