"""The outage of the chaos bench in which connections are refused: a dead server that cannot come back for a while."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import threading
import time
from pathlib import Path

import pytest

from rollmesh.store.embedded import EmbeddedServer

from ...chaos.attack import AttackedRun
from ...chaos.faults_of_redis import kill_redis


def _gone(child: int) -> bool:
    """Tell whether a child has ended with all its threads, the last of which closes its sockets and its lock."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _held_back(folder: Path) -> bool:
    with open(folder / "lock", "a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_a_killed_redis_that_is_held_back_refuses_connections_until_it_may_start_again(tmp_path: Path) -> None:
    launchers = EmbeddedServer(tmp_path)
    launchers.start()
    over = threading.Event()
    scene = AttackedRun(
        folder=tmp_path,
        run="r",
        redis=EmbeddedServer(tmp_path),
        rng=random.Random(0),
        ended=over.is_set,
        deadline=time.monotonic() + 60,
    )
    fault = threading.Thread(target=kill_redis, args=(scene,), kwargs={"away_seconds": 3600})
    first = launchers.pid
    assert first is not None
    fault.start()
    starter = threading.Thread(target=launchers.start)
    try:
        while not _gone(first) or not _held_back(tmp_path):
            assert time.monotonic() < scene.deadline
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
