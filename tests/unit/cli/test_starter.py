"""``rollmesh init`` writes files that make a valid run, and no file twice."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.cli.up import DATA_FILE, starter_files
from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.recipes.countdown.demonstrations import SearcherMix, draw_demonstration
from rollmesh.tasks.countdown import CountdownVerifier


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
