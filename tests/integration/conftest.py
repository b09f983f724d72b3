"""Servers of the tests with processes."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer

from ..kit.redis_servers import running_server
from ..kit.s3_server import CREDENTIALS, MISSING, Bucket, is_installed
from ..kit.warm import close_templates


@pytest.fixture(scope="session", autouse=True)
def _templates_end_with_the_session() -> Iterator[None]:
    yield
    close_templates()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """The server of all tests of a process; each has a run of its own there."""
    with running_server(tmp_path_factory.mktemp("redis"), maxmemory_bytes=1 << 30) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server that the test may kill, stop and reconfigure."""
    with running_server(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def durable_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose kill loses nothing."""
    with running_server(tmp_path / "redis", durable=True) as server:
        yield server


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MB."""
    mount = tmp_path / "small"
    mount.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", str(mount).encode(), b"tmpfs", 0, b"size=8m") != 0:
        pytest.skip(f"cannot mount a tmpfs here: {os.strerror(ctypes.get_errno())}")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest.fixture
def own_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """A bucket on an S3 server that the test may stall and stop."""
    if not is_installed():
        pytest.skip(MISSING)
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    server = Bucket(tmp_path / "moto.log")
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.stop()
