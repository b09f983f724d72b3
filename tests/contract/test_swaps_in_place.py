"""Weights that are swapped under running requests whose cache is kept: which tokens the server counts as new."""

from __future__ import annotations

import pytest

from .served import TOLERANCE, Served


@pytest.mark.parametrize("endpoint", ["sglang-overlap", "sglang-serial"], indirect=True)
def test_a_swap_in_place_is_exact_on_a_serial_schedule_and_stamped_one_token_early_on_the_overlapping_one(
    served: Served, endpoint: tuple[str, str | None]
) -> None:
    """Overlapping, the step under way at the pause was computed with the old weights, and its token is counted as new.
    This is why keep_kv turns that schedule off; once this test fails, it need not any more."""
    early = int(endpoint[0] == "sglang-overlap")
    assert in_place_gap(served, shift=early) <= TOLERANCE
    assert in_place_gap(served, shift=1 - early) > TOLERANCE


def in_place_gap(served: Served, shift: int) -> float:
    """Swap version 0 for 1 under 8 requests without touching their cache; the largest gap to a model whose tokens up
    to ``shift`` past the stamped one came from the old weights."""
    served.reset()
    futures = served.paused_under(8, "in_place")
    assert served.load(1, flush_cache=False).status_code == 200
    served.resume()
    gaps = []
    for answer in (future.result() for future in futures):
        (old, _, end), (new, _, _) = answer.spans
        swap = len(answer.prompt) + end - 1 + shift
        gaps.append(answer.gap(served.policies.mixed_logprobs(old, new, answer.ids, swap)))
    return max(gaps)
