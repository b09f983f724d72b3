"""Debian's promtool and prometheus, and a Prometheus that runs."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rollmesh.runtime.addresses import free_port

from ...kit.waiting import until

ROOT = Path(__file__).parents[3]
UNPACKED = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rollmesh" / "prometheus" / "usr" / "bin"
"""Folder into which the Makefile unpacks the packages (install.sh)."""


def tool(name: str) -> str:
    """Path of a program of Prometheus; skips the test where it cannot be had."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is neither on PATH nor in {UNPACKED}: make prometheus-try")
    return found


@pytest.fixture(scope="session")
def promtool() -> str:
    """The rule checker."""
    return tool("promtool")


@contextmanager
def running_prometheus(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """A Prometheus with this configuration; yields its URL once it is ready."""
    file, log, url = folder / "prometheus.yml", folder / "prometheus.log", f"http://127.0.0.1:{free_port()}"
    file.write_text(yaml.safe_dump(config))
    options = (f"--config.file={file}", f"--storage.tsdb.path={folder / 'tsdb'}")
    command = [tool("prometheus"), *options, f"--web.listen-address={url.removeprefix('http://')}"]

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until(is_ready, log.read_text)
        yield url
    finally:
        process.terminate()
        process.wait(120)
