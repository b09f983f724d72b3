"""Result of a run that is not in progress."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rollmesh.config import load_run_config
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.report.recorded_run import FAILURE_FILE, RecordedRun
from rollmesh.report.sentences import ending
from rollmesh.runtime.locks import distant_launcher, has_launcher

from .made_run import START, make_run


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


def test_a_launcher_is_known_by_its_process_and_a_reused_process_id_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    assert not has_launcher(run)
    with locked_run_folder(load_run_config(run / "config.yaml")):
        assert has_launcher(run)
        os.utime(run / "lock", (1.0, 1.0))  # older than this process
        assert not has_launcher(run)
    assert not has_launcher(run)


def test_a_launcher_of_another_host_is_not_called_stopped(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2)
    with locked_run_folder(load_run_config(run / "config.yaml")):
        assert distant_launcher(run) == ""
        (run / "lock").write_text("1 node-a")
        assert has_launcher(run)
        assert distant_launcher(run) == "pid 1 on node-a"
        for name in ("lock", "timeline.jsonl"):
            os.utime(run / name, (1.0, 1.0))  # nothing is recorded any more
        assert (has_launcher(run), distant_launcher(run)) == (False, "")
    assert (has_launcher(run), distant_launcher(run)) == (False, "")
