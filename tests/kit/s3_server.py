"""S3 server of moto, with one bucket, for runs of a bench whose checkpoints are in an object store."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import RollmeshError

BUCKET = "checkpoints"
MISSING = "moto and s3fs are not installed: pip install 'rollmesh[s3]' 'moto[s3,server]'"
_KEY = "bench"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": _KEY, "AWS_SECRET_ACCESS_KEY": _KEY}
"""Environment variables of clients; a run file may not have them."""
_RUNNING = re.compile(r"Running on http://127\.0\.0\.1:(\d+)")
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class S3Server:
    """Running server."""

    url: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of a client, without credentials; a proxy of the environment cannot reach the server."""
        return {"endpoint_url": self.url, "config_kwargs": {"proxies": {}}}

    def copy(self, prefix: str, folder: Path) -> None:
        """Copy the objects below a prefix of the bucket into a folder."""
        objects = ObjectStore(prefix, {**self.options, "key": _KEY, "secret": _KEY})
        objects.get_all([(key, folder / key) for key in objects.sizes("")])


def is_installed() -> bool:
    """Tell whether the packages of the server and of its client are there."""
    return all(importlib.util.find_spec(name) is not None for name in ("moto", "s3fs"))


@contextmanager
def running_s3(log: Path) -> Iterator[S3Server]:
    """Run a server on a free port during the block. Raises RollmeshError if it does not start."""
    command = [sys.executable, "-uP", "-m", "moto.server", "--host", "127.0.0.1", "--port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            yield _started(process, log)
        finally:
            process.kill()  # it has nothing to save
            process.wait()


def _started(process: subprocess.Popen[bytes], log: Path) -> S3Server:
    """Wait for the port in the server's log, then create the bucket."""
    deadline = time.monotonic() + _START_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def await_value(find: Callable[[], str]) -> str:
        while not (found := find()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RollmeshError(f"the S3 server did not start: {log.read_text()[-1000:]}")
            time.sleep(0.05)
        return found

    def url() -> str:
        found = _RUNNING.search(log.read_text())
        return f"http://127.0.0.1:{found[1]}" if found else ""

    def with_bucket() -> str:
        try:
            request = urllib.request.Request(f"{address}/{BUCKET}", method="PUT")
            return address if direct.open(request, timeout=30).status == 200 else ""
        except OSError:
            return ""

    address = await_value(url)
    return S3Server(await_value(with_bucket))
