"""A stalled and a full Redis lose nothing that they had taken: their rounds are judged by the rollouts in flight."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from redis import Redis

from rollmesh.store.embedded import EmbeddedServer
from rollmesh.store.scripts import Keys

from ...chaos.attack import AttackedRun
from ...chaos.faults_of_redis import fill_redis, stall_redis

pytestmark = pytest.mark.long

LEASED = 7


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that counts some leased rollouts."""
    server = EmbeddedServer(tmp_path / "redis")
    server.start()
    try:
        with Redis(unix_socket_path=str(server.socket_path)) as client:
            client.hset(Keys("r").single("counts"), "leased", LEASED)
        yield server
    finally:
        server.kill()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process that stands for a rollout replica."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        record = {"service": "rollout", "index": 0, "pid": process.pid, "grpc": "", "admin": ""}
        (tmp_path / "services").mkdir()
        (tmp_path / "services" / "rollout-0.json").write_text(json.dumps(record))
        yield psutil.Process(process.pid)
        process.kill()


def scene(folder: Path, server: EmbeddedServer) -> AttackedRun:
    """A run that is over, so that no fault lasts."""
    return AttackedRun(
        folder=folder, run="r", redis=server, rng=random.Random(0), ended=lambda: True, deadline=time.monotonic() + 60
    )


def test_an_outage_counts_every_leased_rollout_and_lets_workers_and_redis_continue(
    tmp_path: Path, server: EmbeddedServer, worker: psutil.Process
) -> None:
    attacked = scene(tmp_path, server)
    stall_redis(attacked, 60.0)
    assert attacked.in_flight == [LEASED]
    assert attacked.struck_at == [0]
    assert server.pid is not None
    assert psutil.STATUS_STOPPED not in {worker.status(), psutil.Process(server.pid).status()}


def test_a_full_redis_counts_every_leased_rollout_and_has_room_again(tmp_path: Path, server: EmbeddedServer) -> None:
    attacked = scene(tmp_path, server)
    fill_redis(attacked, 8.0)
    assert attacked.in_flight == [LEASED]
    with Redis(unix_socket_path=str(server.socket_path)) as client:
        assert client.set("key", 1)
