"""A real Redis with TLS, client certificates and an ACL user, by itself and behind a sentinel that wants them too."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from cryptography.hazmat.primitives import serialization

from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.runtime.addresses import free_port
from rollmesh.store import TrajectoryStore
from rollmesh.store.embedded import find_server_binary

from ...kit.certificates import Authority, Certificate
from ...kit.waiting import reached, until
from .store_mesh import limits

USER, PASSWORD, SENTINEL_PASSWORD = "mesh", "between friends", "of the watchers"
SERVICE = "queue"


@dataclass
class Guarded:
    """A server and its sentinel, and who may talk to them."""

    authority: Authority
    client: Certificate
    port: int
    sentinel_port: int

    @property
    def url(self) -> str:
        return f"rediss://{USER}@localhost:{self.port}/0"

    @property
    def sentinel_url(self) -> str:
        return f"rediss+sentinel://{USER}@localhost:{self.sentinel_port}/{SERVICE}"

    def config(self, url: str, password: str = PASSWORD, **tls: str | None) -> StoreConfig:
        own = {"ca": str(self.client.ca), "certificate": str(self.client.certificate), "key": str(self.client.key)}
        section = {field: value for field, value in (own | tls).items() if value is not None}
        return StoreConfig.model_validate(
            {"url": url, "password": password, "sentinel_password": SENTINEL_PASSWORD, "tls": section}
        )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    with guarded_redis(tmp_path, ("localhost",)) as found:
        yield found


@contextmanager
def guarded_redis(tmp_path: Path, dns: tuple[str, ...]) -> Iterator[Guarded]:
    # One program under several names: Debian's redis-tools have the second one only.
    binary = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if binary is None:
        pytest.skip("no redis-server on PATH (apt-get install redis-tools): the embedded one is built without TLS")
    authority = Authority(tmp_path / "authority")
    files = authority.issue("redis", dns)
    port, sentinel_port = free_port(), free_port()
    tls = (
        f"port 0\nbind 127.0.0.1\ndir {tmp_path}\ntls-auth-clients yes\ntls-replication yes\n"
        f"tls-cert-file {files.certificate}\ntls-key-file {files.key}\ntls-ca-cert-file {files.ca}\n"
    )
    (tmp_path / "redis.conf").write_text(
        f"{tls}tls-port {port}\nappendonly yes\nmaxmemory-policy noeviction\n"
        f'user default off\nuser {USER} on ">{PASSWORD}" ~{{guarded}}* +@all -@dangerous +info\n'
        f'user watcher on ">{PASSWORD}" allchannels +multi +slaveof +ping +exec +subscribe +publish +config|rewrite '
        "+role +info +client|setname +client|kill +script|kill\n"
    )
    (tmp_path / "sentinel.conf").write_text(
        f'{tls}tls-port {sentinel_port}\nrequirepass "{SENTINEL_PASSWORD}"\n'
        f"sentinel monitor {SERVICE} 127.0.0.1 {port} 1\n"
        f'sentinel auth-user {SERVICE} watcher\nsentinel auth-pass {SERVICE} "{PASSWORD}"\n'
    )
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "log").open("wb"))
        for name, config in (("redis-server", "redis.conf"), ("redis-sentinel", "sentinel.conf")):
            command = [name, str(tmp_path / config)]
            process = subprocess.Popen(command, executable=binary, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield Guarded(authority, authority.issue("client"), port, sentinel_port)


@pytest.mark.parametrize("by_sentinel", [False, True], ids=["direct", "by sentinel"])
async def test_a_store_behind_tls_and_an_acl_user_works(guarded: Guarded, by_sentinel: bool) -> None:
    config = guarded.config(guarded.sentinel_url if by_sentinel else guarded.url)
    async with await TrajectoryStore.connect(config, "guarded") as store:
        await store.limits.init_run(limits())
        assert (await store.mesh.view()).leased == 0
        assert await store.sessions.open("worker")


async def test_the_user_of_one_run_cannot_touch_another(guarded: Guarded) -> None:
    async with await TrajectoryStore.connect(guarded.config(guarded.url), "guarded"):
        pass
    async with await TrajectoryStore.connect(guarded.config(guarded.url), "other", retry_seconds=1.0) as stranger:
        with pytest.raises(StoreUnavailable, match="credentials"):
            await stranger.limits.init_run(limits())


async def test_each_wrong_identity_is_refused_with_what_to_mend(guarded: Guarded, tmp_path: Path) -> None:
    other = Authority(tmp_path / "others")
    stranger, old = other.issue("stranger"), guarded.authority.issue("old", expired=True)
    pair = [{"certificate": str(c.certificate), "key": str(c.key)} for c in (stranger, old)]
    none = {"certificate": None, "key": None}
    await asyncio.to_thread(wait_for, guarded)
    for url in (guarded.url, guarded.sentinel_url):
        cases = [
            *((guarded.config(url, **tls), "rejects the client certificate") for tls in (*pair, none)),
            (guarded.config(url, ca=str(other.file)), "the certificate of Redis is not trusted"),
            (guarded.config(url, password="a guess"), "rejects the credentials"),
        ]
        for config, message in cases:
            # Long, because the server's reason may be lost with its connection; a try that sees it ends the wait.
            with pytest.raises(StoreUnavailable, match=message) as refused:
                await TrajectoryStore.connect(config, "guarded", retry_seconds=30.0)
            assert "guess" not in str(refused.value)
    with pytest.raises(ConfigError, match=r"store\.tls: .*No such file"):
        await TrajectoryStore.connect(guarded.config(guarded.url, ca=str(tmp_path / "gone")), "guarded")


async def test_a_key_with_a_passphrase_is_an_error_and_no_question_at_the_terminal(
    guarded: Guarded, tmp_path: Path
) -> None:
    plain = guarded.authority.issue("locked")
    key = serialization.load_pem_private_key(plain.key.read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"a passphrase"),
    )
    plain.key.write_bytes(locked)
    config = guarded.config(guarded.url, certificate=str(plain.certificate), key=str(plain.key))
    with pytest.raises(ConfigError, match=r"store\.tls: the key is protected by a passphrase"):
        await TrajectoryStore.connect(config, "guarded")


async def test_a_host_that_the_certificate_does_not_name_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    with guarded_redis(tmp_path, ("elsewhere.example",)) as guarded:
        await asyncio.to_thread(wait_for, guarded)
        config = guarded.config(guarded.url)
        with pytest.raises(StoreUnavailable, match="Hostname mismatch.*use a host name of the certificate"):
            await TrajectoryStore.connect(config, "guarded", retry_seconds=0.5)
        trusting = config.model_copy(update={"tls": config.tls.model_copy(update={"check_hostname": False})})
        async with await TrajectoryStore.connect(trusting, "guarded") as store:
            await store.limits.init_run(limits())


async def test_a_renewed_client_certificate_is_taken_for_the_next_connection(guarded: Guarded) -> None:
    async with await TrajectoryStore.connect(guarded.config(guarded.url), "guarded") as store:
        await store.limits.init_run(limits())
        guarded.client.replace_by(guarded.authority.issue("useless", expired=True))
        await store.connection.client.connection_pool.disconnect()
        store.connection._idle.clear()
        with pytest.raises(StoreUnavailable, match="rejects the client certificate"):
            await store.mesh.view()
        guarded.client.replace_by(guarded.authority.issue("renewed"))
        assert (await store.mesh.view()).leased == 0


def wait_for(guarded: Guarded) -> None:
    """Until both servers answer."""
    for port, user, password in ((guarded.port, USER, PASSWORD), (guarded.sentinel_port, None, SENTINEL_PASSWORD)):
        with redis.Redis(
            port=port,
            username=user,
            password=password,
            ssl=True,
            ssl_ca_certs=str(guarded.client.ca),
            ssl_certfile=str(guarded.client.certificate),
            ssl_keyfile=str(guarded.client.key),
            ssl_check_hostname=False,
            socket_timeout=5.0,
        ) as client:
            until(lambda client=client: answers(client), f"an answer at port {port}")


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
            until(lambda: answers(client), "the server")
            yield client
    finally:
        process.kill()
        process.wait()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):
        return False


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
        until(lambda: replica.info("replication")["master_link_status"] == "up", "the replica")
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
        await reached(lambda: old.info("clients")["blocked_clients"] == 1)
        await reached(lambda: new.get("{any}kept") == b"1")
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
        until(lambda: refusal_of(other, command) == state, state)
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
