"""Short runs of the demo under every schedule and method: their settings, their rows, and the exit status."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.demos import app, demo_result
from rollmesh.cli.configuration import method_settings
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.report.audit_result import AUDIT_FILE, AuditResult
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.presets import PRESETS, companion_settings

from ..report.made_run import make_run

SETTINGS = {
    **method_settings(),
    **{name: [f"schedule.preset={name}", *companion_settings(preset)] for name, preset in PRESETS.items()},
}
TWO_PRESETS = ("--preset", "sync", "--preset", "copris")
TWO_SEEDS = ("--seed", "0", "--seed", "1")


def audit(folder: Path, *, green: bool = True) -> None:
    """Write an audit of 128 groups, three of them dropped beside."""
    dropped = {"straggler_timeout": 2, "run_complete": 1}
    problems = () if green else ("1 admitted group(s) are lost: e0-7",)
    result = AuditResult(run="run", committed_step=8, batch_files=8, groups=128, dropped=dropped, problems=problems)
    (folder / AUDIT_FILE).write_text(json.dumps({**json.loads(result.to_json()), "green": green}))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_settings_of_a_run_are_valid_in_the_demo(name: str) -> None:
    overrides = ["schedule.pool_size=null", "schedule.max_staleness=null", *SETTINGS[name]]
    config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides, environ={})
    assert Schedule.from_config(config).preset == name or "/" in name


def test_a_run_passes_with_all_updates_and_a_green_audit_only(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=8, preset="rollpacker")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["mesh"] |= {
        "totals": {"groups_restarted_total": 3, "groups_set_aside_total": 5},
        "wasted_tokens": {"surplus": 1234, "set_aside": 77},
    }
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert demo_result(run, "rollpacker", 8).audit == "none"
    audit(run)
    result = demo_result(run, "rollpacker", 8)
    summary = result.summary
    assert (summary.train_steps, summary.policy_versions, summary.largest_staleness) == (8, 9, 3)
    assert (summary.begun_again, summary.surplus_tokens) == ({"restarted": 3, "set aside": 5}, 1234)
    assert result.updates_per_second == pytest.approx(1 / 5)
    assert result.passed and not demo_result(run, "rollpacker", 9).passed
    audit(run, green=False)
    assert not demo_result(run, "rollpacker", 8).passed


@pytest.mark.parametrize(("fate", "status"), [("green", 0), ("red", 1), ("refused", 1)])
def test_the_command_ends_with_status_1_unless_every_run_is_green(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str, status: int
) -> None:
    def train(config: RunConfig, _console: Console, *, inline: bool) -> int:
        preset = config.schedule.preset
        if fate == "refused" and preset == "sync":
            raise ConfigError("trainer.train_steps may only grow, and was 8")
        make_run(Path(config.folder), steps=config.trainer.train_steps, preset=preset)
        audit(Path(config.folder), green=fate != "red" or preset != "sync")
        return 0

    monkeypatch.setattr("benchmarks.demos.run_to_report", train)
    done = CliRunner().invoke(app, ["schedules", *TWO_PRESETS, "--folder", str(tmp_path)])
    assert done.exit_code == status, done.output
    assert ("may only grow" in done.output) is (fate == "refused")
    assert done.output.splitlines()[-1].startswith(f"{2 - status} of 2 schedules")


@pytest.mark.parametrize(("gain", "green", "status"), [(0.30, True, 0), (0.20, True, 1), (0.30, False, 1)])
def test_seeds_end_with_the_verdict_and_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gain: float, green: bool, status: int
) -> None:
    def train(config: RunConfig, _console: Console, *, inline: bool) -> int:
        preset = config.schedule.preset
        make_run(Path(config.folder), steps=8, seed=config.seed, preset=preset, gain=gain if preset != "sync" else 0.3)
        audit(Path(config.folder), green=green)
        return 0 if green else 1

    monkeypatch.setattr("benchmarks.demos.run_to_report", train)
    done = CliRunner().invoke(app, ["seeds", *TWO_SEEDS, "--folder", str(tmp_path)])
    assert done.exit_code == status, done.output
    assert done.output.splitlines()[-1].startswith("verdict: ")
    assert ("NOT" in done.output.splitlines()[-1]) is bool(status)
