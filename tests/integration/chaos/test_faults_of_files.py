"""Faults of files change the one byte that they name, at a moment when the trainer cannot write."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.store.embedded import EmbeddedServer

from ...chaos.attack import AttackedRun
from ...chaos.faults import faults_named
from ...chaos.faults_of_files import damage_last_step, damage_replay, damage_state

pytestmark = pytest.mark.long

CONTENT = bytes(1000)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the trainer."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = {"service": "trainer", "index": 0, "pid": process.pid, "grpc": "", "admin": ""}
        (tmp_path / "services").mkdir()
        (tmp_path / "services" / "trainer-0.json").write_text(json.dumps(record))
        yield process
        process.kill()


def scene(folder: Path, *, ended: bool = False) -> AttackedRun:
    """A run whose newest state covers step 6 and whose newest batch file is of step 8."""
    for name in ("batches/00000006.pb", "batches/00000007.pb", "batches/00000008.pb"):
        written(folder / "checkpoints" / name)
    for step in (3, 6):
        for name in ("COMMITTED", "shard.safetensors"):
            written(folder / "checkpoints" / "states" / f"{step:08d}-a" / name)
    return AttackedRun(
        folder=folder,
        run="r",
        redis=EmbeddedServer(folder / "redis"),
        rng=random.Random(0),
        ended=lambda: ended,
        deadline=time.monotonic() + 60,
    )


def written(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(CONTENT)


def changed(folder: Path) -> list[str]:
    """Files that are not as they were written, below the checkpoint store."""
    files = sorted((folder / "checkpoints").rglob("*.*")) + sorted((folder / "checkpoints").rglob("COMMITTED"))
    found = [file for file in files if file.is_file() and file.read_bytes() != CONTENT]
    assert all(sum(a != b for a, b in zip(file.read_bytes(), CONTENT, strict=True)) == 1 for file in found)
    return [str(file.relative_to(folder / "checkpoints")) for file in found]


@pytest.mark.parametrize(
    ("fault", "damaged"),
    [(damage_replay, "batches/00000008.pb"), (damage_state, "states/00000006-a/shard.safetensors")],
)
def test_a_byte_is_flipped_in_what_the_next_trainer_reads_and_the_trainer_is_killed(
    tmp_path: Path, trainer: subprocess.Popen[bytes], fault: Callable[[AttackedRun], None], damaged: str
) -> None:
    attacked = scene(tmp_path)
    fault(attacked)
    assert changed(tmp_path) == [damaged]
    assert trainer.wait() == -signal.SIGKILL
    assert len(attacked.struck_at) == 1


@pytest.mark.parametrize("after_the_end", [False, True])
def test_the_last_steps_batch_file_and_state_are_damaged(tmp_path: Path, after_the_end: bool) -> None:
    attacked = scene(tmp_path, ended=after_the_end)
    damage_last_step(attacked, 6, after_the_end=after_the_end)
    state = [] if after_the_end else ["states/00000006-a/COMMITTED"]
    assert changed(tmp_path) == ["batches/00000006.pb", *state]
    assert (tmp_path / "checkpoints" / "states" / "00000006-a").exists() is not after_the_end
    assert len(attacked.struck_at) == 1


def test_a_redis_that_is_killed_with_zeros_at_the_end_of_its_file_says_what_the_round_asks_for(tmp_path: Path) -> None:
    notes: list[str] = []
    attacked = replace(scene(tmp_path), redis=EmbeddedServer(tmp_path / "redis", note=notes.append))
    (fault,) = faults_named("kill -9 redis, 4 KiB of zeros at the end of its AOF")
    try:
        attacked.redis.start()
        fault.inject(attacked)
        attacked.redis.start()
        (note,) = notes
        assert fault.expected_end.output_contains in note
        assert "its last 4,096 of " in note
    finally:
        attacked.redis.kill()
