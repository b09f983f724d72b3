"""A real Sentinel: the client finds the master, and a failover is a recovery that loses no group."""

from __future__ import annotations

import asyncio
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedOptions, EmbeddedServer
from rollmesh.store.embedded import find_server_binary

from ...kit.waiting import until
from .load import LoadedMesh
from .loaded_workers import Shape

SERVICE = "queue"


def port_of(server: EmbeddedServer) -> int:
    return int(server.tcp_url.rpartition(":")[2])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[EmbeddedServer, EmbeddedServer, str]]:
    """A master, its replica, and the URL of the sentinel that watches them."""
    servers = [EmbeddedServer(tmp_path / name, EmbeddedOptions(port=0)) for name in ("master", "replica")]
    for server in servers:
        server.start()
    master, replica = servers
    with redis.Redis(port=port_of(replica)) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", port_of(master))
    port = free_port()
    # Three seconds of silence: a machine that stalls for one is no dead master.
    config = tmp_path / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {tmp_path}\n"
        f"sentinel monitor {SERVICE} 127.0.0.1 {port_of(master)} 1\n"
        f"sentinel down-after-milliseconds {SERVICE} 3000\nsentinel failover-timeout {SERVICE} 2000\n"
    )
    with open(tmp_path / "sentinel.log", "wb") as log:
        process = subprocess.Popen([str(find_server_binary()), str(config), "--sentinel"], stdout=log, stderr=log)
    try:
        until(lambda: sees_replica(port), "a sentinel that sees the replica")
        yield master, replica, f"redis+sentinel://127.0.0.1:{port}/{SERVICE}"
    finally:
        process.kill()
        process.wait()
        for server in servers:
            server.kill()


def sees_replica(port: int) -> bool:
    try:
        with redis.Redis(port=port, decode_responses=True) as client:
            replicas = client.sentinel_slaves(SERVICE)
    except redis.RedisError:
        return False
    return any(r["master-link-status"] == "ok" and not r["is_disconnected"] for r in replicas)


async def test_a_failover_loses_no_group_and_trains_none_twice(
    pair: tuple[EmbeddedServer, EmbeddedServer, str],
) -> None:
    master, _, url = pair
    async with LoadedMesh(url, "failover", 0.5, random.Random(5), Shape()) as mesh:
        # A sentinel that was stalled trusts nothing that it sees for half a minute.
        await mesh.trainer.until(4, 120.0)
        await asyncio.to_thread(master.kill)
        await mesh.trainer.until(8, 120.0)
        await mesh.stop()
        assert (await mesh.stores[0].mesh.counts()).totals["recoveries"] >= 1
        account = await mesh.account()
        assert not any(account.values()), account
