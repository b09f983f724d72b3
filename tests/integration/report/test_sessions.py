"""A run that was stopped and continued: time between its sessions is no training time, and curves leave it blank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollmesh.gateway.curves import Curves, TimelineFile
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import moment
from rollmesh.report.series import pauses_of, seconds_of_training, train_series
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import recorded_curves
from rollmesh.report.view.recorded_overview import recorded_overview

PAUSE, SECONDS = 826.0, 5.0
STEP = 0.33 * SECONDS
"""Seconds of the phases of a step; the rest of its ``SECONDS`` is the wait for its batch."""


def later(file: Path, field: str, after: float, by: float) -> None:
    """Move the lines whose time is later than ``after``."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    lines = (json.dumps(record | {field: record[field] + by * (record[field] > after)}) for record in records)
    file.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(params=[True, False], ids=["with a timeline", "without a timeline"])
def stopped_after_six_of_twelve(tmp_path: Path, make_run: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    folder = make_run(tmp_path / "run", steps=12, seconds=SECONDS)
    (end,) = (r["time"] for r in RecordedRun(folder).metrics.records if r["train_step"] == 6)
    later(folder / "metrics.jsonl", "time", end + 0.1, PAUSE)
    later(folder / "timeline.jsonl", "t", end + 0.1, PAUSE)
    later(folder / "evaluations.jsonl", "when", end + 0.1, PAUSE)
    if not request.param:
        (folder / "timeline.jsonl").unlink()
    return folder


def test_training_time_is_summed_over_sessions(stopped_after_six_of_twelve: Path) -> None:
    summary = summarise(stopped_after_six_of_twelve)
    assert summary.training_seconds == pytest.approx(2 * (5 * SECONDS + STEP))
    assert len(summary.sessions) == 2
    run = RecordedRun(stopped_after_six_of_twelve)
    series = train_series(run.metrics.records, run.timeline.records)
    seconds = seconds_of_training(series.sessions, series["time"])
    assert seconds[[0, 5, 6, 11]] == pytest.approx([STEP, 5 * SECONDS + STEP, 5 * SECONDS + 2 * STEP, 50 + 2 * STEP])
    assert moment(summary.evaluations[0], summary) == "before training"
    assert moment(summary.evaluations[-1], summary) == "after training"


def test_the_start_of_a_session_is_no_training_time_although_its_launcher_records_it(
    stopped_after_six_of_twelve: Path,
) -> None:
    run = RecordedRun(stopped_after_six_of_twelve)
    stopped, resumed = (r["time"] for r in run.metrics.records if r["train_step"] in (6, 7))
    loading = [{"t": t, "generators": [{"serving": False}]} for t in np.arange(stopped + 3.0, resumed - SECONDS)]
    series = train_series(run.metrics.records, [*run.timeline.records, *loading, {"t": stopped + 2.0}])
    assert len(series.sessions) == 2


def test_no_rate_is_computed_through_the_time_between_sessions(stopped_after_six_of_twelve: Path) -> None:
    run = RecordedRun(stopped_after_six_of_twelve)
    train = train_series(run.metrics.records, run.timeline.records)
    (trained,) = recorded_curves(run).curves.answer(["trained_tokens_per_second"], 100).series
    assert len(trained.x) == 10  # five intervals of each session, the pause between them left out
    assert max(trained.mean) < 2 * min(trained.mean)
    assert not any(begin < moment_ <= end for begin, end in train.pauses for moment_ in trained.x)


def test_a_long_step_and_a_long_evaluation_are_no_pauses() -> None:
    samples = np.arange(0.0, 400.0)
    none = np.empty(0)
    assert len(pauses_of(samples, np.array([10.0, 20.0, 300.0]), np.array([9.0, 9.0, 9.0]))) == 0
    assert len(pauses_of(none, np.array([10.0, 20.0, 30.0, 330.0]), np.array([9.0, 9.0, 9.0, 299.0]))) == 0
    assert pauses_of(none, np.array([10.0, 20.0, 30.0, 330.0]), np.array([9.0, 9.0, 9.0, 9.0])).tolist() == [[30, 321]]


def test_the_time_that_a_live_page_shows_does_not_count_the_time_between_sessions() -> None:
    timeline, curves = TimelineFile(), Curves()
    for moment_of_record in (100.0, 101.0, 102.0, 928.0, 929.0):
        timeline.add({"view": {}, "t": moment_of_record, "saved_token_total": 0}, curves)
    assert timeline.begin_time == 926.0


def test_a_recorded_page_shows_the_time_without_pauses(stopped_after_six_of_twelve: Path) -> None:
    run = RecordedRun(stopped_after_six_of_twelve)
    shown = recorded_overview(run, recorded_curves(run)).elapsed_seconds
    assert shown is not None and shown < 12 * SECONDS + 60 < PAUSE
