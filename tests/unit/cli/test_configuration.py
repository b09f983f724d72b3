"""``rollmesh config`` and ``init``: files that make a valid run, and errors that are true for the command typed."""

import importlib.util
import inspect
import json
import random
from pathlib import Path
from typing import get_args

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.configuration import POINTS
from rollmesh.cli.main import app
from rollmesh.cli.up import DATA_FILE, starter_files
from rollmesh.config import load_run_config
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.config.recipes import recipe_file
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.scheduling.presets import PRESETS
from rollmesh.tasks.countdown import CountdownVerifier
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


def init(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["init", *arguments])
    return result.exit_code, result.output


def test_the_written_files_are_a_run_whose_command_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = init("countdown", "mine")
    assert status == 0 and "next: cd mine && rollmesh up run.yaml" in output
    assert {file.name for file in Path("mine").iterdir()} == set(starter_files("countdown"))
    config = load_run_config("mine/run.yaml", environ={})
    assert config.data.sources["source"].table_path == DATA_FILE
    assert config.reward.verifier.split(":")[0] == "countdown_reward"
    assert config.evaluation.prompt_count <= config.data.held_out_ratio * 2_048


def test_rows_are_distinct_prompts(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in starter_files("countdown")[DATA_FILE].splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 2_048


def test_the_verifier_agrees_with_the_built_in_one_of_the_task() -> None:
    file = recipe_file("countdown", "starter") / "countdown_reward.py"
    spec = importlib.util.spec_from_file_location("countdown_reward", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rng, rewards = random.Random(3), []
    for _ in range(300):
        found = draw_demonstration(rng, SearcherMix())
        puzzle = found.puzzle
        for response in (found.response, found.response.replace("+", "-", 1), found.response.replace("?", "!")):
            metadata = {"numbers": list(puzzle.numbers), "target": puzzle.target, "answer": puzzle.target}
            built_in = CountdownVerifier().verify(response, metadata).value
            assert module.reward(response, metadata) == built_in, response
            rewards.append(built_in)
    assert 0.1 < sum(rewards) / len(rewards) < 0.9


def test_an_existing_file_is_kept_and_an_unknown_task_names_those_that_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    Path("mine/run.yaml").write_text("name: kept\n")
    status, output = init("countdown", "mine")
    assert status == 2 and "mine/run.yaml exists; give another FOLDER: rollmesh init TASK FOLDER" in output
    assert Path("mine/run.yaml").read_text() == "name: kept\n" and len(list(Path("mine").iterdir())) == 1
    status, output = init("mine")
    assert status == 2 and "TASK=mine: expected countdown" in output and not Path("mine/data.jsonl").exists()
