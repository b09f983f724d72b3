"""The scale bench holds its rollouts in flight on a real mesh, and counts what becomes of each."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.long, pytest.mark.slow]

FAULTS = (
    "trajectories in no state",
    "leases beyond one a trajectory",
    "trajectories consumed twice",
    "groups consumed incomplete",
    "trajectories with other tokens than were sent",
    "groups dropped",
)


@pytest.mark.timeout(600)
def test_the_scale_bench_holds_200_rollouts_in_flight_and_loses_none_also_with_a_teacher() -> None:
    command = [sys.executable, "-m", "benchmarks", "scale", "--quick", "--level", "200", "--teacher", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=580)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    values = {row["name"].removeprefix("200 in flight: "): row["value"] for row in rows}
    assert {name: values[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    taught = {row["name"].removeprefix("200 in flight, with a teacher: "): row["value"] for row in rows}
    assert {name: taught[name] for name in FAULTS} == dict.fromkeys(FAULTS, 0)
    assert 100 < values["held"] <= 200
    assert values["finished"] > 0
    parts = ("Redis", "workers", "leader", "emulated generators", "reward service", "consumer")
    assert all(values[f"CPU of {part} a trajectory"] > 0 for part in parts)
    for name in ("look", "decision", "PING of Redis", *(f"event loop lag, {part}" for part in parts[1:])):
        assert 0 < values[f"{name}, p50"] <= values[f"{name}, p99"]
    total = values["CPU of Redis, workers and leader a trajectory"]
    assert total == pytest.approx(sum(values[f"CPU of {part} a trajectory"] for part in parts[:3]))
