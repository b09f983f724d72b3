"""Evaluations of a recorded run, as `rollmesh view` shows them."""

from __future__ import annotations

from pathlib import Path

from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.view.recorded_curves import recorded_evaluations

from .made_run import make_run, write_lines


def test_an_evaluation_of_one_sample_has_no_standard_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    lines = [{"policy_version": v, "n": n, "mean": 0.5, "standard_error": 0.1} for v, n in ((0, 1), (4, 2))]
    write_lines(run / "evaluations.jsonl", lines)
    assert [point.standard_error for point in recorded_evaluations(RecordedRun(run))] == [None, 0.1]
