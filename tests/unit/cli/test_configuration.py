"""``rollmesh config``, and errors that are true for the command that was typed."""

import inspect
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.configuration import POINTS
from rollmesh.cli.main import app
from rollmesh.config import load_run_config
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.scheduling.presets import PRESETS
from rollmesh.user_code import load_target

EVERY = [(point, name) for point, found in POINTS.items() for name in found.methods]


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


def test_every_method_is_printed_with_its_point_options_and_source() -> None:
    result = CliRunner().invoke(app, ["config", "methods"])
    assert result.exit_code == 0
    headings = [line for line in result.output.splitlines() if not line.startswith(" ")]
    assert headings == [f"{point}: {name}" for point, name in EVERY]
    assert "  options: longest_tokens (required), length_scale (0.1), tau (10.0)\n" in result.output
    assert result.output.count("  source: ") == len(headings)


@pytest.mark.parametrize(("point", "name"), EVERY)
def test_the_function_of_a_row_takes_the_inputs_of_its_point_and_the_options_of_the_row(point: str, name: str) -> None:
    row = POINTS[point].methods[name]
    if target := POINTS[point].target(name):
        signature = inspect.signature(load_target(target, point))
        options = ["options"] if point == "planner" else row.options.model_fields  # a planner takes them as one
        signature.bind(*POINTS[point].inputs, **dict.fromkeys(options))


def test_a_field_of_few_names_has_those_of_its_rows() -> None:
    fields = AlgorithmConfig.model_fields
    for field, point in (
        (fields["old_logprobs"], "old_logprobs"),
        (fields["update_scale"], "update_scale"),
        (ReplayConfig.model_fields["by"], "replay"),
    ):
        assert get_args(field.annotation) == tuple(POINTS[point].methods)


def test_every_preset_is_printed_with_its_source_deviation_and_companions() -> None:
    printed = CliRunner().invoke(app, ["config", "schedules"]).output
    for name, preset in PRESETS.items():
        for text in (name, preset.source, preset.deviation, preset.goes_with):
            assert text in printed
