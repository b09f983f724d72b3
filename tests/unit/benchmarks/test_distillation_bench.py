"""The reverse KL of a bench's runs by windows of updates, and which of its rises are more than noise."""

from __future__ import annotations

import pytest

from benchmarks.distil import reverse_kl_windows, rises


def reports(*values: float) -> list[dict[str, dict[str, float]]]:
    return [{"batch": {"reverse_kl": value}} for value in values]


def test_windows_are_of_five_updates_over_all_runs() -> None:
    first, last = reverse_kl_windows([reports(1, 2, 3, 4, 5, 8), reports(1, 2, 3, 4, 5, 10)])
    assert (first.n, first.mean, last.n, last.mean) == (10, 3, 2, 9)
    assert last.standard_error == pytest.approx(1)  # sqrt(2) of deviation over sqrt(2)


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ((0.30, 0.32, 0.28, 0.31, 0.29), 0),  # it falls
        ((0.50, 0.52, 0.48, 0.51, 0.49), 0),  # as before
        ((0.53, 0.51, 0.50, 0.52, 0.49), 0),  # 0.01 higher, where two standard errors of both are 0.02
        ((0.60, 0.62, 0.58, 0.61, 0.59), 1),
    ],
)
def test_a_rise_counts_beyond_two_standard_errors(last: tuple[float, ...], expected: int) -> None:
    before = (0.50, 0.52, 0.48, 0.51, 0.49)
    assert rises(reverse_kl_windows([reports(*before, *last)])) == expected
