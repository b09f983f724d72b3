"""Evaluations and policies of a recorded run, as `rollmesh view` shows them."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import recorded_evaluations, recorded_policies

from .made_run import make_run, write_lines


def test_an_evaluation_of_one_sample_has_no_standard_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=4)
    lines = [{"policy_version": v, "n": n, "mean": 0.5, "standard_error": 0.1} for v, n in ((0, 1), (4, 2))]
    write_lines(run / "evaluations.jsonl", lines)
    assert [point.standard_error for point in recorded_evaluations(RecordedRun(run))] == [None, 0.1]


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
