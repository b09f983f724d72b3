"""Checkpoints of a run that another machine has elsewhere than the machine that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config import RunConfig, write_run_config
from rollmesh.errors import DataError
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun


def test_the_environment_says_where_the_checkpoints_of_a_recorded_run_are_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume or a snapshot is mounted somewhere else on the machine that audits or exports."""
    moved, run = tmp_path / "snapshot", tmp_path / "run"
    moved.mkdir()
    run.mkdir()
    checkpoints = {"folder": "/no/such/volume", "keep_last": 7}
    values = {"name": "moved", "folder": str(run), "model": {"path": "models/tiny"}, "checkpoints": checkpoints}
    write_run_config(RunConfig.model_validate(values), run / "config.yaml")
    (run / SECRET_FILE).write_text("a" * 64, encoding="ascii")
    with pytest.raises(DataError, match="/no/such/volume: no checkpoint store"):
        open_checkpoints(RecordedRun(run))
    monkeypatch.setenv("ROLLMESH_CHECKPOINTS__FOLDER", str(moved))
    monkeypatch.setenv("ROLLMESH_CHECKPOINTS__KEEP_LAST", "9")
    recorded = RecordedRun(run)
    assert open_checkpoints(recorded).root == moved
    assert recorded.checkpoint_section.keep_last == 7
    assert recorded.config is not None and recorded.config.checkpoints.folder == "/no/such/volume"
