"""Certificates and tokens on real gRPC and HTTP ports: the right ones pass, each kind of wrong one is refused."""

import asyncio
import contextlib
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import httpx
import pytest
import uvloop

from rollmesh.config.services import SecurityConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.endpoints import AdminClient
from rollmesh.runtime.grpc import HealthReporter, call_metadata, create_channel, create_server
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import MISSING_TOKEN, OPEN, WRONG_TOKEN, PortSecurity, Tokens, is_loopback
from rollmesh.runtime.service_host import admin_server
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs

from ...kit.certificates import Authority, Certificate

SERVICE = "rollmesh.v1.RewardService"
DOCUMENT = Path(__file__).parents[3] / "docs" / "certificates.md"


def look_now(security: PortSecurity) -> None:
    """Make the next look at the certificate files due."""
    assert security.tls is not None
    security.tls.clock = lambda: float("inf")


def guarded(certificate: Certificate | None = None, token: str | None = None) -> PortSecurity:
    tls = {} if certificate is None else certificate.section()
    return PortSecurity.from_config(SecurityConfig.model_validate({"tls": tls, "token": token}))


class Echo(stubs.RewardServiceServicer):
    async def Score(self, request, context):
        for index, _ in enumerate(request.items):
            yield pb.ScoreResponse(item_index=index)


@contextlib.asynccontextmanager
async def grpc_service(security: PortSecurity) -> AsyncIterator[str]:
    server = create_server(security)
    stubs.add_RewardServiceServicer_to_server(Echo(), server)
    reporter = HealthReporter(server, SERVICE)
    address = f"127.0.0.1:{security.bind(server, '127.0.0.1:0')}"
    await server.start()
    await reporter.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(None)


async def call(address: str, security: PortSecurity) -> int:
    async with create_channel(address, security) as channel:
        request = pb.ScoreRequest(items=[pb.ScoreItem(trajectory_id="a")])
        answers = stubs.RewardServiceStub(channel).Score(
            request, timeout=60.0, metadata=call_metadata(token=security.sent_token)
        )
        return len([answer async for answer in answers])


@contextlib.asynccontextmanager
async def admin_port(security: PortSecurity) -> AsyncIterator[str]:
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1", 0, security) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def intruder(certificate: Certificate | None, authority: Authority) -> PortSecurity:
    """A client that trusts our servers and shows this certificate (or none), whatever the mesh thinks of it."""
    ca = authority.file.read_bytes()
    security = guarded(authority.issue(f"intruder-{id(certificate)}"))
    assert security.tls is not None
    shown, context = grpc.ssl_channel_credentials(ca), ssl.create_default_context(cafile=str(authority.file))
    if certificate is not None:
        shown = grpc.ssl_channel_credentials(ca, certificate.key.read_bytes(), certificate.certificate.read_bytes())
        context.load_cert_chain(certificate.certificate, certificate.key)
    security.tls.channel_credentials = lambda: shown  # type: ignore[method-assign]
    security.tls.client_context = lambda: context  # type: ignore[method-assign]
    return security


async def test_each_wrong_certificate_of_a_client_is_refused_before_the_call(
    authority: Authority, tmp_path: Path
) -> None:
    outsider = Authority(tmp_path / "theirs").issue("outsider")
    expired = authority.issue("expired", expired=True)
    server = guarded(authority.issue("server"))
    async with grpc_service(server) as address, admin_port(server) as admin:
        for certificate in (outsider, expired, None):
            client = intruder(certificate, authority)
            if certificate is not None:
                async with AdminClient(client, 60.0) as scraper:
                    with pytest.raises(httpx.HTTPError):
                        await scraper.get(admin, "/metrics")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(address, client)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert "it may reject the client certificate; see its log" in client.explain(refused.value.details())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(address, OPEN)
        assert "it may require TLS, and security.tls is not set here" in OPEN.explain(refused.value.details())


async def test_a_server_that_is_not_of_the_mesh_is_refused_by_its_clients(authority: Authority, tmp_path: Path) -> None:
    client = guarded(authority.issue("client"))
    outsider = Authority(tmp_path / "theirs").issue("outsider")
    expired = authority.issue("expired", expired=True)
    nameless = authority.issue("elsewhere", dns=("other.example",))
    for certificate in (outsider, expired, nameless):
        async with foreign_service(certificate) as address:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(address, client)
            hint = "its certificate is rejected here: check security.tls.ca, and that it names rollmesh"
            assert hint in client.explain(refused.value.details())
    async with grpc_service(OPEN) as address:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(address, client)
        assert "it does not use TLS: set security.tls there" in client.explain(refused.value.details())


@contextlib.asynccontextmanager
async def foreign_service(certificate: Certificate) -> AsyncIterator[str]:
    server = create_server()
    stubs.add_RewardServiceServicer_to_server(Echo(), server)
    pair = (certificate.key.read_bytes(), certificate.certificate.read_bytes())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


