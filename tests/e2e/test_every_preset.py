"""Every preset in the real mesh, on the demo's task."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.report.recorded_run import RecordedRun
from rollmesh.scheduling.presets import PRESETS

from .conftest import environment

pytestmark = pytest.mark.slow

UPDATES = 2
FATES = ("sorted", "rollpacker", "kimi")
"""One preset for each fate of a stale group that loses tokens or blocks nothing; the demo's is ``pace``."""
OTHERS = tuple(preset for preset in PRESETS if preset not in FATES)
GROUPS = [
    FATES,
    *(pytest.param(OTHERS[first : first + 7], marks=pytest.mark.long) for first in range(0, len(OTHERS), 7)),
]
"""Presets by test: each test has a deadline of its own, and one start of Python."""
SMALL = {
    "schedule.groups_per_batch": 8,
    "rollout.max_new_tokens": 64,
    "rollout.partial_save_tokens": 16,
    # With keep_kv the share of tokens that the audit can score again depends on the moment of a reload.
    "generator.on_new_version": "interrupt",
}


@pytest.mark.parametrize("presets", GROUPS, ids="-".join)
def test_every_preset_trains_in_the_mesh_and_its_audit_is_green(tmp_path: Path, presets: tuple[str, ...]) -> None:
    settings = [part for field, value in SMALL.items() for part in ("--set", f"{field}={value}")]
    command = [sys.executable, "-m", "benchmarks.demos", "schedules", "--inline", "--updates", str(UPDATES)]
    command += [part for preset in presets for part in ("--preset", preset)]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), *settings],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(presets)} of {len(presets)} schedules" in done.stdout
    for preset in presets:
        run = RecordedRun(tmp_path / preset)
        assert run.schedule is not None and run.schedule.preset == preset
        audit = json.loads((run.path / "audit.json").read_text())
        trained = (audit["committed_step"], audit["batch_files"], audit["groups"])
        assert trained == (UPDATES, UPDATES, UPDATES * run.schedule.groups_per_batch), preset
        assert (audit["green"], audit["lost"], audit["trained_twice"]) == (True, [], {}), preset
        steps = [record["train_step"] for record in run.metrics.records]
        assert steps == list(range(1, UPDATES + 1)), preset
