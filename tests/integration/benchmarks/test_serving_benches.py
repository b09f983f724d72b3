"""The engine and reload benches run and measure what they name; their bars are for an idle machine, and not here."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.engine import MIXED_SLOTS, mixed_lengths
from rollmesh.sim.decode_curve import DecodeCurve

pytestmark = [pytest.mark.long, pytest.mark.slow]

Object = dict[str, object]


def measured(name: str, *options: str) -> dict[str, Object]:
    """Measures by name as ``python -m benchmarks NAME --json`` prints them."""
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    measures: list[Object] = [json.loads(line) for line in done.stdout.splitlines()]
    for m in measures:
        assert set(m) == {"name", "value", "unit", "baseline", "baseline_value", "ratio"}
        assert isinstance(m["value"], float) and math.isfinite(m["value"]) and m["value"] > 0, m
        if m["baseline"] is not None:
            assert isinstance(m["baseline_value"], float) and m["baseline_value"] > 0, m
            assert m["ratio"] == m["value"] / m["baseline_value"], m
    assert len({str(m["name"]) for m in measures}) == len(measures)
    return {str(m["name"]): m for m in measures}


def check_curve(path: Path, milliseconds: dict[str, object]) -> None:
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


@pytest.mark.timeout(660)
def test_the_engine_bench_measures_equal_and_mixed_lengths_beside_hugging_face(tmp_path: Path) -> None:
    measures = measured("engine", "--save", str(tmp_path / "curve.json"))
    rows = {name: measures.pop(name) for name in list(measures) if name.startswith("decode step")}
    check_curve(tmp_path / "curve.json", {name: row["value"] for name, row in rows.items()})
    gap = measures.pop("largest logprob gap to HF teacher forcing")
    assert isinstance(gap["value"], float) and gap["value"] < 1e-4
    baselines = {name: m["baseline"] for name, m in measures.items()}
    mixed = [name for name in baselines if "calls of mixed lengths" in name and "useful tokens" in name]
    assert baselines.pop(mixed[0]) == f"HF generate in batches of {MIXED_SLOTS}"
    uniform = [f"{size} calls of 64 tokens" for size in (1, 8, 32)]
    assert baselines == dict.fromkeys(uniform, "HF generate, static cache")
    assert {m["unit"] for m in measures.values()} == {"tokens/cpu-s"}


@pytest.mark.parametrize("prompts", [64, 256])
def test_mixed_lengths_have_the_long_tail_that_the_bench_promises(prompts: int) -> None:
    p50, p99 = np.percentile(mixed_lengths(prompts), [50, 99])
    assert p99 >= 8 * p50


@pytest.mark.timeout(660)
def test_the_reload_bench_measures_every_mode_beside_a_plain_copy() -> None:
    measures = measured("reload")
    names = []
    for mode in ("interrupt", "keep_kv", "drain"):
        seconds = [f"{what}, {mode}, 1 MB" for what in ("publish to serving", "pause of decoding")]
        seconds.append(f"longest silence of 16 streams, {mode}, 1 MB")
        stall, rate = f"trainer's stall, {mode}, 1 MB", f"reload, {mode}, 1 MB"
        whole = f"trainer's stall beside waiting, {mode}, 1 MB"
        assert (measures[stall]["unit"], measures[stall]["baseline"]) == ("seconds", "copy by numpy")
        assert (measures[whole]["unit"], measures[whole]["baseline"]) == ("seconds", "until the announcement")
        assert {measures[name]["unit"] for name in seconds} == {"seconds"}
        assert (measures[rate]["unit"], measures[rate]["baseline"]) == ("bytes/s", "plain file copy")
        names += [*seconds, stall, whole, rate]
    assert list(measures) == names


@pytest.mark.timeout(660)
def test_the_reload_bench_of_a_size_measures_one_model_beside_two_plain_copies() -> None:
    measures = measured("reload", "--size", "8MiB")
    baselines = {name.removesuffix(", 8MiB"): m["baseline"] for name, m in measures.items()}
    assert baselines == {
        "publish to serving": "two plain file copies",
        "trainer's canary": "publish to serving",
        "write and announce": "publish to serving",
        "verify": "publish to serving",
        "stage": "publish to serving",
        "canary": "publish to serving",
        "swap": "publish to serving",
        "pause of decoding": "publish to serving",
        "longest silence of 16 streams": None,
        "trainer's stall": "copy by numpy",
        "trainer's stall beside waiting": "until the announcement",
        "peak memory of trainer": "weights",
        "peak memory of generator": "weights",
    }
    values = {name.removesuffix(", 8MiB"): float(m["value"]) for name, m in measures.items()}
    parts = [values[phase] for phase in ("trainer's canary", "write and announce", "stage", "canary", "swap")]
    assert sum(parts) <= float(measures["pause of decoding, 8MiB"]["baseline_value"])
    assert 0 < values["pause of decoding"] <= values["swap"], "the swap includes the wait for the step under way"


def test_a_size_that_is_none_is_refused_by_name() -> None:
    command = [sys.executable, "-m", "benchmarks", "reload", "--size", "large"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode != 0
    assert "--size large: expected a size such as 64MiB or 1GiB" in done.stderr
