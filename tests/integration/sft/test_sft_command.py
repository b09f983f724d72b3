"""``rollmesh sft`` as a user types it: killed, stopped, in two ranks, and with a wrong file."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

from rollmesh.cli.common import EXIT_STOPPED
from rollmesh.cli.main import app
from rollmesh.config.sft_config import SftConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import locked_run_folder
from rollmesh.recipes.countdown import warm_start
from rollmesh.recipes.countdown.tokenizer import stop_token_ids
from rollmesh.runtime.locks import locked_folder
from rollmesh.text import Tokenizer

from ...kit.demonstration_rows import sft_file
from ...kit.run_files import run_config
from ...kit.waiting import until
from ...kit.warm import TRAINER as TRAINER_IMPORTS
from ...kit.warm import WarmProcess, template
from ..trainer.two_ranks import TwoRanks

NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
TRAINER = {"epochs": 2, "lr_schedule": "cosine", "evaluation_every_steps": 4, "state_every_steps": 2}


def start_warm(file: Path) -> WarmProcess:
    """The command without the seconds of its imports."""
    modules = ("rollmesh.cli.main", "rollmesh.sft.fine_tuning", TRAINER_IMPORTS[-1])
    output = file.with_suffix(".log")
    return template(*modules).start("rollmesh.cli.main", ["sft", str(file)], output=output, environment=os.environ)


def start(file: Path) -> subprocess.Popen[str]:
    command = [str(Path(sys.executable).parent / "rollmesh"), "sft", str(file)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    text, _ = process.communicate(timeout=300)
    assert process.returncode == status, text
    return text


def lines(folder: Path) -> list[dict[str, Any]]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def until_step(process: subprocess.Popen[str] | WarmProcess, folder: Path, step: int) -> None:
    """Wait until the line of a step is there, or the process has ended."""

    def there() -> bool:
        return process.poll() is not None or any(line["train_step"] >= step for line in lines(folder)[-1:])

    until(there, f"step {step}")


def losses(folder: Path) -> list[tuple[int, float | None, float | None]]:
    found = lines(folder)
    return [(x["train_step"], x.get("loss"), x["evaluation"] and x["evaluation"]["loss"]) for x in found]


def test_a_run_that_is_killed_again_and_again_ends_with_the_bits_of_one_that_is_not(tmp_path: Path) -> None:
    whole = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path, "whole", trainer=TRAINER))])
    assert whole.exit_code == 0, whole.output
    assert f"trained model: {tmp_path / 'whole' / 'model'}" in whole.stdout
    assert "step 12/12  loss of 16 held-out rows 0." in whole.stdout
    file = sft_file(tmp_path, "killed", trainer=TRAINER)
    for step in (1, 3, 8):
        process = start_warm(file)
        until_step(process, tmp_path / "killed", step)
        process.kill()
        assert process.wait(300) == -signal.SIGKILL
    assert start_warm(file).wait(300) == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    models = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("whole", "killed")]
    assert models[0] == models[1]


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    trainer = {**TRAINER, "epochs": 1, "tokens_per_microbatch": 256}
    file = sft_file(tmp_path, "ranks", trainer=trainer)
    (tmp_path / "ranks").mkdir()
    ranks = TwoRanks(
        "rollmesh.cli.main",
        *("sft", file, "--supervised-by", str(os.getpid())),
        output=lambda rank: tmp_path / f"rank-{rank}",
    )
    assert ranks.wait(300) == 0, (tmp_path / "rank-0").read_text()
    assert "step 6/6" in (tmp_path / "rank-0").read_text()
    alone = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path, "alone", trainer=trainer))])
    assert alone.exit_code == 0, alone.output
    assert_equal(tmp_path / "ranks", tmp_path / "alone")


def assert_equal(ranks: Path, alone: Path) -> None:
    """The losses of two ranks are those of one process, but for the order of the sums."""
    for ours, theirs in zip(losses(ranks), losses(alone), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


@pytest.mark.long
def test_ctrl_c_ends_the_ranks_of_torchrun_after_their_step_and_they_continue(tmp_path: Path) -> None:
    trainer = {**TRAINER, "tokens_per_microbatch": 256}
    ranks = sft_file(tmp_path, "ranks", trainer=trainer, launcher={"trainer_processes": 2})
    process = start(ranks)
    until_step(process, tmp_path / "ranks", 3)
    os.kill(process.pid, signal.SIGINT)
    assert "stopped; the same command continues this run" in finish(process, EXIT_STOPPED)
    before = len(lines(tmp_path / "ranks"))
    assert 3 < before <= 12
    assert f"continuing after train step {before - 1} of 12" in finish(start(ranks))
    alone = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path, "alone", trainer=trainer))])
    assert alone.exit_code == 0, alone.output
    assert_equal(tmp_path / "ranks", tmp_path / "alone")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"trainer": {"epochs": 2, "train_steps": 5}}, "trainer: epochs=2 with train_steps=5: set one of them"),
        ({"trainer": {"learning_rat": 1e-3}}, "trainer.learning_rat: unknown key; did you mean learning_rate?"),
        ({"trainer": {"batch_rows": 0}}, "trainer.batch_rows: Input should be greater than or equal to 1 (got 0)"),
        ({"data": {"train": []}}, "data.train: List should have at least 1 item"),
        ({"data": {"train": ["absent.jsonl"]}}, "absent.jsonl: cannot be read: No such file"),
        ({"data": {"max_tokens": 8}}, "train.jsonl:1: "),
        ({"model": {"path": "absent"}}, "model.path=absent: absent contains no config.json"),
        pytest.param({"trainer": {"device": "cuda"}}, "device=cuda: this machine or", marks=NO_GPU),
        ({"launcher": {"trainer_processes": 0}}, "launcher.trainer_processes: Input should be greater"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_wrong_file_is_one_message_with_field_and_remedy(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path, **fields))])
    assert shown.exit_code == 2
    assert words in shown.stderr, shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.long
def test_ranks_say_once_what_is_wrong(tmp_path: Path) -> None:
    file = sft_file(tmp_path, data={"max_tokens": 8}, launcher={"trainer_processes": 2})
    text = finish(start(file), 2)
    assert text.count("tokens, more than 8 (data.max_tokens, or") == 1


def test_a_folder_has_a_run_of_one_kind(tmp_path: Path) -> None:
    file = sft_file(tmp_path, "ours", trainer={"train_steps": 1})
    assert CliRunner().invoke(app, ["sft", str(file)]).exit_code == 0
    ours, theirs = (run_config(f"folder={tmp_path / name}", "name=a model.path=m") for name in ("ours", "theirs"))
    with (
        pytest.raises(ConfigError, match=r"holds a run of rollmesh sft .* name another folder"),
        locked_run_folder(ours),
    ):
        pass
    with locked_run_folder(theirs):
        pass
    shown = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path, "theirs"))])
    assert "holds a run of rollmesh up (config.yaml); name another folder" in shown.stderr


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with locked_folder(tmp_path / "run", ""):
        shown = CliRunner().invoke(app, ["sft", str(sft_file(tmp_path))])
    assert shown.exit_code == 2
    assert "another launcher (pid" in shown.stderr
    assert "stop it first, or name another folder" in shown.stderr


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
