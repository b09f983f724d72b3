"""Short runs of the demo under every schedule and method: their settings, their rows, and the exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.demos import app, demo_result, effect_of
from rollmesh.cli.configuration import method_settings
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.report.audit_result import AUDIT_FILE, AuditResult
from rollmesh.report.summary import summarise
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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("schedules", "--preset", "copris2"), "--preset copris2: not known; known: sync, "),
        (("methods", "--method", "drpo"), "--method drpo: not known; known: sampler/order, "),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(options: tuple[str, ...], words: str) -> None:
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2
    assert words in " ".join(done.output.split())


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


@pytest.mark.parametrize(
    ("method", "changes", "effect"),
    [
        (
            "planner/dars",
            {"rollouts_per_group": {8: 1, 32: 1}, "rounds_per_group": 1.5},
            "8 to 32 rollouts a group",
        ),
        ("masks/m2po", {"masked_tokens": {"stale": 2, "m2po": 1511}}, "m2po masked 1,511 tokens"),
        ("masks/m2po", {"masked_tokens": {"stale": 2}}, ""),
        ("update_scale/ess", {"mean_rate_factor": 0.95}, "rate times 0.950"),
        ("replay/uniform", {"replayed_share": 0.5}, "50.0% of the trajectories replayed"),
        ("advantage/pairs", {"skipped_trajectories": 56}, "mean size 0.500, 56 skipped"),
        ("sampler/band", {"domains": {"a": {"completed": 1}, "b": {"completed": 3}}}, "completed a 25.0% b 75.0%"),
        ("loss/tis", {}, "mean gradient norm 2"),
    ],
)
def test_an_effect_is_what_totals_and_step_reports_show(
    tmp_path: Path, method: str, changes: dict[str, Any], effect: str
) -> None:
    summary = summarise(make_run(tmp_path / "run", steps=3))
    for name, value in changes.items():
        assert hasattr(summary, name)
        setattr(summary, name, value)
    records = [{"grad_norm": norm, "batch": {"advantage_abs_mean": norm / 4}} for norm in (1.0, 2.0, 3.0)]
    assert effect_of(method, summary, records).startswith(effect)
