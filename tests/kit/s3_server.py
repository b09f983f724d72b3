"""A real S3 server (moto's, in a process of its own) with one bucket."""

import importlib.util
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.config.store import CheckpointConfig

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
"""Environment variables of clients; a run file may not have them."""
MISSING = "moto and s3fs are not installed: pip install 'rollmesh[s3]' 'moto[s3,server]'"
_PORT = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_START_SECONDS = 120.0


def is_installed() -> bool:
    """Tell whether the packages of the server and of its client are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("moto", "s3fs"))


class Bucket:
    """One bucket of one S3 server, which takes a free port and tells it in its log."""

    name = "checkpoints"

    def __init__(self, log: Path, fault: str = "") -> None:
        """Start the server; with a ``fault`` of ``refusing_s3`` it refuses one kind of call."""
        self._log = log.open("wb")
        program = ["-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
        if fault:
            program = [str(Path(__file__).with_name("refusing_s3.py")), fault]
        self.process = subprocess.Popen([sys.executable, "-u", *program], stdout=self._log, stderr=self._log)
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

    @property
    def options(self) -> dict[str, Any]:
        """Options of a client, without credentials; a proxy of the environment cannot reach the server."""
        return {"endpoint_url": self.url, "config_kwargs": {"proxies": {}}}

    def section(self, prefix: str, **fields: object) -> CheckpointConfig:
        """Return the section ``checkpoints`` of a run below a prefix."""
        folder = f"s3://{self.name}/{prefix}"
        return CheckpointConfig.model_validate({"folder": folder, "object_store": {"endpoint_url": self.url}, **fields})

    def copy(self, prefix: str, folder: Path) -> None:
        """Copy the objects below a prefix into a folder."""
        keys = {"key": CREDENTIALS["AWS_ACCESS_KEY_ID"], "secret": CREDENTIALS["AWS_SECRET_ACCESS_KEY"]}
        objects = ObjectStore(f"s3://{self.name}/{prefix}", {**self.options, **keys})
        objects.get_all([(key, folder / key) for key in objects.sizes("")])

    def stop(self) -> None:
        """Stop the server."""
        self.process.terminate()
        self.process.wait(timeout=60)
        self._log.close()

    def _wait_until(self, holds: Callable[[], bool], log: Path) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not holds():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def _made(self) -> bool:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(f"{self.url}/{self.name}", method="PUT")
            return bool(direct.open(request, timeout=30).status == 200)
        except OSError:
            return False