@pytest.mark.parametrize(("token", "message"), [(None, MISSING_TOKEN), ("guess", WRONG_TOKEN)])
async def test_a_wrong_token_is_refused_with_the_reason(authority: Authority, token: str | None, message: str) -> None:
    async with grpc_service(guarded(authority.issue("server"), "s3cret")) as address:
        assert await call(address, guarded(authority.issue("right"), "s3cret")) == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(address, guarded(authority.issue("client"), token))
    assert (refused.value.code(), refused.value.details()) == (grpc.StatusCode.UNAUTHENTICATED, message)


async def test_metrics_want_a_certificate_or_the_token_and_probes_want_neither(authority: Authority) -> None:
    server = guarded(authority.issue("server"), "s3cret")
    trusting = ssl.create_default_context(cafile=str(authority.file))
    async with admin_port(server) as address, httpx.AsyncClient(verify=trusting, timeout=60.0) as anonymous:
        assert (await anonymous.get(f"https://{address}/readyz")).status_code == 503
        assert (await anonymous.get(f"https://{address}/healthz")).status_code == 200
        refused = await anonymous.get(f"https://{address}/metrics")
        assert (refused.status_code, refused.json()) == (401, {"detail": MISSING_TOKEN})
        refused = await anonymous.get(f"https://{address}/metrics", headers={"Authorization": "Bearer guess"})
        assert (refused.status_code, refused.json()) == (401, {"detail": WRONG_TOKEN})
        assert (await anonymous.get(f"https://{address}/other")).status_code == 401
        scrape = await anonymous.get(f"https://{address}/metrics", headers={"Authorization": "Bearer s3cret"})
        assert "rollmesh_reward_build_info" in scrape.text
        async with AdminClient(guarded(authority.issue("scraper")), 60.0) as scraper:
            assert "rollmesh_reward_build_info" in (await scraper.get(address, "/metrics")).text
        with pytest.raises(httpx.HTTPError):
            await anonymous.get(f"http://{address}/healthz")


async def test_rotated_certificates_count_without_a_restart_and_the_old_authority_is_out(
    authority: Authority, tmp_path: Path
) -> None:
    files, old_client = authority.issue("server"), authority.issue("old")
    server = guarded(files)
    new = Authority(tmp_path / "new")
    new_client = guarded(new.issue("new"))
    async with grpc_service(server) as address, admin_port(server) as admin:
        assert await call(address, guarded(old_client)) == 1
        files.replace_by(new.issue("server"))
        look_now(server)
        assert await call(address, new_client) == 1
        async with AdminClient(new_client, 60.0) as client:
            assert (await client.get(admin, "/metrics")).status_code == 200
        with pytest.raises(grpc.aio.AioRpcError):
            await call(address, guarded(old_client))
        async with AdminClient(guarded(old_client), 60.0) as client:
            with pytest.raises(httpx.HTTPError):
                await client.get(admin, "/metrics")


async def test_a_session_from_before_the_change_of_the_authority_opens_nothing(
    authority: Authority, tmp_path: Path
) -> None:
    files, old = authority.issue("server"), authority.issue("old")
    server = guarded(files)
    context = ssl.create_default_context(cafile=str(authority.file))
    context.load_cert_chain(old.certificate, old.key)
    new = Authority(tmp_path / "new")
    context.load_verify_locations(new.file)
    async with admin_port(server) as admin:
        first, session = await asyncio.to_thread(scrape, admin, context, None)
        assert b"200 OK" in first
        files.replace_by(new.issue("server"))
        look_now(server)
        with contextlib.suppress(OSError):
            second, _ = await asyncio.to_thread(scrape, admin, context, session)
            assert b"200 OK" not in second


def scrape(
    address: str, context: ssl.SSLContext, session: ssl.SSLSession | None
) -> tuple[bytes, ssl.SSLSession | None]:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=60.0) as plain,
        context.wrap_socket(plain, server_hostname="rollmesh", session=session) as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer, connection.session


async def test_connections_never_see_files_that_are_only_half_replaced(authority: Authority) -> None:
    files = authority.issue("server")
    server = guarded(files)
    async with admin_port(server) as admin:
        new = authority.issue("next")
        files.replace_by(new)
        look_now(server)
        assert server.tls is not None
        assert server.tls.material.certificate == new.certificate.read_bytes()
        server.tls.clock = lambda: 0.0  # until the next look, whatever the files hold now
        files.key.write_text("half a key")
        async with AdminClient(guarded(authority.issue("scraper")), 60.0) as client:
            assert (await client.get(admin, "/metrics")).status_code == 200
        async with AdminClient(server, 60.0) as client:
            assert (await client.get(admin, "/metrics")).status_code == 200


