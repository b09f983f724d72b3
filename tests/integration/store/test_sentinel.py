"""A real Sentinel: the client finds the master, and after a failover the new one."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from rollmesh.config.store import StoreConfig
from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.store.embedded import find_server_binary

from ...kit.waiting import until
from .store_mesh import limits

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


async def test_after_a_failover_every_call_goes_to_the_master_that_the_sentinel_names(
    pair: tuple[EmbeddedServer, EmbeddedServer, str],
) -> None:
    master, replica, url = pair
    # A sentinel that was stalled trusts nothing that it sees for half a minute.
    connecting = TrajectoryStore.connect(StoreConfig(), run="failover", url=url, retry_seconds=240.0)
    async with await connecting as store:
        await store.limits.init_run(limits())
        await store.connection.command("SET", "{failover}kept", "1")
        with redis.Redis(port=port_of(replica)) as client:
            until(lambda: client.get("{failover}kept") == b"1", "the replica to follow")
        await asyncio.to_thread(master.kill)
        assert await store.connection.command("GET", "{failover}kept") == b"1"
        assert await store.recovery.begin(), "a script sees another server"
