"""A figure on the wrong side of its bar is named, and ``--check`` ends with status 1."""

from __future__ import annotations

import io
import json
import sys
from types import ModuleType

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollmesh.bench import train
from rollmesh.bench.engine import _GAP_BARS, _MIXED_BARS, _UNIFORM_BARS
from rollmesh.bench.measure import Bar, Measure, at_least, at_most, compared, missed
from rollmesh.bench.queue import _FLAT_BARS, _LIVES_BARS
from rollmesh.cli.benches import measures_table
from rollmesh.cli.main import app

LIVES = "lives of 2048-token trajectories"


def lives(rate: float, bare: float) -> Measure:
    return compared(LIVES, rate, "1/s", "bare stream", bare, _LIVES_BARS)


@pytest.mark.parametrize(
    ("bar", "value", "reached"),
    [
        (at_least("value", 2.5), 2.5, True),
        (at_least("value", 2.5), 2.4999, False),
        (at_most("value", 1.2), 1.2, True),
        (at_most("value", 1.2), 1.2001, False),
        (at_least("value", 2.5), float("nan"), False),
        (at_most("value", 1.2), float("nan"), False),
        (at_least("ratio", 0.0), 5.0, False),
        (at_most("ratio", 1.0), 5.0, False),
    ],
)
def test_a_bar_is_reached_by_what_equals_it_and_never_by_what_is_not_known(
    bar: Bar, value: float, reached: bool
) -> None:
    assert bar.reached_by(Measure(name="m", value=value, unit="u")) is reached


def test_each_missed_bar_is_named_with_what_was_measured() -> None:
    assert missed([lives(4000.0, 16_000.0), Measure(name="without a bar", value=0.0, unit="u")]) == []
    assert missed([lives(4000.0, 16_320.0)]) == [f"{LIVES}: ratio 0.2451, the bar is >= 0.25"]
    assert missed([lives(900.0, 36_000.0)]) == [
        f"{LIVES}: ratio 0.025, the bar is >= 0.25",
        f"{LIVES}: value 900, the bar is >= 1,000",
    ]
    assert missed([lives(2000.0, 0.0)]) == [f"{LIVES}: ratio unknown, the bar is >= 0.25"]


def test_the_bars_are_those_that_we_promise() -> None:
    assert {size: [str(bar) for bar in bars] for size, bars in _UNIFORM_BARS.items()} == {
        8: ["ratio >= 2.5"],
        32: ["ratio >= 3"],
    }
    assert [str(bar) for bar in (*_MIXED_BARS, *_GAP_BARS)] == ["ratio >= 5", "value <= 0.0001"]
    assert [str(bar) for bar in train._BARS] == ["ratio >= 2.5"]
    assert [str(bar) for bar in _LIVES_BARS] == ["ratio >= 0.25", "value >= 1,000"]
    assert [str(bar) for bar in _FLAT_BARS] == ["value <= 1.2"]


def test_a_measure_of_another_process_keeps_its_bars_and_json_lines_leave_them_out() -> None:
    measure = lives(4000.0, 16_000.0)
    assert Measure.from_line(measure.to_line()) == measure
    assert list(measure.figures()) == ["name", "value", "unit", "baseline", "baseline_value", "ratio"]


def test_the_table_shows_the_bar_beside_the_ratio_and_which_one_is_missed() -> None:
    out = io.StringIO()
    Console(file=out, width=200).print(measures_table([lives(4000.0, 10_000.0), lives(900.0, 2000.0)], "bench"))
    good, bad = [line for line in out.getvalue().splitlines() if LIVES in line]
    assert "0.40" in good and "ratio >= 0.25, value >= 1,000" in good and "MISSED" not in good
    assert "ratio >= 0.25, value >= 1,000: MISSED" in bad


@pytest.mark.parametrize(("rate", "status"), [(4000.0, 0), (900.0, 1)])
@pytest.mark.parametrize("as_json", [False, True])
def test_only_with_check_does_a_missed_bar_end_the_command_with_status_1(
    monkeypatch: pytest.MonkeyPatch, rate: float, status: int, as_json: bool
) -> None:
    bench = ModuleType("rollmesh.bench.train")
    bench.run = lambda *, quick: [lives(rate, 2000.0)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rollmesh.bench.train", bench)
    options = ["bench", "train", *(["--json"] if as_json else [])]
    assert CliRunner().invoke(app, options).exit_code == 0
    done = CliRunner().invoke(app, [*options, "--check"])
    assert done.exit_code == status
    assert (f"missed: {LIVES}: value 900, the bar is >= 1,000" in done.stderr) is bool(status)
    if as_json:
        (line,) = done.stdout.splitlines()
        assert set(json.loads(line)) == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
