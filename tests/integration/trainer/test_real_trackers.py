"""The real TensorBoard, and the real Weights & Biases client offline: what they write down."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rollmesh.errors import ConfigError
from rollmesh.trainer.service.run_log import build_trackers

from ...kit.run_files import run_config

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_WHOLE_OR_LAST = (1, 4)
RECORD = """
import sys
from rollmesh.config.load import validate_run_config
from rollmesh.trainer.service.run_log import build_trackers

data = {"name": "run", "folder": sys.argv[1], "model": {"path": "model"}, "telemetry": {"trackers": ["wandb"]}}
(tracker,) = build_trackers(validate_run_config(data, "made"))
for step in map(int, sys.argv[2:]):
    tracker.log(step, {"loss": 1 / step, "batch/reward": 0.5})
tracker.close()
"""


def test_tensorboard_gets_every_number_of_a_step(tmp_path: Path) -> None:
    (tracker,) = build_trackers(run_config(f"folder={tmp_path} telemetry.trackers=[tensorboard]"))
    tracker.log(3, {"loss": 0.5, "batch/reward": 1.0})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"loss", "batch/reward"}
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(3, 0.5)]


def test_an_option_that_tensorboard_does_not_have_is_refused_at_the_start(tmp_path: Path) -> None:
    options = "telemetry.tracker_options.tensorboard.flush_sec=1"
    with pytest.raises(ConfigError, match=r"telemetry.tracker_options.tensorboard: .*flush_sec"):
        build_trackers(run_config(f"folder={tmp_path} telemetry.trackers=[tensorboard] {options}"))


def test_wandb_records_every_number_also_of_a_step_that_is_trained_again(tmp_path: Path) -> None:
    record(tmp_path, 1, 2)
    record(tmp_path, 2, 3, 1)  # a restart, and a rollback
    runs = [list(history(file)) for file in sorted(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))]
    assert [[line["train_step"] for line in run] for run in runs] == [[1, 2], [2, 3, 1]]
    for line in (line for run in runs for line in run):
        assert (line["loss"], line["batch/reward"]) == (1 / line["train_step"], 0.5)


def test_at_wandb_a_folder_continues_its_run_and_two_folders_of_one_name_are_two_runs(tmp_path: Path) -> None:
    for folder in ("a", "a", "b"):
        record(tmp_path / folder, 1)
    ids = {folder: {p.name for p in tmp_path.glob(f"{folder}/wandb/offline-run-*/run-*.wandb")} for folder in "ab"}
    assert len(ids["a"]) == len(ids["b"]) == 1
    assert ids["a"] != ids["b"]


def test_a_missing_key_of_wandb_is_an_error_that_says_what_to_set(tmp_path: Path) -> None:
    done = run(tmp_path, 1, mode="online")
    assert done.returncode != 0
    assert "telemetry.trackers: wandb" in done.stderr
    assert "WANDB_API_KEY" in done.stderr.splitlines()[-1]


def record(folder: Path, *steps: int) -> None:
    done = run(folder, *steps, mode="offline")
    assert done.returncode == 0, done.stderr


def run(folder: Path, *steps: int, mode: str) -> subprocess.CompletedProcess[str]:
    keyless = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = {"HOME": str(folder), "NETRC": str(folder / "netrc"), "WANDB_MODE": mode}
    words = [sys.executable, "-c", RECORD, str(folder), *map(str, steps)]
    return subprocess.run(
        words, env=keyless | home, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240, check=False
    )


def history(file: Path) -> Iterator[dict[str, float]]:
    """Return the values given to ``log``: protobuf records in a LevelDB log."""
    data, at, record = file.read_bytes(), _HEADER.size, b""
    while at + _HEADER.size <= len(data):
        left = -at % _BLOCK
        if 0 < left < _HEADER.size:
            at += left
            continue
        _, length, kind = _HEADER.unpack_from(data, at)
        at += _HEADER.size + length
        record += data[at - length : at]
        if kind in _WHOLE_OR_LAST:
            items = wandb_internal_pb2.Record.FromString(record).history.item
            record = b""
            if items:
                numbers = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
                yield {name: value for name, value in numbers.items() if not name.startswith("_")}
