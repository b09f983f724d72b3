"""Faults of files and of Redis do what they say, at a moment when nobody can write, and leave what they promise."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from redis import Redis

from rollmesh.store.embedded import EmbeddedServer
from rollmesh.store.scripts import Keys

from ...chaos.attack import AttackedRun
from ...chaos.faults import faults_named
from ...chaos.injections import damage_last_step, damage_replay, damage_state, fill_redis, kill_redis, stall_redis

CONTENT = bytes(1000)
LEASED = 7


def attacked_run(folder: Path, ended: Callable[[], bool] = lambda: False) -> AttackedRun:
    redis = EmbeddedServer(folder / "redis")
    deadline = time.monotonic() + 60
    return AttackedRun(folder=folder, run="r", redis=redis, rng=random.Random(0), ended=ended, deadline=deadline)


@contextmanager
def stand_in(folder: Path, service: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that stands for the one of a service."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = {"service": service, "index": 0, "pid": process.pid, "grpc": "", "admin": ""}
        (folder / "services").mkdir()
        (folder / "services" / f"{service}-0.json").write_text(json.dumps(record))
        yield process
        process.kill()


def write_checkpoints(folder: Path) -> None:
    """Write files of which the newest state covers step 6 and the newest batch file is of step 8."""
    states = [f"states/{step:08d}-a/{name}" for step in (3, 6) for name in ("COMMITTED", "shard.safetensors")]
    for name in (*states, "batches/00000006.pb", "batches/00000007.pb", "batches/00000008.pb"):
        file = folder / "checkpoints" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(CONTENT)


def changed(folder: Path) -> list[str]:
    """Files that are not as they were written, below the checkpoint store; each differs in one byte."""
    files = sorted(file for file in (folder / "checkpoints").rglob("*") if file.is_file())
    found = [file for file in files if file.read_bytes() != CONTENT]
    assert all(sum(a != b for a, b in zip(file.read_bytes(), CONTENT, strict=True)) == 1 for file in found)
    return [str(file.relative_to(folder / "checkpoints")) for file in found]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "damaged"),
    [(damage_replay, "batches/00000008.pb"), (damage_state, "states/00000006-a/shard.safetensors")],
)
def test_a_byte_is_flipped_in_what_the_next_trainer_reads_and_the_trainer_is_killed(
    tmp_path: Path, fault: Callable[[AttackedRun], None], damaged: str
) -> None:
    write_checkpoints(tmp_path)
    attacked = attacked_run(tmp_path)
    with stand_in(tmp_path, "trainer") as trainer:
        fault(attacked)
        assert trainer.wait() == -signal.SIGKILL
    assert changed(tmp_path) == [damaged]
    assert len(attacked.struck_at) == 1


@pytest.mark.long
@pytest.mark.parametrize("after_the_end", [False, True])
def test_the_last_steps_batch_file_and_state_are_damaged(tmp_path: Path, after_the_end: bool) -> None:
    write_checkpoints(tmp_path)
    attacked = attacked_run(tmp_path, lambda: after_the_end)
    damage_last_step(attacked, 6, after_the_end=after_the_end)
    state = [] if after_the_end else ["states/00000006-a/COMMITTED"]
    assert changed(tmp_path) == ["batches/00000006.pb", *state]
    assert (tmp_path / "checkpoints" / "states" / "00000006-a").exists() is not after_the_end
    assert len(attacked.struck_at) == 1


@pytest.mark.long
def test_a_redis_that_is_killed_with_zeros_at_the_end_of_its_file_says_what_the_round_asks_for(tmp_path: Path) -> None:
    notes: list[str] = []
    launchers = EmbeddedServer(tmp_path / "redis", note=notes.append)
    (fault,) = faults_named("kill -9 redis, 4 KiB of zeros at the end of its AOF")
    try:
        launchers.start()
        fault.inject(attacked_run(tmp_path))
        launchers.start()
        (note,) = notes
        assert fault.expected_end.output_contains in note
        assert "its last 4,096 of " in note
    finally:
        launchers.kill()


@pytest.mark.long
@pytest.mark.parametrize("fault", [stall_redis, fill_redis])
def test_a_stalled_and_a_full_redis_count_every_leased_rollout_and_let_all_continue(
    tmp_path: Path, fault: Callable[[AttackedRun, float], None]
) -> None:
    """The run is over, so that no fault lasts."""
    attacked = attacked_run(tmp_path, lambda: True)
    attacked.redis.start()
    try:
        with Redis(unix_socket_path=str(attacked.redis.socket_path)) as client, stand_in(tmp_path, "rollout") as worker:
            client.hset(Keys("r").single("counts"), "leased", LEASED)
            fault(attacked, 60.0)
            assert attacked.in_flight == [LEASED]
            assert attacked.struck_at == ([0] if fault is stall_redis else [])
            assert attacked.redis.pid is not None
            states = {psutil.Process(pid).status() for pid in (worker.pid, attacked.redis.pid)}
            assert psutil.STATUS_STOPPED not in states
            assert client.set("key", 1), "there is room again"
    finally:
        attacked.redis.kill()


def _held_back(folder: Path) -> bool:
    with open(folder / "lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_killed_redis_that_is_held_back_refuses_connections_until_it_may_start_again(tmp_path: Path) -> None:
    over = threading.Event()
    attacked = attacked_run(tmp_path, over.is_set)
    launchers = EmbeddedServer(attacked.redis.folder)
    launchers.start()
    first = launchers.pid
    assert first is not None

    def is_gone() -> bool:
        """Tell whether it has ended with all its threads, the last of which closes its sockets and its lock."""
        return os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    fault = threading.Thread(target=kill_redis, args=(attacked,), kwargs={"away_seconds": 3600})
    starter = threading.Thread(target=launchers.start)
    fault.start()
    try:
        while not is_gone() or not _held_back(attacked.redis.folder):
            assert time.monotonic() < attacked.deadline
            time.sleep(0.01)
        starter.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, pytest.raises(ConnectionRefusedError):
            client.connect(str(launchers.socket_path))
        starter.join(timeout=0.5)
        assert starter.is_alive(), "the server came back in the middle of its outage"
        over.set()
        starter.join(timeout=60)
        assert launchers.pid not in (None, first)
    finally:
        over.set()
        fault.join(timeout=60)
        starter.join(timeout=60)
        launchers.kill()
