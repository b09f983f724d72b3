"""A whole run on a Redis that sentinels watch: its master is killed half-way, and nothing is lost."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from rollmesh.config import load_run_config
from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.store.embedded import find_server_binary

from .conftest import WAIT_SECONDS, until

pytestmark = pytest.mark.long

SERVICE = "queue"
PASSWORD, SENTINEL_PASSWORD = "of the data", "of the watchers"
STEPS = 16


def eventually(what: str, condition: Callable[[], bool]) -> None:
    def holds() -> bool:
        try:
            return condition()
        except redis.RedisError:
            return False

    until(holds, what)


@dataclass
class Watched:
    """A master, its replica, and three sentinels."""

    servers: list[EmbeddedServer]
    ports: list[int]

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        return f"redis+sentinel://{hosts}/{SERVICE}"

    def sentinel(self) -> redis.Redis:
        return redis.Redis(port=self.ports[0], password=SENTINEL_PASSWORD, decode_responses=True)

    def master(self) -> EmbeddedServer:
        """The server that the sentinels name."""
        with self.sentinel() as client:
            _, port = client.sentinel_get_master_addr_by_name(SERVICE)
        (found,) = [server for server in self.servers if port_of(server) == int(port)]
        return found

    def replica_follows(self) -> bool:
        with self.sentinel() as client:
            replicas = client.sentinel_slaves(SERVICE)
            watchers = int(client.sentinel_master(SERVICE)["num-other-sentinels"])
        return watchers == 2 and any(r["master-link-status"] == "ok" and not r["is_disconnected"] for r in replicas)


def port_of(server: EmbeddedServer) -> int:
    assert server.tcp_url is not None
    return int(server.tcp_url.rpartition(":")[2])


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    options = EmbeddedOptions(port=0, password=PASSWORD)
    with ExitStack() as stack:
        servers = [EmbeddedServer(tmp_path / name, options) for name in ("one", "two")]
        for server in servers:
            server.start()
            stack.callback(server.kill)
            with redis.Redis(port=port_of(server), password=PASSWORD) as client:
                client.config_set("masterauth", PASSWORD)
        master, replica = servers
        with redis.Redis(port=port_of(replica), password=PASSWORD) as client:
            client.execute_command("REPLICAOF", "127.0.0.1", port_of(master))
        ports = [free_port() for _ in range(3)]
        for port in ports:
            stack.callback(end, start_sentinel(tmp_path, port, port_of(master)))
        found = Watched(servers, ports)
        eventually("sentinels that see a replica and each other", found.replica_follows)
        yield found


def start_sentinel(folder: Path, port: int, master: int) -> subprocess.Popen[bytes]:
    # Eight seconds of silence: a machine that stalls for a few is no dead master.
    home = folder / f"sentinel-{port}"
    home.mkdir()
    config = home / "sentinel.conf"
    config.write_text(
        f'port {port}\nbind 127.0.0.1\ndir {home}\nrequirepass "{SENTINEL_PASSWORD}"\n'
        f'sentinel sentinel-pass "{SENTINEL_PASSWORD}"\n'
        f"sentinel monitor {SERVICE} 127.0.0.1 {master} 2\n"
        f'sentinel auth-pass {SERVICE} "{PASSWORD}"\n'
        f"sentinel down-after-milliseconds {SERVICE} 8000\nsentinel failover-timeout {SERVICE} 5000\n"
    )
    with (home / "log").open("wb") as log:
        return subprocess.Popen([str(find_server_binary()), str(config), "--sentinel"], stdout=log, stderr=log)


async def recovery_count(run_file: Path) -> int:
    """How often the queue's server came back as another one. The run's timeline may have no look at so short a time."""
    config = load_run_config(run_file, environ={})
    async with await TrajectoryStore.connect(config.store, config.name) as store:
        return (await store.mesh.counts()).totals["recoveries"]


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def test_a_run_continues_through_a_failover_and_loses_nothing(watched: Watched, started, wait_until) -> None:
    line, process = started(
        trainer={"train_steps": STEPS},
        # Slow enough for steps to be left when the test has seen the failover.
        generator={"pace": [[1, 0.02]]},
        evaluation={"before_and_after": False},
        store={
            "url": watched.url,
            "password": PASSWORD,
            "sentinel_password": SENTINEL_PASSWORD,
            "heartbeat_seconds": 1.0,
            "session_ttl_seconds": 5.0,
        },
    )
    line.trains(process, 2)
    killed = watched.master()
    killed.kill()
    eventually("another master", lambda: watched.master() is not killed)
    wanted = min(len(line.steps) + 2, STEPS)
    wait_until(lambda: len(line.steps) >= wanted, "train steps on the new master", process)
    output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    assert process.returncode == 0, output
    assert line.steps == list(range(1, STEPS + 1))
    assert line.audit()
    assert asyncio.run(recovery_count(line.run_file)) >= 1, "the failover was noticed"
    logs = "".join(file.read_text() for file in (line.folder / "logs").glob("*.log"))
    assert PASSWORD not in logs and SENTINEL_PASSWORD not in logs
