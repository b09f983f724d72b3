"""The admin port of a service: probes, health, certificates, limits of time."""

import ast
import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from fastapi import FastAPI, Request
from prometheus_client.parser import text_string_to_metric_families
from structlog.testing import capture_logs

from rollmesh.config.services import SecurityConfig
from rollmesh.runtime.endpoints import AdminClient
from rollmesh.runtime.health import Health
from rollmesh.runtime.healthcheck import check, main
from rollmesh.runtime.http_server import http_server, listen
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.runtime.service_host import admin_server
from rollmesh.runtime.tls import TlsFiles

from ...kit.certificates import Authority, Certificate

NAMES = ("rollmesh_reward_certificate_start_timestamp_seconds", "rollmesh_reward_certificate_expiry_timestamp_seconds")
LINES = 2_000
"""Header lines that a client sends at most, 20 ms apart: thirteen times the time that it has."""
_CLIENTS_KEEP_SECONDS = httpx.Limits().keepalive_expiry


async def test_admin_port_serves_metrics_and_turns_unready_and_dead_into_503() -> None:
    now = [0.0]
    health = Health(clock=lambda: now[0])
    metrics = Metrics("demo")
    metrics.counter("rollmesh_demo_things_total", "Things.").inc(3)
    async with admin_server(metrics, health, "127.0.0.1") as port, httpx.AsyncClient(timeout=60.0) as client:
        base = f"http://127.0.0.1:{port}"
        assert "rollmesh_demo_things_total 3.0" in (await client.get(f"{base}/metrics")).text
        assert (await client.get(f"{base}/readyz")).status_code == 503
        health.set_ready(True)
        assert (await client.get(f"{base}/readyz")).status_code == 200
        health.watch("loop", 5.0)
        assert (await client.get(f"{base}/healthz")).status_code == 200
        now[0] = 6.0
        answer = await client.get(f"{base}/healthz")
        assert answer.status_code == 503
        assert answer.json()["stalled"] == {"loop": 6.0}
        health.beat("loop")
        assert (await client.get(f"{base}/healthz")).status_code == 200


async def test_head_is_answered_as_get_without_the_body() -> None:
    health = Health()
    async with (
        admin_server(Metrics("demo"), health, "127.0.0.1") as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client,
    ):
        for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 503), ("/nothing", 404)):
            head, get = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (get.status_code, b"") == (status, b""), path
            assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone ends such a connection")
async def test_a_request_to_a_machine_that_is_gone_ends_after_half_a_minute() -> None:
    async with admin_server(Metrics("demo"), Health(), "127.0.0.1") as port, AdminClient() as client:
        answer = await client.send("GET", f"127.0.0.1:{port}", "/healthz")
        connection = answer.extensions["network_stream"].get_extra_info("socket")
        # Keep-alive probes are sent only while nothing waits for a confirmation.
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
        await answer.aclose()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_the_ipv6_wildcard_accepts_clients_of_both_families(address: str) -> None:
    with listen("::", 0, "network.admin_port") as listener:
        socket.create_connection((address, listener.getsockname()[1]), timeout=60.0).close()


class Port:
    """An admin port, and a client of the same mesh that scrapes it."""

    def __init__(self, address: str, client: AdminClient) -> None:
        self.address = address
        self.client = client

    async def samples(self) -> dict[str, list[float]]:
        """Values by name, for every certificate's metric that is announced."""
        answer = await self.client.get(self.address, "/metrics")
        families = text_string_to_metric_families(answer.text)
        return {f.name: [sample.value for sample in f.samples] for f in families if "_certificate_" in f.name}

    async def validity(self) -> tuple[float, float]:
        samples = await self.samples()
        (start,), (expiry,) = (samples[name] for name in NAMES)
        return start, expiry


@contextlib.asynccontextmanager
async def admin_port(server: PortSecurity, client: PortSecurity) -> AsyncIterator[Port]:
    async with (
        admin_server(Metrics("reward"), Health(), "127.0.0.1", 0, server) as port,
        AdminClient(client, 60.0) as asking,
    ):
        yield Port(f"127.0.0.1:{port}", asking)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


def guarded(certificate: Certificate) -> PortSecurity:
    return PortSecurity.from_config(SecurityConfig.model_validate({"tls": certificate.section()}))


def files_of(security: PortSecurity) -> TlsFiles:
    assert security.tls is not None
    return security.tls


def written(certificate: Certificate) -> tuple[float, float]:
    """Start and end as another library reads them in the file: of its first certificate."""
    first = x509.load_pem_x509_certificates(certificate.certificate.read_bytes())[0]
    return first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()


