"""A run that is trained entirely by an agent outside of the mesh: the one of docs/agents.md."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import read_endpoints

from .audits import assert_rescored
from .conftest import ENDLESS, WAIT_SECONDS

DOCUMENT = Path(__file__).parents[2] / "docs" / "agents.md"
STEPS = 4


def example() -> str:
    """The agent of the documentation, word for word."""
    (code,) = re.findall(r"<!-- run by tests/e2e/test_agents.py -->\n```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    return code


@pytest.fixture
def agent(tmp_path: Path) -> Iterator:
    """Start the example against an agents service; it is stopped at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(url: str, token: str) -> subprocess.Popen[str]:
        script = tmp_path / "agent.py"
        script.write_text(example())
        environment = {**os.environ, "ROLLMESH_URL": url, "ROLLMESH_TOKEN": token, "NO_PROXY": "*"}
        process = subprocess.Popen(
            [sys.executable, str(script)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None and not process.stdout.closed:
            process.communicate()


def test_the_example_is_short() -> None:
    lines = [line for line in example().splitlines() if line.strip()]
    assert len(lines) <= 40
    compile(example(), "agents.md", "exec")


@pytest.mark.parametrize("kills", [0, 2])
def test_an_outside_agent_trains_a_run_through_kills_of_its_service(kills, started, wait_until, agent) -> None:
    # Groups that are ready are trained while the service is away: a run that is to be hit twice must not end by itself.
    port, train_steps = free_port(), ENDLESS if kills else STEPS
    line, process = started(
        rollout={"program": "agent", "max_new_tokens": 256, "partial_save_tokens": 16},
        trainer={"train_steps": train_steps},
        agents={"port": port},
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

    def trained() -> int:
        return len(line.json_lines("metrics.jsonl"))

    def trains(steps: int) -> None:
        wanted = trained() + steps
        wait_until(lambda: trained() >= wanted, f"train step {wanted}", process)

    for _ in range(kills):
        trains(1)
        (service,) = read_endpoints(line.folder, "agents")
        os.kill(service.pid, signal.SIGKILL)
        wait_until(
            lambda service=service: [e.pid for e in read_endpoints(line.folder, "agents")] not in ([], [service.pid]),
            "another agents service",
            process,
        )
    if kills:
        trains(2)  # the second one from answers that a new service took
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    assert process.returncode == (130 if kills else 0), output
    assert f"the OpenAI-compatible API: {url}" in output
    if worker.poll() is None:  # it tries again for a while before it believes that the run has ended
        worker.kill()
    told, _ = worker.communicate()
    assert worker.returncode in (0, -signal.SIGKILL) and "Traceback" not in told, told

    steps = line.json_lines("metrics.jsonl")
    assert [step["train_step"] for step in steps] == list(range(1, len(steps) + 1))
    assert len(steps) == STEPS or kills
    # A run that is stopped is not audited by itself.
    audited = (
        line.run("audit", str(line.folder), "--json").stdout if kills else (line.folder / "audit.json").read_text()
    )
    audit = json.loads(audited)
    assert audit["green"], audit
    assert audit["lost"] == []
    assert audit["trained_twice"] == {}
    assert audit["staleness_violations"] == []
    assert_rescored(audit)
