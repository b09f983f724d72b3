"""The fuzz bench against a real run: no fault, no hang, no restart, and training continues."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow]


@pytest.mark.timeout(900)
def test_random_requests_to_every_port_neither_break_nor_stop_a_training_run() -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--quick", "--json"]
    wide = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=840, env=wide)
    assert done.returncode == 0, done.stderr
    found = {m["name"]: m for m in map(json.loads, done.stdout.splitlines())}
    values = {name: m["value"] for name, m in found.items()}
    assert values["requests"] >= 1_000, done.stderr
    for name in (
        "requests without an answer in time",
        "answers that are a fault of the service",
        "services that restarted or ended",
        "tracebacks in logs",
    ):
        assert values[name] == 0, (name, done.stderr)
    assert values["exit status of the stopped run"] == 130, done.stderr
    assert values["train steps after them"] >= 1 and values["audit green"] == 1, done.stderr
    services = (
        *("agents-0", "gateway-0", "generator-0", "generator-1"),
        *("reward-0", "rollout-0", "rollout-1", "teacher-wise-0", "trainer-0"),
    )
    for service in services:
        # That memory stays the same is a bar of the bench: of so few requests the warm-up is too short for it.
        assert found[f"RSS of {service}"]["baseline_value"] > 0
        assert f"{service} admin" in done.stderr
