"""Methods of several points in the real mesh, on the demo's task; ``make methods`` runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.report.recorded_run import RecordedRun

from .conftest import environment

pytestmark = pytest.mark.long

UPDATES = 2
METHODS = ("advantage/pairs", "masks/ratio")
SMALL = ("schedule.groups_per_batch=4", "rollout.max_new_tokens=64", "rollout.partial_save_tokens=16")


def test_methods_train_in_the_mesh_and_their_audits_are_green(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.demos", "methods", "--inline", "--updates", str(UPDATES)]
    command += [part for method in METHODS for part in ("--method", method)]
    command += [part for setting in SMALL for part in ("--set", setting)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(METHODS)} of {len(METHODS)} methods" in done.stdout
    assert "effect" in done.stdout
    assert "mean size " in done.stdout
    for method in METHODS:
        run = RecordedRun(tmp_path / method)
        assert [record["train_step"] for record in run.metrics.records] == list(range(1, UPDATES + 1)), method
        audit = json.loads((run.path / "audit.json").read_text())
        assert (audit["green"], audit["lost"], audit["trained_twice"]) == (True, [], {}), method
    algorithm = RecordedRun(tmp_path / "masks" / "ratio").config
    assert algorithm is not None and algorithm.trainer.algorithm.masks[0].name == "ratio"
