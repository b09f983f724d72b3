"""Replicas follow `rollmesh scale` while the run trains, and nothing is lost on the way."""

import json
from pathlib import Path

import pytest

from rollmesh.runtime.endpoints import read_endpoints

from .conftest import ENDLESS, interrupted

pytestmark = pytest.mark.long


def indexes(folder: Path, service: str) -> list[int]:
    return [endpoint.index for endpoint in read_endpoints(folder, service)]


def test_replicas_come_and_go_as_asked_and_a_restart_keeps_their_number(started, wait_until) -> None:
    sections = {
        # At this pace training leaves the cores to the processes that start.
        "generator": {"replicas": 1, "slots": 32, "pace": [[1, 0.02]]},
        "trainer": {"train_steps": ENDLESS},
        "evaluation": {"before_and_after": False},
        "gateway": {"enabled": True},
    }
    line, process = started(**sections)
    line.trains(process)
    refused = line.run("scale", str(line.folder), "trainer=2")
    assert refused.returncode == 2 and "launcher.trainer_processes" in refused.stderr
    asked = line.succeeds("scale", str(line.folder), "generator=3", "reward=2", "rollout=2")
    assert "no launcher" not in asked.stderr
    wait_until(lambda: line.serving() == 3, "three generators that serve", process)
    wait_until(lambda: indexes(line.folder, "reward") == [0, 1], "two reward services", process)
    wait_until(lambda: indexes(line.folder, "rollout") == [0, 1], "two rollout workers", process)
    output = interrupted(process)
    assert "generator: 1 -> 3 replicas" in output

    at_rest = line.run("scale", str(line.folder), "rollout=default")
    assert "no launcher runs this run now" in at_rest.stderr, at_rest.stdout
    line, process = started(**sections)
    wait_until(lambda: indexes(line.folder, "generator") == [0, 1, 2], "the generators asked for", process)
    line.trains(process)
    wait_until(lambda: indexes(line.folder, "rollout") == [0], "the rollout worker of the run file", process)
    line.run("scale", str(line.folder), "generator=1", "reward=1")
    for service in ("generator", "reward"):
        wait_until(lambda s=service: indexes(line.folder, s) == [0], f"one {service}", process)
    wait_until(lambda: indexes(line.folder, "gateway") == [0], "the gateway", process)
    files = sorted(file.name for file in (line.folder / "services").iterdir())
    assert files == ["gateway-0.json", "generator-0.json", "reward-0.json", "rollout-0.json", "trainer-0.json"]
    shown = json.loads(line.run("scale", str(line.folder), "--json").stdout)
    assert shown["generator"] == {"run_file": 1, "wanted": 1, "running": 1}
    line.trains(process, 2)
    output = interrupted(process)
    assert output.index("generator-2 drained and stopped") < output.index("generator-1 drained and stopped")

    line.succeeds("audit", str(line.folder))
    assert line.audit()
