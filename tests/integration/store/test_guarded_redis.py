"""A real Redis with TLS, client certificates and an ACL user, by itself and behind a sentinel that wants them too."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
from cryptography.hazmat.primitives import serialization

from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.runtime.addresses import free_port
from rollmesh.store import TrajectoryStore

from ...kit.certificates import Authority, Certificate
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
    for port, password in ((guarded.port, PASSWORD), (guarded.sentinel_port, SENTINEL_PASSWORD)):
        deadline = time.monotonic() + 60.0
        while True:
            try:
                with redis.Redis(
                    port=port,
                    username=USER if port == guarded.port else None,
                    password=password,
                    ssl=True,
                    ssl_ca_certs=str(guarded.client.ca),
                    ssl_certfile=str(guarded.client.certificate),
                    ssl_keyfile=str(guarded.client.key),
                    ssl_check_hostname=False,
                    socket_timeout=5.0,
                ) as client:
                    client.ping()
                    break
            except (redis.ConnectionError, redis.TimeoutError) as error:
                assert time.monotonic() < deadline, f"no answer at port {port}: {error}"
