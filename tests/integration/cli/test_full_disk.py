"""Commands that write on a full disk name the file that has no room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import write_run_config

from ..launcher.test_launcher_outages import config
from ..trainer.test_full_disk import fill


def run_folder(disk: Path) -> Path:
    folder = disk / "run"
    folder.mkdir()
    write_run_config(config(folder), folder / "config.yaml")
    report = {"train_step": 1, "time": 1.0, "reward_mean": 0.5, "version": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(report) + "\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (lambda disk: ["init", "countdown", str(disk / "mine")], "mine/"),
        (lambda disk: ["report", str(disk / "run")], "run/"),
        (lambda disk: ["audit", str(disk / "run")], "run/"),
        (lambda disk: ["sim", "--set", "trainer.train_steps=2", "--page", str(disk / "sim.html")], "sim.html"),
    ],
    ids=["init", "report", "audit", "sim"],
)
def test_a_command_on_a_full_disk_names_the_path(
    small_disk: Path, arguments: Callable[[Path], list[str]], file: str
) -> None:
    run_folder(small_disk)
    (small_disk / "mine").mkdir()
    fill(small_disk / "filler")
    done = CliRunner().invoke(app, arguments(small_disk))
    assert done.exit_code == 2, done.output
    assert "No space left on device" in done.stderr and str(small_disk / file) in done.stderr
    assert not list(small_disk.rglob("*.tmp")), "nothing half written is left"
    if file == "mine/":
        (small_disk / "filler").unlink()
        again = CliRunner().invoke(app, arguments(small_disk))
        assert again.exit_code == 0, again.output


def test_output_that_has_no_room_is_named_as_such() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rollmesh", "sim", "--set", "trainer.train_steps=2"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "No space left on device" in done.stderr and "standard output" in done.stderr
