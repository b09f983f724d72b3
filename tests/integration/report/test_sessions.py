"""A run that ended, and one that was continued: time between its sessions is no training time and not drawn."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollmesh.config import load_run_config
from rollmesh.gateway.curves import Curves, TimelineFile
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.report.recorded_run import FAILURE_FILE, RecordedRun
from rollmesh.report.sentences import ending, moment
from rollmesh.report.series import pauses_of, seconds_of_training, train_series
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import recorded_curves
from rollmesh.report.view.recorded_overview import recorded_overview
from rollmesh.runtime.locks import distant_launcher, has_launcher

from .made_run import START, make_run

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
    assert summary.training_seconds == pytest.approx(2 * (5 * SECONDS + STEP)) and len(summary.sessions) == 2
    assert [moment(each, summary) for each in summary.evaluations] == ["before training", "after training"]
    run = RecordedRun(stopped_after_six_of_twelve)
    series = train_series(run.metrics.records, run.timeline.records)
    seconds = seconds_of_training(series.sessions, series["time"])
    assert seconds[[0, 5, 6, 11]] == pytest.approx([STEP, 5 * SECONDS + STEP, 5 * SECONDS + 2 * STEP, 50 + 2 * STEP])
    shown = recorded_overview(run, recorded_curves(run)).elapsed_seconds
    assert shown is not None and shown < 12 * SECONDS + 60 < PAUSE
    timeline, curves = TimelineFile(), Curves()  # of a live page
    for moment_of_record in (100.0, 101.0, 102.0, 928.0, 929.0):
        timeline.add({"view": {}, "t": moment_of_record, "saved_token_total": 0}, curves)
    assert timeline.begin_time == 926.0


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


def test_a_finished_run_states_when_it_ended_its_reward_evaluation_and_audit(tmp_path: Path) -> None:
    rows = dict(ending(RecordedRun(make_run(tmp_path / "run", steps=10, seconds=5.0)), now=START + 60 + 7200))
    assert rows["state"].startswith("finished: train step 10 of 10 at ")
    assert rows["state"].endswith("(2 h 00 min ago)")
    assert float(rows["reward of the last step"]) > 0
    assert "policy version 0" in rows["accuracy before"] and "policy version 10" in rows["accuracy after"]
    assert rows["audit"] == "not run"


def test_a_run_that_ended_early_was_stopped_or_has_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:4]))
    assert dict(ending(RecordedRun(run)))["state"].startswith("stopped after train step 4 of 10")
    (run / FAILURE_FILE).write_text(json.dumps({"message": "no memory"}))
    assert dict(ending(RecordedRun(run)))["state"].startswith("failed after train step 4 of 10")
    (run / "metrics.jsonl").unlink()
    (run / FAILURE_FILE).unlink()
    assert dict(ending(RecordedRun(run)))["state"].startswith("stopped before the first train step")


def test_a_launcher_is_known_by_its_process_and_one_of_another_host_is_not_called_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    assert not has_launcher(run)
    with locked_run_folder(load_run_config(run / "config.yaml")):
        assert (has_launcher(run), distant_launcher(run)) == (True, "")
        os.utime(run / "lock", (1.0, 1.0))  # older than this process, whose number is another's then
        assert not has_launcher(run)
        (run / "lock").write_text("1 node-a")
        assert (has_launcher(run), distant_launcher(run)) == (True, "pid 1 on node-a")
        for name in ("lock", "timeline.jsonl"):
            os.utime(run / name, (1.0, 1.0))  # nothing is recorded any more
        assert (has_launcher(run), distant_launcher(run)) == (False, "")
    assert (has_launcher(run), distant_launcher(run)) == (False, "")