def test_a_process_that_starts_while_its_files_are_replaced_reads_them_again(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, new = authority.issue("server"), authority.issue("next")
    read, count = Path.read_bytes, 0

    def replaced_meanwhile(self: Path) -> bytes:
        nonlocal count
        count += self == files.key
        if self == files.key and count == 1:
            with monkeypatch.context() as plain:
                plain.setattr(Path, "read_bytes", read)
                files.replace_by(new)
        return read(self)

    monkeypatch.setattr(Path, "read_bytes", replaced_meanwhile)
    security = guarded(files)
    assert security.tls is not None
    assert security.tls.material.certificate == new.certificate.read_bytes()


async def test_a_rotation_does_not_end_the_calls_in_progress() -> None:
    states = [object()]

    class Rotating(PortSecurity):
        def channel_state(self) -> object:
            return states[-1]

    asked, answer = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if b"/slow" in request:
            asked.set()
            await answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server, AdminClient(Rotating(), 60.0) as client:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        slow = asyncio.create_task(client.get(address, "/slow"))
        await asyncio.wait_for(asked.wait(), 60)
        states.append(object())
        assert (await client.get(address, "/quick")).text == "ok"
        answer.set()
        assert (await slow).text == "ok"


def test_files_that_cannot_be_used_are_named_at_the_start(authority: Authority, tmp_path: Path) -> None:
    good, other = authority.issue("good"), authority.issue("other")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for change, message in [
        ({"certificate": str(tmp_path / "none.crt")}, "security.tls.certificate=.*none.crt: cannot be read: No such"),
        ({"ca": str(empty)}, "security.tls.ca=.*empty.pem: not a PEM certificate"),
        ({"key": str(other.key)}, "security.tls.key=.*(?i:mismatch)"),
        (authority.issue("late", expired=True).section(), "late.*the mesh would reject it: certificate has expired"),
        (authority.issue("alias", dns=("a.example",)).section(), "alias.*Hostname mismatch"),
        ({"ca": str(Authority(tmp_path / "theirs").file)}, "would reject it: unable to get local issuer certificate"),
    ]:
        with pytest.raises(ConfigError, match=message):
            PortSecurity.from_config(SecurityConfig.model_validate({"tls": good.section() | change}))


def test_a_token_file_is_read_again_and_its_further_lines_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old\n")
    tokens = Tokens((), file)
    tokens.clock = lambda: 0.0
    assert tokens.sent == "old"
    written = file.stat().st_mtime_ns
    file.write_text("new\nold\n")
    os.utime(file, ns=(written, written))  # as if within one tick of the file system's clock
    now = 0.0

    def later() -> float:
        nonlocal now
        now += 2.0
        return now

    tokens.clock = later
    assert tokens.sent == "new"
    assert tokens.refusal("Bearer old") == ""
    assert tokens.refusal("Bearer new") == ""
    assert tokens.refusal("new") == WRONG_TOKEN
    file.write_text("\n")
    assert tokens.sent == "new", "an empty file refuses no client"
    with pytest.raises(ConfigError, match=r"security.token_file=.*: contains no token"):
        Tokens((), file)
    with pytest.raises(ConfigError, match=r"security.token_file=.*gone: cannot be read"):
        Tokens((), tmp_path / "gone")


async def test_ports_are_open_without_a_security_section() -> None:
    security = PortSecurity.from_config(SecurityConfig())
    async with grpc_service(security) as address, admin_port(security) as admin:
        assert await call(address, OPEN) == 1
        async with AdminClient(timeout_seconds=60.0) as client:
            assert (await client.get(admin, "/metrics")).status_code == 200


def test_an_idle_tls_connection_whose_client_does_not_listen_does_not_hold_up_the_end(authority: Authority) -> None:
    security = guarded(authority.issue("mesh"))

    def looks_once(port: int) -> ssl.SSLSocket:
        context = ssl.create_default_context(cafile=str(authority.file))
        raw = socket.create_connection(("127.0.0.1", port), timeout=60)
        connection = context.wrap_socket(raw, server_hostname="localhost")
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        return connection

    async def serves_and_ends() -> float:
        async with admin_server(Metrics("reward"), Health(), "127.0.0.1", 0, security) as port:
            connection = await asyncio.to_thread(looks_once, port)
            started = time.monotonic()
        taken = time.monotonic() - started
        connection.close()
        return taken

    assert uvloop.run(serves_and_ends()) < 20.0, "asyncio itself waits for half a minute"


async def test_a_port_that_is_taken_is_a_clear_error(authority: Authority) -> None:
    async with grpc_service(OPEN) as address:
        for security in (OPEN, guarded(authority.issue("second"))):
            with pytest.raises(ConfigError, match=f"cannot be bound at {address} .network.grpc_port."):
                security.bind(create_server(security), address)


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1:0", True), ("[::1]:5", True), ("localhost:1", True), ("0.0.0.0:1", False), ("pod.example:1", False)],
)
def test_only_loopback_addresses_may_carry_a_token_in_the_clear(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_the_documented_openssl_lines_make_certificates_that_the_mesh_accepts(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH")
    (lines,) = re.findall(r"### With openssl\n\n```\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    done = subprocess.run(["bash", "-ec", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = {"certificate": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    tls = {field: str(tmp_path / name) for field, name in files.items()}
    section = SecurityConfig.model_validate({"tls": tls, "token_file": str(tmp_path / "token")})
    security = PortSecurity.from_config(section)  # shakes hands with itself
    assert security.tls is not None
    assert len(security.sent_token or "") == 64
