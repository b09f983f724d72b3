"""Curves of a run: of any length in bounded memory, and what is refused."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.gateway.curves import Curve, Curves
from rollmesh.gateway.models.live import EvaluationView
from rollmesh.runtime.request_guard import BadRequest


def report(step: int, **changes: Any) -> dict[str, Any]:
    return {"train_step": step, "time": 10.0 * step, "reward_mean": step / 10, **changes}


def test_a_report_fills_every_curve_that_it_has_a_number_for_and_what_is_none_changes_nothing() -> None:
    curves = Curves()
    for record in ({}, {"train_step": "three"}, {"train_step": True}, {"batch": 3}):
        curves.add_report(record)
    assert curves.report is None
    curves.add_report(report(1, policy={"entropy": 0.5, "ratio": {"mean": math.nan}}, loss="n/a", grad_norm=None))
    answer = curves.answer([], 10)
    found = {series.name: series for series in answer.series}
    assert list(found) == answer.available
    assert found["reward_mean"].mean == [0.1]
    assert found["entropy"].mean == [0.5]
    assert found["ratio_mean"].x == found["loss"].x == found["grad_norm"].x == []


def test_every_curve_of_the_trainer_has_the_times_of_its_steps() -> None:
    curves = Curves()
    for step in (1, 2, 4):
        curves.add_report(report(step, loss=0.5))
    for series in curves.answer(["reward_mean", "loss"], 10).series:
        assert series.x == [1.0, 2.0, 4.0]
        assert series.times == (10.0, 20.0, 40.0)
    curves = Curves()
    curves.add_report({"train_step": 1, "reward_mean": 0.5})
    assert curves.answer(["reward_mean"], 10).series[0].times == ()


def test_an_unknown_curve_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="no curve 'rewards'") as refused:
        Curves().answer(["reward_mean", "rewards"], 10)
    assert refused.value.field == "names"
    assert "reward_mean" in str(refused.value.hint)


def test_evaluations_come_with_their_error_and_the_newest_is_always_shown() -> None:
    curves = Curves()
    points = [
        EvaluationView(policy_version=v, mean=v / 100, standard_error=0.1, sample_count=8, time=None)
        for v in range(100)
    ]
    curves.set_evaluations(points)
    (series,) = curves.answer(["evaluation"], 10).series
    assert series.axis == "policy_version"
    assert len(series.x) == 10
    assert series.x[-1] == 99
    assert series.low[-1] == pytest.approx(0.89)
    assert series.high[-1] == pytest.approx(1.09)


def test_rewritten_reports_replace_the_old_ones_from_the_first_of_them_on() -> None:
    curves = Curves()
    for step in (1, 2, 3):
        curves.add_report(report(step, batch={"trajectory_staleness": {"histogram": {"0": step}}}))
    curves.remove_reports(4)
    assert curves.report is not None
    curves.remove_reports(2)
    assert (curves.report, curves.trained_staleness) == (None, [])
    assert curves.answer(["reward_mean"], 10).series[0].x == [1.0]


@given(count=st.integers(1, 500), most=st.integers(2, 64), shown=st.integers(2, 40))
def test_a_thinned_curve_keeps_its_extremes_and_its_mean(count: int, most: int, shown: int) -> None:
    values = np.sin(np.arange(count))
    curve = Curve(most_points=most)
    for x, value in enumerate(values):
        curve.add(float(x), float(value))
        assert len(curve) <= most, "memory is bounded"
    points = curve.points(shown)
    assert 1 <= len(points) <= shown
    assert min(p.low for p in points) == pytest.approx(values.min())
    assert max(p.high for p in points) == pytest.approx(values.max())
    assert sum(p.count for p in points) == count
    assert sum(p.total for p in points) / count == pytest.approx(values.mean())
    assert [p.x for p in points] == sorted(p.x for p in points)
    assert points[0].first == 0
    assert points[-1].last == count - 1


def test_a_step_that_is_trained_again_takes_the_place_of_everything_from_there_on() -> None:
    curve = Curve()
    for step in range(1, 11):
        curve.add(step, 1.0)
    assert [(p.x, p.mean, p.low, p.high) for p in curve.points(100)] == [(s, 1.0, 1.0, 1.0) for s in range(1, 11)]
    curve.add(8, 2.0)
    assert [(p.x, p.mean) for p in curve.points(100)][-2:] == [(7, 1.0), (8, 2.0)]
    curve.add(9, 3.0)
    assert [p.x for p in curve.points(100)] == list(range(1, 10))
