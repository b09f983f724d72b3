"""A service whose Redis is not there yet waits, says why, and starts without a restart once it is there."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
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

    def waits_for(self, reason: str) -> None:
        until(lambda: reason in self.readyz().get("waits", ""), reason, check=self.runs)
        assert not self.readyz()["ready"]

    def logged(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == "waits_for_store"]

    def runs(self) -> None:
        assert self.process.poll() is None, f"it has ended:\n{self.log.read_text()[-4000:]}"


@contextmanager
def started(service: str, tmp_path: Path, port: int) -> Iterator[Waiting]:
    run = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    run |= {"name": "late", "folder": str(tmp_path / "run"), "store": {"url": f"redis://127.0.0.1:{port}"}}
    run["telemetry"] = {"log_format": "json"}
    file, log = tmp_path / "run.yaml", tmp_path / "log"
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
        gateway.waits_for("Connection refused")
        until(lambda: bool(gateway.logged()), "the log", check=gateway.runs)
        line = gateway.logged()[0]
        assert str(port) in line["message"] and 0 < line["gives_up_in_seconds"] < 600
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(60) == EXIT_UNFINISHED


@pytest.mark.long
def test_a_service_starts_once_its_redis_is_there_and_has_its_replicas(tmp_path: Path) -> None:
    port = free_port()
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(port=port))
    with started("rollout", tmp_path, port) as rollout:
        rollout.waits_for("Connection refused")
        rollout.process.send_signal(signal.SIGSTOP)
        server.start()
        try:
            with redis.Redis(port=port) as client:
                client.config_set("min-replicas-to-write", 1)
                rollout.process.send_signal(signal.SIGCONT)
                rollout.waits_for("NOREPLICAS")
                client.config_set("min-replicas-to-write", 0)
            until(lambda: rollout.readyz()["ready"], "the service", check=rollout.runs)
            assert "Redis" not in rollout.readyz()["waits"]
        finally:
            server.kill()
