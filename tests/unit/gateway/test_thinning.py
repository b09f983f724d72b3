"""Curves of any length in bounded memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.gateway.curves import Curve


def test_a_short_curve_is_kept_value_by_value() -> None:
    curve = Curve()
    for step in range(1, 6):
        curve.add(step, step * 10.0)
    assert [(p.x, p.mean, p.low, p.high) for p in curve.points(10)] == [
        (s, 10.0 * s, 10.0 * s, 10.0 * s) for s in range(1, 6)
    ]


@given(count=st.integers(1, 500), most=st.integers(2, 64), shown=st.integers(2, 40))
def test_a_thinned_curve_keeps_its_extremes_and_its_mean(count: int, most: int, shown: int) -> None:
    values = np.sin(np.arange(count))
    curve = Curve(most_points=most)
    for x, value in enumerate(values):
        curve.add(float(x), float(value))
    points = curve.points(shown)
    assert 1 <= len(points) <= shown
    assert min(p.low for p in points) == pytest.approx(values.min())
    assert max(p.high for p in points) == pytest.approx(values.max())
    assert sum(p.count for p in points) == count
    assert sum(p.total for p in points) / count == pytest.approx(values.mean())
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert points[0].first == 0
    assert points[-1].last == count - 1


def test_memory_is_bounded_however_many_values_come() -> None:
    curve = Curve(most_points=64)
    for x in range(10_000):
        curve.add(x, 1.0)
        assert len(curve._points) <= 64


def test_a_step_that_is_trained_again_takes_the_place_of_everything_from_there_on() -> None:
    curve = Curve()
    for step in range(1, 11):
        curve.add(step, 1.0)
    curve.add(8, 2.0)
    assert [(p.x, p.mean) for p in curve.points(100)][-2:] == [(7, 1.0), (8, 2.0)]
    curve.add(9, 3.0)
    assert [p.x for p in curve.points(100)] == list(range(1, 10))
