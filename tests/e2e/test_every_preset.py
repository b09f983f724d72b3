"""Every preset, and methods of several points, in the real mesh; ``make methods`` runs all methods."""

import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.report.recorded_run import RecordedRun
from rollmesh.scheduling.presets import PRESETS

from .conftest import CommandLine, environment

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
METHODS = ("advantage/pairs", "masks/ratio")


def train(kind: str, names: tuple[str, ...], folder: Path, **settings: object) -> str:
    """Train with each schedule or method; returns what was printed, after checking steps and audits."""
    short = {"rollout.max_new_tokens": 64, "rollout.partial_save_tokens": 16, **settings}
    command = [sys.executable, "-m", "benchmarks.demos", f"{kind}s", "--inline", "--updates", str(UPDATES)]
    command += [part for name in names for part in ("--preset" if kind == "schedule" else "--method", name)]
    command += [part for field, value in short.items() for part in ("--set", f"{field}={value}")]
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        capture_output=True,
        text=True,
        timeout=1100,
        check=False,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(names)} of {len(names)} {kind}s" in done.stdout
    for name in names:
        line = CommandLine(run_file=folder, folder=folder / name)
        assert line.steps == list(range(1, UPDATES + 1)), name
        audit = line.audit()
        trained = (audit["committed_step"], audit["batch_files"], audit["groups"])
        assert trained == (UPDATES, UPDATES, UPDATES * int(str(settings["schedule.groups_per_batch"]))), name
    return done.stdout


@pytest.mark.parametrize("presets", GROUPS, ids="-".join)
def test_every_preset_trains_in_the_mesh_and_its_audit_is_green(tmp_path: Path, presets: tuple[str, ...]) -> None:
    # With keep_kv the share of tokens that the audit can score again depends on the moment of a reload.
    settings = {"schedule.groups_per_batch": 8, "generator.on_new_version": "interrupt"}
    train("schedule", presets, tmp_path, **settings)
    for preset in presets:
        schedule = RecordedRun(tmp_path / preset).schedule
        assert schedule is not None and schedule.preset == preset


@pytest.mark.long
def test_methods_train_in_the_mesh_and_their_audits_are_green(tmp_path: Path) -> None:
    printed = train("method", METHODS, tmp_path, **{"schedule.groups_per_batch": 4})
    assert "effect" in printed and "mean size " in printed
    config = RecordedRun(tmp_path / "masks" / "ratio").config
    assert config is not None and config.trainer.algorithm.masks[0].name == "ratio"
