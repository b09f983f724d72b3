"""A service whose Redis is not there yet waits, and says why."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import yaml

from rollmesh.config.recipes import recipe_file
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.lifecycle import EXIT_UNFINISHED

from ...kit.waiting import until


def test_a_service_that_waits_for_its_store_says_so_and_ends_at_once_when_it_is_stopped(tmp_path: Path) -> None:
    port, folder = free_port(), tmp_path / "run"
    run = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    run |= {"name": "late", "folder": str(folder), "store": {"url": f"redis://127.0.0.1:{port}"}}
    run["telemetry"] = {"log_format": "json"}
    file, log = tmp_path / "run.yaml", tmp_path / "log"
    file.write_text(yaml.safe_dump(run))
    with log.open("wb") as output:
        command = [sys.executable, "-m", "rollmesh.cli.main", "gateway", str(file)]
        gateway = subprocess.Popen(command, stdout=output, stderr=output)

    def readyz() -> dict[str, Any]:
        """What /readyz answers; empty before the admin port is open."""
        for endpoint in read_endpoints(folder, "gateway", starting=True):
            answer: dict[str, Any] = httpx.get(f"http://{endpoint.admin}/readyz", trust_env=False).json()
            return answer
        return {}

    def logged() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == "waits_for_store"]

    def runs() -> None:
        assert gateway.poll() is None, f"it has ended:\n{log.read_text()[-4000:]}"

    try:
        until(lambda: "Connection refused" in readyz().get("waits", ""), "the reason", check=runs)
        assert not readyz()["ready"]
        until(lambda: bool(logged()), "the log", check=runs)
        assert str(port) in logged()[0]["message"] and 0 < logged()[0]["gives_up_in_seconds"] < 600
        gateway.send_signal(signal.SIGTERM)
        assert gateway.wait(60) == EXIT_UNFINISHED
    finally:
        gateway.kill()
        gateway.wait()
