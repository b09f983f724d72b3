from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from rollmesh.errors import ConfigError
from rollmesh.sim.decode_curve import CurvePoint, DecodeCurve, write_curve

ROWS = [(1, 100, 0.011), (1, 300, 0.013), (4, 100, 0.024), (4, 300, 0.032)]
"""base(1) = 0.010, base(4) = 0.020, slope = 1e-5 everywhere."""


def points_of(rows: list[tuple[int, int, float]]) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(running=running, context=context, seconds=seconds) for running, context, seconds in rows)


def curve(rows: list[tuple[int, int, float]] = ROWS, prefill: float = 1e-4) -> DecodeCurve:
    return DecodeCurve(points=points_of(rows), prefill_seconds_per_token=prefill)


def test_costs_split_a_step_into_base_and_context() -> None:
    costs = curve().costs(4)
    assert costs.step(1, 100) == pytest.approx(0.011)
    assert costs.step(4, 1200) == pytest.approx(0.032)
    assert costs.step(4, 0) == pytest.approx(0.020)
    assert costs.slots == 4


def test_costs_between_measured_numbers_of_calls_are_interpolated() -> None:
    assert curve().costs(4).step(2, 1000) == pytest.approx(0.010 + 0.010 / 3 + 0.01)


def test_a_curve_does_not_say_anything_beyond_its_largest_number_of_calls() -> None:
    with pytest.raises(ConfigError, match="slots=5, but the curve ends at running=4"):
        curve().costs(5)


def test_noise_never_makes_the_base_vanish() -> None:
    costs = curve([(1, 100, 0.010), (1, 300, 0.040)]).costs(1)
    assert costs.base[1] > 0
    assert costs.slope[1] * 100 < 0.010


def test_a_written_curve_reads_as_the_same_curve(tmp_path: Path) -> None:
    written = DecodeCurve(points=points_of(ROWS), prefill_seconds_per_token=2e-4, engine="torch, CPU")
    write_curve(tmp_path / "curve.json", written.points, written.prefill_seconds_per_token, written.engine)
    assert DecodeCurve.read(tmp_path / "curve.json") == written


@pytest.mark.parametrize(
    ("rows", "prefill", "message"),
    [
        ([(1, 100, 0.01), (4, 100, 0.02)], 0.0, "running=1 was measured at one context"),
        ([*ROWS, (8, 100, 0.05)], 0.0, "running=8 was measured at one context"),
        ([(1, 100, 0.03), (1, 300, 0.01)], 0.0, "running=1, context=300 takes 0.01 s, less than 0.03 s at 100"),
        ([*ROWS, (8, 100, 0.01), (8, 300, 0.032)], 0.0, "context=100, running=8 takes 0.01 s, less than 0.024 s at 4"),
        ([(1, 100, -0.01), (1, 300, 0.01)], 0.0, "seconds at running=1, context=100=-0.01"),
        ([(1, 100, math.nan), (1, 300, 0.01)], 0.0, "seconds at running=1, context=100=nan"),
        ([(1, 100, 0.01), (1, 300, math.inf)], 0.0, "seconds at running=1, context=300=inf"),
        ([(0, 100, 0.01), (0, 300, 0.01)], 0.0, "running=0"),
        ([], 0.0, "no points"),
        (ROWS, -1e-4, "prefill_seconds_per_token=-0.0001"),
        (ROWS, math.nan, "prefill_seconds_per_token=nan"),
    ],
)
def test_unusable_curves_are_refused_with_the_value(
    rows: list[tuple[int, int, float]], prefill: float, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        curve(rows, prefill)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"points": 3, "prefill_seconds_per_token": 0}', "null"])
def test_other_files_are_no_curves(tmp_path: Path, text: str) -> None:
    (tmp_path / "curve.json").write_text(text)
    with pytest.raises(ConfigError, match=r"curve\.json: expected a decode curve"):
        DecodeCurve.read(tmp_path / "curve.json")


def test_an_unusable_point_in_a_file_is_named_with_the_file(tmp_path: Path) -> None:
    points = [{"running": 1, "context": context, "seconds": -1.0} for context in (10, 20)]
    (tmp_path / "curve.json").write_text(json.dumps({"points": points, "prefill_seconds_per_token": 0}))
    with pytest.raises(ConfigError, match=r"curve\.json: decode curve: seconds at running=1, context=10=-1\.0"):
        DecodeCurve.read(tmp_path / "curve.json")
