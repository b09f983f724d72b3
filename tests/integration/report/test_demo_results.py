"""Rows of the table of presets, and the exit status of the command that makes them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.report.audit_result import AUDIT_FILE, AuditResult
from rollmesh.report.demo_results import demo_result, preset_table


def audit(folder: Path, *, green: bool = True) -> None:
    """Write an audit of 128 groups, three of them dropped beside."""
    dropped = {"straggler_timeout": 2, "run_complete": 1}
    problems = () if green else ("1 admitted group(s) are lost: e0-7",)
    result = AuditResult(run="run", committed_step=8, batch_files=8, groups=128, dropped=dropped, problems=problems)
    (folder / AUDIT_FILE).write_text(json.dumps({**json.loads(result.to_json()), "green": green}))


@pytest.fixture
def run(tmp_path: Path, make_run: Callable[..., Path]) -> Path:
    """A run of 8 updates, 5 seconds each, in which groups began again and members were cut off."""
    folder = make_run(tmp_path / "run", steps=8, preset="rollpacker")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["mesh"] |= {
        "totals": {"groups_restarted_total": 3, "groups_set_aside_total": 5},
        "wasted_tokens": {"surplus": 1234, "set_aside": 77},
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    audit(folder)
    return folder


def test_a_row_has_the_counts_of_the_audit_the_queue_and_the_step_reports(run: Path) -> None:
    result = demo_result(run, "rollpacker", 8)
    assert (result.updates, result.versions, result.trained_groups, result.dropped_groups) == (8, 9, 128, 3)
    assert (result.restarted_groups, result.groups_set_aside, result.surplus_tokens) == (3, 5, 1234)
    assert result.largest_staleness == 3
    assert result.updates_per_second == pytest.approx(1 / 5)
    assert result.passed
    out = io.StringIO()
    Console(file=out, width=200).print(preset_table([result]))
    row = ["rollpacker", "8", "of", "8", "9", "128", "3", "3", "5", "1,234"]
    assert out.getvalue().splitlines()[2].split()[:10] == row


def test_a_row_passes_with_all_updates_and_a_green_audit_only(run: Path) -> None:
    assert not demo_result(run, "rollpacker", 9).passed
    audit(run, green=False)
    assert not demo_result(run, "rollpacker", 8).passed
    (run / AUDIT_FILE).unlink()
    assert demo_result(run, "rollpacker", 8).audit == "none"


def test_a_run_without_a_step_has_an_empty_row(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    result = demo_result(tmp_path / "run", "sync", 6)
    assert (result.updates, result.versions, result.trained_groups, result.updates_per_second) == (0, None, None, None)
    assert not result.passed


def test_a_refused_run_fails_its_own_row_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Path]
) -> None:
    def train(config: RunConfig, _console: Console, *, inline: bool) -> int:
        if config.schedule.preset == "sync":
            raise ConfigError("trainer.train_steps may only grow, and was 8")
        make_run(Path(config.folder), steps=config.trainer.train_steps, preset=config.schedule.preset)
        audit(Path(config.folder))
        return 0

    make_run(tmp_path / "sync", steps=8, preset="sync")
    audit(tmp_path / "sync")
    monkeypatch.setattr("rollmesh.cli.demo_runs.run_to_report", train)
    options = ["demo-schedules", "--preset", "sync", "--preset", "copris", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 1, done.output
    assert "may only grow" in done.output
    assert done.output.splitlines()[-1].startswith("1 of 2 schedules")


@pytest.mark.parametrize(("green", "status"), [(True, 0), (False, 1)])
def test_the_command_ends_with_status_1_unless_every_run_is_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Path], green: bool, status: int
) -> None:
    def train(config: RunConfig, _console: Console, *, inline: bool) -> int:
        preset = config.schedule.preset
        make_run(Path(config.folder), steps=config.trainer.train_steps, preset=preset)
        audit(Path(config.folder), green=green or preset != "sync")
        return 0

    monkeypatch.setattr("rollmesh.cli.demo_runs.run_to_report", train)
    options = ["demo-schedules", "--preset", "sync", "--preset", "copris", "--folder", str(tmp_path)]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == status, done.output
    assert done.output.splitlines()[-1].startswith(f"{2 - status} of 2 schedules")
