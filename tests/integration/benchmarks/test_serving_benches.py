"""The benches of engine, reload, agents, scale and TRL measure what they name; their bars are for an idle machine."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import MIXED_SLOTS
from rollmesh.sim.decode_curve import DecodeCurve

from ...kit.environments import python_of

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(660)]


def bench(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def measured(name: str, *options: str) -> dict[str, dict[str, Any]]:
    """Measures by name as ``python -m benchmarks NAME --json`` prints them."""
    done = bench(name, *options)
    assert done.returncode == 0, done.stderr
    measures = [json.loads(line) for line in done.stdout.splitlines()]
    for m in measures:
        assert math.isfinite(m["value"]) and m["value"] > 0, m
        assert m["baseline"] is None or m["ratio"] == m["value"] / m["baseline_value"] > 0, m
    found = {m["name"]: m for m in measures}
    assert len(found) == len(measures)
    return found


def check_curve(path: Path, milliseconds: dict[str, float]) -> None:
    """The file has the printed steps, and the form that the simulator reads, whatever this busy machine measured."""
    document = json.loads(path.read_text())
    assert document["prefill_seconds_per_token"] > 0
    for point in document["points"]:
        row = f"decode step, {point['running']} running of {point['context']} tokens"
        assert milliseconds.pop(row) == 1000 * point["seconds"] > 0
        point["seconds"] = 0.001 * point["running"] + 1e-6 * point["context"]
    assert not milliseconds
    path.write_text(json.dumps(document))
    curve = DecodeCurve.read(path)
    assert {point.running for point in curve.points} == {1, 8}
    assert len({point.context for point in curve.points}) == 2


def test_the_engine_bench_measures_equal_and_mixed_lengths_beside_hugging_face(tmp_path: Path) -> None:
    measures = measured("engine", "--save", str(tmp_path / "curve.json"))
    check_curve(
        tmp_path / "curve.json", {name: m["value"] for name, m in measures.items() if name.startswith("decode step")}
    )
    assert measures["largest logprob gap to HF teacher forcing"]["value"] < 1e-4
    baselines = {name: m["baseline"] for name, m in measures.items() if m["baseline"]}
    (mixed,) = [name for name in baselines if "calls of mixed lengths" in name]
    assert baselines.pop(mixed) == f"HF generate in batches of {MIXED_SLOTS}"
    uniform = [f"{size} calls of 64 tokens" for size in (1, 8, 32)]
    assert baselines == dict.fromkeys(uniform, "HF generate, static cache")


def test_the_reload_bench_measures_the_phases_of_a_publication_beside_plain_copies() -> None:
    measures = {name.removesuffix(", 8MiB"): m for name, m in measured("reload", "--size", "8MiB").items()}
    assert measures["publish to serving"]["baseline"] == "two plain file copies"
    phases = ("trainer's canary", "write and announce", "stage", "canary", "swap")
    assert {measures[name]["baseline"] for name in (*phases, "verify", "pause of decoding")} == {"publish to serving"}
    assert measures["trainer's stall"]["baseline"] == "copy by numpy"
    whole = measures["pause of decoding"]["baseline_value"]
    assert sum(measures[phase]["value"] for phase in phases) <= whole
    assert 0 < measures["pause of decoding"]["value"] <= measures["swap"]["value"], "the swap waits for a step"


def test_a_size_that_is_none_is_refused_by_name() -> None:
    done = bench("reload", "--size", "large")
    assert done.returncode == 2
    assert "--size large: expected a size such as 64MiB or 1GiB" in done.stderr


def test_the_agents_bench_plays_sessions_with_tools_and_finds_their_prefixes() -> None:
    done = bench("agents")
    assert done.returncode == 0, done.stderr
    measures = {m["name"]: m for m in map(json.loads, done.stdout.splitlines())}
    assert len(measures) == 8
    (share,) = (m["value"] for m in measures.values() if m["unit"] == "share")
    assert 0.9 <= share <= 1.0
    assert measures["calls without time in tools"]["value"] > 0
    assert measures["memory of the service after 80 sessions"]["value"] > 50


def test_the_bench_of_trl_trains_the_same_task_with_both() -> None:
    python_of("trl")
    measures = measured("trl")
    assert {measures[what]["baseline"] for what in ("updates", "trained tokens")} == {"TRL, one process"}
    for who in ("TRL, one process", "the demo"):
        # The untrained model's answers have 60 tokens in the mean, those of a batch within a standard error of 7.
        assert 35 < measures[f"tokens of an update of {who}"]["value"] < 95
        assert measures[f"an update of {who}"]["unit"] == "seconds"


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
