"""A run that is trained entirely by an agent outside of the mesh: examples/agent.py."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import read_endpoints

from .conftest import WAIT_SECONDS, assert_rescored

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent.py"
pytestmark = pytest.mark.long
STEPS = 12
"""More than are trained before the second kill, with the batches that were ready by then."""


@pytest.fixture
def agent() -> Iterator:
    """Start the example against an agents service; it is stopped at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(url: str, token: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "ROLLMESH_URL": url, "ROLLMESH_TOKEN": token, "NO_PROXY": "*"}
        process = subprocess.Popen(
            [sys.executable, str(EXAMPLE)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def test_an_outside_agent_trains_a_run_to_its_end_through_two_kills_of_its_service(started, wait_until, agent) -> None:
    port = free_port()
    line, process = started(
        rollout={"program": "agent", "max_new_tokens": 256, "partial_save_tokens": 16},
        trainer={"train_steps": STEPS},
        agents={"port": port},
        gateway={"enabled": True},
        store={"heartbeat_seconds": 1.0, "session_ttl_seconds": 4.0},
        evaluation={"before_and_after": False},
    )
    url = f"http://127.0.0.1:{port}/v1"
    token_file = line.folder / "gateway-token"

    def answers() -> bool:
        try:
            return token_file.exists() and httpx.get(f"{url}/openapi.json", trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    wait_until(answers, "the agents service", process)
    (endpoint,) = read_endpoints(line.folder, "agents")
    assert endpoint.url == url
    worker = agent(url, token_file.read_text().strip())

    for _ in range(2):
        line.trains(process)
        (service,) = read_endpoints(line.folder, "agents")
        os.kill(service.pid, signal.SIGKILL)
        wait_until(
            lambda service=service: [e.pid for e in read_endpoints(line.folder, "agents")] not in ([], [service.pid]),
            "another agents service",
            process,
        )
    output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    assert process.returncode == 0, output
    assert f"the OpenAI-compatible API: {url}" in output
    if worker.poll() is None:  # it tries again for a while before it believes that the run has ended
        worker.kill()
    told, _ = worker.communicate()
    assert worker.returncode in (0, -signal.SIGKILL) and "Traceback" not in told, told

    assert line.steps == list(range(1, STEPS + 1))
    assert_rescored(line.audit())
