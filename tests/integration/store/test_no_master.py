"""A server that is not the master of the run's keys: connections to it end, and the address is resolved again."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from rollmesh.config.store import StoreConfig
from rollmesh.errors import StoreUnavailable
from rollmesh.runtime.addresses import free_port
from rollmesh.store import TrajectoryStore
from rollmesh.store.embedded import find_server_binary

from .store_mesh import limits


@dataclass
class Address:
    """The address of the master: a name that is resolved at every connection, as that of a service in a cluster."""

    link: Path

    @property
    def url(self) -> str:
        return f"unix://{self.link}"

    def lead_to(self, socket: Path) -> None:
        new = self.link.with_suffix(".new")
        new.symlink_to(socket)
        new.replace(self.link)


@contextmanager
def server(folder: Path, *options: str) -> Iterator[redis.Redis]:
    """A server on a unix socket, and a client of it."""
    folder.mkdir()
    socket = folder / "socket"
    fixed = ("--unixsocket", str(socket), "--dir", str(folder), "--save", "", "--bind", "127.0.0.1")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([str(find_server_binary()), *fixed, *options], stdout=log, stderr=log)
    try:
        with redis.Redis(unix_socket_path=str(socket)) as client:
            wait_until(lambda: answers(client))
            yield client
    finally:
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < deadline, "never"
        time.sleep(0.02)


def socket_of(client: redis.Redis) -> Path:
    return Path(client.connection_pool.connection_kwargs["path"])


def port_of(client: redis.Redis) -> int:
    return int(client.config_get("port")["port"])


def refusal_of(client: redis.Redis, command: Sequence[str]) -> str:
    try:
        client.execute_command(*command)
    except redis.ResponseError as error:
        return type(error).__name__
    return ""


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address(tmp_path / "address")


@asynccontextmanager
async def connected(address: Address, retry_seconds: float = 60.0) -> AsyncIterator[TrajectoryStore]:
    async with await TrajectoryStore.connect(
        StoreConfig(), run="any", url=address.url, retry_seconds=retry_seconds
    ) as store:
        yield store


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[redis.Redis, redis.Redis]]:
    """A master and its replica, in sync."""
    with ExitStack() as stack:
        ports = [str(free_port()) for _ in range(2)]
        master, replica = (
            stack.enter_context(server(tmp_path / p, "--port", p, "--repl-diskless-sync-delay", "0")) for p in ports
        )
        replica.replicaof("127.0.0.1", ports[0])
        wait_until(lambda: replica.info("replication")["master_link_status"] == "up")
        yield master, replica


async def test_after_a_failover_behind_one_name_every_call_goes_to_the_new_master(
    pair: tuple[redis.Redis, redis.Redis], address: Address
) -> None:
    old, new = pair
    address.lead_to(socket_of(old))
    async with connected(address) as store:
        await store.limits.init_run(limits())
        await asyncio.gather(*(store.connection.command("SET", "{any}kept", "1") for _ in range(8)))
        waiting = asyncio.create_task(store.connection.block_on_stream("{any}events", "0-0", 60.0))
        await asyncio.to_thread(wait_until, lambda: old.info("clients")["blocked_clients"] == 1)
        await asyncio.to_thread(wait_until, lambda: new.get("{any}kept") == b"1")
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", port_of(new))
        address.lead_to(socket_of(new))
        assert await store.recovery.begin(), "a script sees the new server"
        await store.connection.command("XADD", "{any}events", "*", "field", "value")
        assert await waiting
        assert new.exists("{any}events")


CLUSTER = ("--cluster-enabled", "yes")
READ, WRITE = ("GET", "{any}"), ("SET", "{any}", "1")
STATES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "ReadOnlyError": ((), WRITE),
    "MasterDownError": (("--replica-serve-stale-data", "no"), READ),
    "ClusterDownError": (CLUSTER, WRITE),
    "MovedError": (CLUSTER, WRITE),
}
"""Options of the server, and the command that it refuses, by the error."""


@pytest.mark.parametrize("state", STATES)
async def test_a_server_that_is_not_the_master_is_an_outage_that_ends_when_its_address_leads_to_one(
    state: str, tmp_path: Path, address: Address
) -> None:
    options, command = STATES[state]
    with ExitStack() as stack:
        master = stack.enter_context(server(tmp_path / "master", "--port", "0"))
        other = stack.enter_context(server(tmp_path / "other", *options, "--port", str(free_port())))
        if options != CLUSTER:
            other.replicaof("127.0.0.1", 1)
        if state == "MovedError":
            third = stack.enter_context(server(tmp_path / "third", *CLUSTER, "--port", str(free_port())))
            third.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            third.execute_command("CLUSTER", "MEET", "127.0.0.1", port_of(other))
        wait_until(lambda: refusal_of(other, command) == state)
        address.lead_to(socket_of(master))
        async with connected(address, retry_seconds=0.3) as store:
            await store.limits.init_run(limits())
            address.lead_to(socket_of(other))
            master.client_kill_filter(_type="normal")
            calls = [store.connection.command(*command), store.connection.commands([command])]
            if command == WRITE:
                calls.append(store.connection.run("open_session", "session", "worker"))
            for call in calls:
                with pytest.raises(StoreUnavailable, match=f"not the master of the run's keys .{state}"):
                    await call
            address.lead_to(socket_of(master))
            await store.connection.command(*command)
            await store.connection.commands([command])
            assert await store.sessions.open("worker")
