"""The run file of docs/warm-start.md: demonstrations to a model that a run begins with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config.sft_config import SftConfig
from rollmesh.recipes.countdown import warm_start
from rollmesh.recipes.countdown.tokenizer import stop_token_ids
from rollmesh.text import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
RUN_FILE = ROOT / "examples" / "warm-start.yaml"


def test_the_run_file_makes_a_model_that_a_run_begins_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["warm_start", "--out", "runs/countdown-start", "--rows", "400"])
    warm_start.main()
    done = CliRunner().invoke(app, ["sft", str(RUN_FILE), "--set", "trainer.train_steps=12"])
    assert done.exit_code == 0, done.output
    run = tmp_path / "runs" / "countdown-warm-start"
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [line["evaluation"]["loss"] for line in lines if line["evaluation"]]
    assert losses[-1] < losses[0] - 0.5
    assert Tokenizer(run / "model").eos_token_ids == tuple(stop_token_ids())
    path = f"model.path={run / 'model'}"
    checked = CliRunner().invoke(
        app, ["config", "validate", str(ROOT / "examples" / "countdown-cpu.yaml"), "--set", path]
    )
    assert checked.exit_code == 0, checked.output


def test_the_run_files_of_the_page_are_the_example_and_a_valid_one() -> None:
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "warm-start.md").read_text(), re.DOTALL)
    example, _, two_gpus = map(yaml.safe_load, shown)
    assert example == yaml.safe_load(RUN_FILE.read_text())
    assert SftConfig.model_validate(two_gpus).launcher.trainer_processes == 2
