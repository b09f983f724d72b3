"""Errors and outputs of commands are true for the command that was typed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import load_run_config
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.runtime.lifecycle import EXIT_CONFIG


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    run = {"name": "hints", "folder": str(tmp_path / "run"), "model": {"path": "recipe:countdown"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return tmp_path / "run.yaml"


@pytest.mark.parametrize("service", ["gateway", "agents", "rollout", "generator", "trainer"])
def test_a_service_by_hand_without_a_redis_of_its_own_is_told_what_it_needs(run_file: Path, service: str) -> None:
    done = CliRunner().invoke(app, [service, str(run_file)])
    assert done.exit_code == EXIT_CONFIG
    assert "store.url is null" in done.stderr and "store.url=redis://HOST:PORT" in done.stderr
    assert "{" not in done.stderr, "a sentence, no log line"


def test_an_evaluation_of_a_live_run_is_told_to_wait_or_to_let_the_run_evaluate(run_file: Path) -> None:
    with locked_run_folder(load_run_config(run_file)) as folder:
        done = CliRunner().invoke(app, ["eval", str(folder.path)])
    assert done.exit_code == 2
    assert "stop it first, or let it evaluate versions itself: evaluation.every_versions" in done.stderr
    assert "another folder" not in done.stderr


def test_the_settings_of_a_run_are_shown_by_its_folder_as_by_its_file(run_file: Path) -> None:
    with locked_run_folder(load_run_config(run_file)) as folder:
        pass
    shown = [CliRunner().invoke(app, ["config", "show", str(path)]) for path in (run_file, folder.path)]
    assert [done.exit_code for done in shown] == [0, 0]
    assert shown[0].stdout == shown[1].stdout
    other = CliRunner().invoke(app, ["config", "show", str(run_file.parent)])
    assert other.exit_code == 2 and "no config.yaml there; is this a run folder?" in other.stderr
