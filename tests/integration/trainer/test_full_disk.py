"""The checkpoint store runs full in the middle of a run: the trainer waits, and goes on once there is room."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import EmbeddedServer

from .gangs import run_gang
from .test_kills import assert_every_batch_counts_once
from .trainer_run import TrainerRun, opened_run, write_run_file


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(mount).encode(), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


async def test_a_full_disk_delays_the_run_and_loses_nothing(
    tmp_path: Path, tiny_model: Path, server: EmbeddedServer, small_disk: Path
) -> None:
    config = write_run_file(tmp_path / "run", tiny_model, server, checkpoints={"folder": str(small_disk)})
    async with opened_run(config) as run:
        run.start()
        async with run.fed(4):
            await run.until("step 1", lambda: _announced(run, 1), pause=0.001)
            filler = small_disk / "filler"
            _fill(filler)
            await run.until("a note that the disk is full", lambda: '"disk_full"' in run.log(), pause=0.02)
            before = await run.store.latest_policy()
            (endpoint,) = read_endpoints(run.folder, "trainer")
            async with httpx.AsyncClient() as client:
                answer = await client.get(f"http://{endpoint.admin}/readyz")
            assert answer.status_code == 503
            assert "disk full" in answer.json()["reason"]
            assert before is not None
            run.checkpoints.open(before)
            assert "bytes free" in run.log()
            filler.unlink()
            await run.until_finished()
        await assert_every_batch_counts_once(run, {})


def test_a_gang_whose_disk_is_full_on_one_rank_fails_together_and_saves_later(tmp_path: Path, tiny_model: Path) -> None:
    leader, follower = run_gang("full_disk_process", tiny_model, tmp_path / "checkpoints")
    assert re.findall(r"^full (\S+)$", leader, re.MULTILINE) == ["rank-00001.json", "rank-00000.json", "COMMITTED"]
    assert "saved 00000000-s" in leader
    assert follower.count("disk full while writing a trainer state") == 3
    assert "followed to the end" in follower


def _fill(path: Path) -> None:
    """Write until nothing fits any more."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(b"x" * size):
                    pass
            except OSError:
                continue


async def _announced(run: TrainerRun, step: int) -> bool:
    latest = await run.store.latest_policy()
    return latest is not None and latest.train_step >= step
