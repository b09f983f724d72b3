"""Services whose Redis is not there yet: they wait, say why, and start once it is there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rollmesh.config.recipes import recipe_file
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.lifecycle import EXIT_UNFINISHED
from rollmesh.store import EmbeddedOptions, EmbeddedServer

from ...kit.waiting import until


@dataclass
class Waiting:
    """A service process that was started before its Redis."""

    service: str
    folder: Path
    process: subprocess.Popen[bytes]
    log: Path

    def readyz(self) -> dict[str, Any]:
        """What /readyz answers; empty before the admin port is open."""
        for endpoint in read_endpoints(self.folder, self.service, starting=True):
            answer: dict[str, Any] = httpx.get(f"http://{endpoint.admin}/readyz", trust_env=False).json()
            return answer
        return {}

    def logged(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == event]

    def runs(self) -> None:
        assert self.process.poll() is None, f"{self.service} has ended:\n{self.log.read_text()[-4000:]}"


@contextmanager
def started(service: str, tmp_path: Path, port: int) -> Iterator[Waiting]:
    run = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    run |= {"name": "late", "folder": str(tmp_path / "run"), "store": {"url": f"redis://127.0.0.1:{port}"}}
    run["telemetry"] = {"log_format": "json"}
    file, log = tmp_path / f"{service}.yaml", tmp_path / f"{service}.log"
    file.write_text(yaml.safe_dump(run))
    with log.open("wb") as output:
        command = [sys.executable, "-m", "rollmesh.cli.main", service, str(file)]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield Waiting(service, tmp_path / "run", process, log)
    finally:
        process.kill()
        process.wait()


def test_a_service_that_waits_for_its_store_says_so_and_ends_at_once_when_it_is_stopped(tmp_path: Path) -> None:
    port = free_port()
    with started("gateway", tmp_path, port) as gateway:
        until(lambda: "Connection refused" in gateway.readyz().get("waits", ""), "the reason", check=gateway.runs)
        assert not gateway.readyz()["ready"]
        until(lambda: gateway.logged("waits_for_store"), "the log", check=gateway.runs)
        line = gateway.logged("waits_for_store")[0]
        assert str(port) in line["message"] and 0 < line["gives_up_in_seconds"] < 600
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == EXIT_UNFINISHED


@pytest.mark.long
def test_a_run_that_is_started_before_its_redis_says_so_and_starts_its_services_once_it_is_there(
    tmp_path: Path,
) -> None:
    port = free_port()
    with started("up", tmp_path, port) as up, ExitStack() as stack:
        until(lambda: "waiting for Redis: " in up.log.read_text(), "the reason", check=up.runs)
        server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(port=port))
        stack.callback(server.kill)
        server.start()
        until(lambda: "services started" in up.log.read_text(), "the services", check=up.runs)
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(120) == 130, up.log.read_text()
