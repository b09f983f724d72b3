"""Columns of the records, and the evaluations and policies that the page has of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollmesh.report.recorded_run import Evaluation, RecordedRun
from rollmesh.report.series import (
    binned,
    rate,
    timeline_series,
    train_series,
)
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import recorded_policies
from rollmesh.step_metrics import STEP_METRICS

from .made_run import make_run, write_lines


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
