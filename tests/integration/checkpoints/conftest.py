"""A real S3 server (moto's, in a process of its own) and the stores of several nodes on it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.location import open_location
from rollmesh.config.store import CheckpointConfig

pytest.importorskip("s3fs", reason="object stores need the extra s3")
pytest.importorskip("moto", reason="the S3 server of the tests is moto's")

SECRET = b"a secret of at least thirty-two b"
_PORT = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_START_SECONDS = 120.0


class Bucket:
    """One bucket of one S3 server, which takes a free port and tells it in its log."""

    name = "checkpoints"

    def __init__(self, log: Path, fault: str = "") -> None:
        """Start the server; with a ``fault`` of ``refusing_s3`` it refuses one kind of call."""
        self._log = log.open("wb")
        program = ["-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
        if fault:
            program = [str(Path(__file__).with_name("refusing_s3.py")), fault]
        command = [sys.executable, "-u", *program]
        self.process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        try:
            self._wait_until(lambda: _PORT.search(log.read_text()) is not None, log)
            found = _PORT.search(log.read_text())
            assert found is not None
            self.port = int(found[1])
            self.url = f"http://127.0.0.1:{self.port}"
            self._wait_until(self._made, log)
        except BaseException:
            self.stop()
            raise

    def _wait_until(self, holds: Callable[[], bool], log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not holds():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def _made(self) -> bool:
        try:
            request = urllib.request.Request(f"{self.url}/{self.name}", method="PUT")
            return bool(urllib.request.urlopen(request, timeout=30).status == 200)
        except OSError:
            return False

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self._log.close()

    def section(self, prefix: str, **fields: object) -> CheckpointConfig:
        folder = f"s3://{self.name}/{prefix}"
        return CheckpointConfig.model_validate({"folder": folder, "object_store": {"endpoint_url": self.url}, **fields})


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture(scope="session")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    server = Bucket(tmp_path_factory.mktemp("moto") / "moto.log")
    yield server
    server.stop()


@pytest.fixture
def node(bucket: Bucket, tmp_path: Path) -> Callable[..., CheckpointStore]:
    """The store as a node sees it: nodes share the bucket, processes of a node its folder, too."""

    def store(name: str, **fields: object) -> CheckpointStore:
        section = bucket.section(tmp_path.name, **fields)
        return open_location(section, tmp_path / name, SECRET)

    return store
