"""Columns of the records of a run, whose sessions have no time between them; evaluations and policies of the page."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollmesh.config import load_run_config
from rollmesh.gateway.curves import Curves, TimelineFile
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.report.recorded_run import FAILURE_FILE, Evaluation, RecordedRun
from rollmesh.report.sentences import ending, moment
from rollmesh.report.series import (
    binned,
    pauses_of,
    rate,
    seconds_of_training,
    timeline_series,
    train_series,
)
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import recorded_curves, recorded_policies
from rollmesh.report.view.recorded_overview import recorded_overview
from rollmesh.runtime.locks import distant_launcher, has_launcher
from rollmesh.step_metrics import STEP_METRICS

from .made_run import START, make_run, write_lines


def test_every_column_of_a_real_step_report_is_found_and_what_is_no_finite_number_is_nan(run_folder: Path) -> None:
    records = RecordedRun(run_folder).metrics.records
    series = train_series(records)
    assert series.columns.keys() == {metric.field for metric in STEP_METRICS}
    for name, values in {**series.columns, "step_seconds": series.step_seconds}.items():
        assert len(values) == 12 and not np.isnan(values).any(), name
    for wrong in ("1", True, float("inf"), None):
        assert np.isnan(train_series([*records, {"train_step": 13, "loss": wrong}])["loss"][-1])


def test_a_step_that_was_trained_again_counts_once_with_its_newest_record_and_histograms_are_summed() -> None:
    counts = ({"0": 4}, {"9": 9}, {"10": 1, "2": 3, "0": 1}, {})
    batches = [{"outcome_mean": s / 4, "trajectory_staleness": {"histogram": n}} for s, n in enumerate(counts)]
    series = train_series([{"train_step": s, "batch": b} for s, b in zip((1, 2, 2, 3), batches, strict=True)])
    assert series["batch.outcome_mean"].tolist() == [0.0, 0.5, 0.75]
    assert list(series.staleness_counts.items()) == [(0, 5.0), (2, 3.0), (10, 1.0)]


def test_generated_tokens_never_fall_when_a_launcher_starts_again() -> None:
    records = [{"t": t, "generated_token_total": n} for t, n in enumerate((100, 250, 0, 40, None, 90))]
    assert timeline_series(records).generated_tokens.tolist() == [100, 250, 250, 290, 290, 340]


def test_in_flight_calls_are_counted_by_version_over_all_generators() -> None:
    def generator(version: int, running: int, serving: bool = True) -> dict[str, object]:
        return {"policy_version": version, "running": running, "slots": 8, "serving": serving}

    series = timeline_series(
        [
            {"t": 0.0, "generators": [generator(0, 3), generator(0, 4)]},
            {"t": 1.0, "generators": [generator(0, 2), generator(1, 5)]},
            {"t": 2.0, "generators": [generator(2, 0), generator(1, 6, serving=False)]},
        ]
    )
    assert series.versions == (0, 1)
    assert series.running.tolist() == [[7, 2, 0], [0, 5, 6]]
    assert series.slots.tolist() == [16, 16, 8]
    empty = timeline_series([])
    assert (len(empty), empty.running.shape, dict(empty.dropped)) == (0, (0, 0), {})


def test_evaluations_without_a_mean_are_left_out() -> None:
    (found,) = Evaluation.read([{"policy_version": 0, "n": 4, "mean": 0.5}, {"policy_version": 1, "n": 4}])
    assert (found.policy_version, found.standard_error) == (0, None)


def test_binning_keeps_the_mean_and_leaves_short_series_alone() -> None:
    time = np.arange(10_000, dtype=np.float64)
    rows = np.stack([time, 2 * time])
    short, values = binned(time, rows, limit=100)
    assert len(short) == 100
    assert values.shape == (2, 100)
    assert values.mean() == pytest.approx(rows.mean())
    assert len(binned(time[:50], time[:50], limit=100)[0]) == 50
    assert binned(time, np.empty((0, 10_000)), limit=100)[1].shape == (0, 100), "a mesh in which no call ever ran"


def test_a_rate_is_per_second_and_skips_repeated_moments() -> None:
    moments, per_second = rate(np.array([0.0, 2.0, 2.0, 3.0]), np.array([0.0, 10.0, 10.0, 13.0]))
    assert moments.tolist() == [2.0, 3.0]
    assert per_second.tolist() == [5.0, 3.0]


def test_policies_that_rollbacks_published_for_an_unchanged_train_step_are_listed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=5)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line, version in zip(lines, (1, 2, 3, 5, 6), strict=True):
        line["policy_version"] = version
    write_lines(run / "metrics.jsonl", lines)
    write_lines(run / "evaluations.jsonl", [{"policy_version": 7, "n": 2, "mean": 0.5, "standard_error": 0.1}])
    policies = recorded_policies(RecordedRun(run))
    steps = {policy.policy_version: policy.train_step for policy in policies}
    assert steps == {7: 5, 6: 5, 5: 4, 4: 3, 3: 3, 2: 2, 1: 1, 0: 0}
    assert [policy.policy_version for policy in policies if policy.newest] == [7]
    assert summarise(run).policy_versions == 8
    with (run / "timeline.jsonl").open("a") as timeline:
        timeline.write(json.dumps({"view": {"policy_version": 8, "policy_train_step": 5}}) + "\n")
    assert recorded_policies(RecordedRun(run))[0].policy_version == 8


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
    (run / FAILURE_FILE).write_text("")  # written on a full disk
    assert FAILURE_FILE in RecordedRun(run).failure
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