async def test_a_rotation_changes_the_exported_times_without_a_restart(authority: Authority) -> None:
    files, new = authority.issue("server"), authority.issue("next", days=7)
    before, after = written(files), written(new)
    assert after[1] - before[1] == pytest.approx(2 * 86400, abs=60)
    server = guarded(files)
    async with admin_port(server, guarded(authority.issue("scraper"))) as port:
        assert await port.validity() == before
        files.replace_by(new)
        files_of(server).clock = lambda: float("inf")  # the next look is due
        assert await port.validity() == after


async def test_files_that_are_not_taken_leave_the_old_times_until_they_fit(authority: Authority) -> None:
    files, new = authority.issue("server"), authority.issue("next", days=7)
    before, after = written(files), written(new)
    server = guarded(files)
    async with admin_port(server, guarded(authority.issue("scraper"))) as port:
        files_of(server).clock = lambda: float("inf")
        files.certificate.write_bytes(new.certificate.read_bytes())
        with capture_logs() as lines:
            assert await port.validity() == before
        assert "certificates_not_taken" in {line["event"] for line in lines}
        files.key.write_bytes(new.key.read_bytes())
        assert await port.validity() == after


async def test_of_a_chain_the_certificate_of_the_process_counts(authority: Authority) -> None:
    files = authority.issue("server", days=2)
    own = written(files)
    files.certificate.write_bytes(files.certificate.read_bytes() + authority.file.read_bytes())
    async with admin_port(guarded(files), guarded(authority.issue("scraper"))) as port:
        assert await port.validity() == own


async def test_without_tls_the_names_are_announced_and_have_no_series() -> None:
    async with admin_port(OPEN, OPEN) as port:
        assert await port.samples() == {name: [] for name in NAMES}


@pytest.mark.parametrize("tls", [False, True])
async def test_a_service_is_healthy_while_its_loops_live_whether_ready_or_not(authority: Authority, tls: bool) -> None:
    health, security = Health(), guarded(authority.issue("server")) if tls else OPEN
    health.set_ready(False, "no policy yet")
    async with admin_server(Metrics("generator"), health, "127.0.0.1", 0, security) as port:
        assert await asyncio.to_thread(check, port) == ""
        health.watch("loop", deadline_seconds=-1.0)
        assert "loop" in await asyncio.to_thread(check, port)
    assert "refused" in await asyncio.to_thread(check, port)


def test_a_container_without_a_known_admin_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_NETWORK__ADMIN_PORT", "0")
    with pytest.raises(SystemExit, match="ROLLMESH_NETWORK__ADMIN_PORT is not set"):
        main()


def test_the_check_loads_nothing_but_the_standard_library() -> None:
    script = "import sys, rollmesh.runtime.healthcheck as h; print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not {"grpc", "fastapi", "pydantic", "numpy", "httpx"} & set(ast.literal_eval(out))


async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Send header lines until the server closes the connection; returns how many it took."""
    closed = asyncio.ensure_future(reader.read())
    for sent in range(LINES):
        if closed.done():
            return sent
        try:
            writer.write(b"X-More: 1\r\n")
            await writer.drain()
        except ConnectionError:
            return sent
        await asyncio.wait([closed], timeout=0.02)
    raise AssertionError("the connection is still open")


async def test_a_client_whose_headers_never_end_is_cut_off_and_a_slow_answer_is_not() -> None:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    async with http_server(app, listen("127.0.0.1", 0, "port"), grace_seconds=1, head_seconds=3.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\n")
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nab")
        assert await dribble(reader, writer) > 1
        # More than the time of a head has passed; the body may take longer.
        slow_writer.write(b"c")
        assert await slow_reader.readuntil(b"\r\n\r\n3")
        # The next request on the same connection has the time of a head again.
        slow_writer.write(b"POST /echo HTTP/1.1\r\n")
        assert await dribble(slow_reader, slow_writer) > 1
        writer.close()
        slow_writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: mesh\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.splitlines() if line.lower().startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return head.splitlines()[0]


async def test_a_connection_that_a_client_still_keeps_is_not_closed_by_the_server() -> None:
    async with admin_server(Metrics("demo"), Health(), "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            assert await _ask(reader, writer) == b"HTTP/1.1 200 OK"
            assert _CLIENTS_KEEP_SECONDS is not None
            await asyncio.sleep(_CLIENTS_KEEP_SECONDS + 1.0)
            assert await _ask(reader, writer) == b"HTTP/1.1 200 OK"
        finally:
            writer.close()
