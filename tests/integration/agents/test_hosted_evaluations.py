"""Evaluations of a hosted function by the commands of a user: before and after a run, and on other rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from .agent_mesh import write_model

JUDGE = """
import random

async def rollout(client, row):
    await client.chat.completions.create(model=row["model"], messages=row["messages"])
    return float(row["task"]["answer"]) if row["kind"] == "evaluation" else random.random()
"""


def rows(file: Path, answers: list[float]) -> Path:
    told = [{"prompt": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in answers]
    file.write_text("\n".join(map(json.dumps, told)))
    return file


def run_file(parent: Path) -> Path:
    source = {"type": "jsonl", "path": str(rows(parent / "tasks.jsonl", [0, 1])), "chat": True}
    (parent / "judge.py").write_text(JUDGE)
    data = {
        "name": "hosted",
        "folder": str(parent / "run"),
        "model": {"path": str(write_model(parent / "model", 0))},
        "data": {"source": source, "max_prompt_tokens": 64, "held_out_ratio": 0},
        "rollout": {"program": "agent", "agent": {"function": "judge:rollout"}, "max_new_tokens": 24},
        "reward": {"verifier": "exact"},
        "schedule": {"groups_per_batch": 1, "group_size": 2, "pool_size": 4},
        "generator": {"replicas": 1, "slots": 8, "max_context_tokens": 128, "device": "cpu"},
        "trainer": {"train_steps": 1, "device": "cpu"},
        "evaluation": {"before_and_after": True, "prompt_count": 3},
        "gateway": {"enabled": False},
        "agents": {"port": 0},
    }
    (parent / "run.yaml").write_text(yaml.safe_dump(data))
    return parent / "run.yaml"


def rollmesh(*arguments: str, parent: Path) -> str:
    command = [sys.executable, "-m", "rollmesh.cli.main", *arguments]
    done = subprocess.run(command, cwd=parent, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_hosted_function_is_evaluated_before_and_after_its_run_and_on_other_rows(tmp_path: Path) -> None:
    file, run = run_file(tmp_path), tmp_path / "run"
    rollmesh("up", str(file), "--inline", parent=tmp_path)
    scores = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert [(score["policy_version"], score["mean"], score["n"]) for score in scores] == [(0, 0.5, 2), (1, 0.5, 2)]

    other = rows(tmp_path / "other.jsonl", [0.25, 0.5, 0.75])
    score = json.loads(rollmesh("eval", str(run), "--version", "0", "--data", str(other), "--json", parent=tmp_path))
    assert (score["policy_version"], score["mean"], score["n"]) == (0, 0.5, 3)
    # The standard deviation of three values that are 1/4 apart is 1/4.
    assert score["standard_error"] == pytest.approx(0.25 / 3**0.5)
    assert not list(run.glob("evaluation-*"))
