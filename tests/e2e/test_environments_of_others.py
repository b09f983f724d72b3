"""Environments that others wrote train in a real mesh, from a run file that `config validate` has accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..kit.openenv_server import openenv_server
from .conftest import CommandLine, assert_rescored, end, until

ROWS = [{"prompt": f"{i % 9 + 1} {i % 7 + 1} > {i % 5 + 1} :", "answer": ""} for i in range(40)]
CLASS = """
class Claims:
    def reset(self, seed=None, options=None):
        self.turns = 0
        return " : ", {}

    def step(self, action):
        self.turns += 1
        return " : ", 0.5 * action, self.turns == 2, False, {}
"""


def environment_run(
    small_run: Callable[..., CommandLine], folder: Path, name: str, options: dict[str, Any], **sections: Any
) -> CommandLine:
    """A small run in an environment; the first text and the reply are words of the model."""
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (folder / "claims.py").write_text(CLASS)
    rollout = {"program": "environment", "environment": name, "environment_options": options, "max_turns": 2}
    return small_run(
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}},
        rollout={**rollout, "max_new_tokens": 96, "max_attempts": 50},
        evaluation={"before_and_after": False},
        **{"generator": {"replicas": 1}, "trainer": {"train_steps": 2, "sample_completions": 64}, **sections},
    )


def assert_trained(line: CommandLine) -> None:
    """Every episode begins with the first text, is paid for its claims, and has two turns if it ends."""
    samples = line.json_lines("samples.jsonl")
    assert all(sample["completion"].startswith(":") for sample in samples)
    ended = [sample for sample in samples if sample["finish_reason"] == "environment"]
    assert len({sample["reward"] for sample in ended}) > 1
    assert all(sample["reward"] == sample["completion"].count("!") / 2 for sample in ended)
    assert {sample["completion"].count(":") for sample in ended} == {2}
    assert_rescored(line.audit())


def trained(small_run: Callable[..., CommandLine], folder: Path, options: dict[str, Any]) -> CommandLine:
    """A run in a Gymnasium environment that was validated and has ended."""
    line = environment_run(small_run, folder, "gymnasium", options)
    validated = line.run("config", "validate", str(line.run_file))
    assert validated.returncode == 0, validated.stdout + validated.stderr
    done = line.run("up", str(line.run_file), "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    return line


def test_a_gymnasium_like_class_beside_the_run_file_trains(small_run, tmp_path: Path) -> None:
    assert_trained(trained(small_run, tmp_path, {"target": "claims:Claims", "action": {"!": 1, "?": 0}}))


@pytest.mark.long
def test_a_registered_environment_of_gymnasium_trains(small_run, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    # From the corner: a claim is a step up, which costs 1, anything else a step to the right, into the cliff: 100.
    options = {"target": "gymnasium:CliffWalking-v1", "action": {"!": 0, "?": 1}, "replayable": True}
    line = trained(small_run, tmp_path, options)
    rewards = {sample["reward"] for sample in line.json_lines("samples.jsonl")}
    assert len(rewards) > 1 and rewards <= {0.0, -1.0, -2.0, -100.0, -101.0, -200.0}
    assert_rescored(line.audit())


@pytest.mark.long
def test_an_openenv_server_trains_and_its_death_costs_episodes_alone(small_run, tmp_path: Path) -> None:
    with openenv_server(tmp_path) as server:
        wrong = environment_run(small_run, tmp_path, "openenv", {"url": f"{server.url}/claims", "field": "words"})
        refused = wrong.run("config", "validate", str(wrong.run_file))
        assert refused.returncode == 2 and "rollout.environment=openenv" in refused.stderr
        assert "VALIDATION_ERROR" in refused.stderr
        trainer = {"train_steps": 6, "sample_completions": 64}
        line = environment_run(small_run, tmp_path, "openenv", {"url": f"{server.url}/claims"}, trainer=trainer)
        validated = line.run("config", "validate", str(line.run_file))
        assert validated.returncode == 0, validated.stdout + validated.stderr
        process = line.start("up", str(line.run_file))
        line.trains(process)
        server.kill()
        log = line.folder / "logs" / "rollout-0.log"
        until(lambda: "UNREACHABLE" in log.read_text(), "an episode without its server", process)
        server.start(server.port)
        until(lambda: line.steps[-1] == 6, "the last step", process)
        end(process)
        assert process.returncode == 0
    assert_trained(line)
