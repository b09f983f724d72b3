"""The files of ``rollmesh init`` train, also when the run is started and evaluated from other folders than theirs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.user_code import CODE_FOLDER

from .conftest import WAIT_SECONDS

pytestmark = pytest.mark.long


def rollmesh(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", CODE_FOLDER)}
    return subprocess.run(
        [str(Path(sys.executable).parent / "rollmesh"), *arguments],
        cwd=folder,
        env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=2 * WAIT_SECONDS,
        check=False,
    )


def test_the_starter_trains_in_a_few_steps_and_says_that_the_evaluation_has_fewer_prompts(tmp_path: Path) -> None:
    written = rollmesh(tmp_path, "init", "countdown", "mine")
    assert written.returncode == 0, written.stderr
    few = [f"data.source.path={tmp_path}/mine/data.jsonl", "trainer.train_steps=2", "evaluation.prompt_count=24"]
    few += ["data.held_out_ratio=0.01", "schedule.groups_per_batch=4", "schedule.pool_size=null", "gateway.port=0"]
    done = rollmesh(tmp_path, "up", "mine/run.yaml", *(part for field in few for part in ("--set", field)))
    assert done.returncode == 0, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "hint: evaluation.prompt_count=24: the evaluation split has about 20 prompts" in text
    assert "(n=20); the evaluation split has 20 of evaluation.prompt_count=24 prompts: add rows, raise" in text
    steps = (tmp_path / "runs/countdown/metrics.jsonl").read_text().splitlines()
    rewards = [json.loads(step)["batch"]["outcome_mean"] for step in steps]
    assert len(rewards) == 2 and all(0 < reward < 1 for reward in rewards)

    # The verifier lies beside the run file: neither in the run folder, nor in the folder of this command.
    (tmp_path / "elsewhere").mkdir()
    scored = rollmesh(tmp_path / "elsewhere", "eval", str(tmp_path / "runs/countdown"), "--json")
    assert scored.returncode == 0, scored.stdout + scored.stderr
    assert json.loads(scored.stdout)["n"] == 20 and json.loads(scored.stdout)["mean"] > 0

    # Other prompts and settings, on a mesh beside the run: they are no evaluation of the run.
    run = tmp_path / "runs/countdown"
    recorded, rows = (run / "evaluations.jsonl").read_text(), (tmp_path / "mine/data.jsonl").read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(rows[:6]) + "\n")
    beside = ["--data", "other.jsonl", "--set", "evaluation.temperature=0", "--set", "evaluation.samples_per_prompt=2"]
    other = rollmesh(tmp_path, "eval", str(run), "--version", "1", *beside, "--json")
    assert other.returncode == 0, other.stdout + other.stderr
    found = json.loads(other.stdout)
    assert (found["policy_version"], found["n"], found["details"]["existing_prompts"]) == (1, 12, 6)
    assert (run / "evaluations.jsonl").read_text() == recorded
    assert not list(run.glob("evaluation-*"))

    # Rows that were added since are other prompts at every position: they are refused, and the old ones continue.
    data, whole = tmp_path / "mine/data.jsonl", "\n".join(rows) + "\n"
    longer = [part for field in [*few, "trainer.train_steps=3"] for part in ("--set", field)]
    data.write_text(whole + "\n".join(rows[:42]).replace('"prompt": "', '"prompt": " ') + "\n")
    refused = rollmesh(tmp_path, "up", "mine/run.yaml", *longer)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    said = " ".join((refused.stdout + refused.stderr).split())
    assert f"error data.source: the files have changed since the run began: {len(rows)} rows " in said
    assert f"then, {len(rows) + 42} rows " in said
    data.write_text(whole)
    done = rollmesh(tmp_path, "up", "mine/run.yaml", *longer)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The audit is green: 12 groups in 3 of 3 batch files" in " ".join(done.stdout.split())
