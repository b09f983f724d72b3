"""A real run, a real Prometheus that scrapes it by its run folder, and a receiver of its notifications.

The receiver stands where Alertmanager would, and hears what Alertmanager would hear.
"""

import json
import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from rollmesh.runtime.endpoints import Endpoint, read_endpoints

from ...e2e.conftest import until, write_small_run
from .conftest import running_prometheus
from .rule_files import ALERTS, RECORDING

RUN = "watched"
SCRAPE_SECONDS = 1
SECTIONS: dict[str, dict[str, Any]] = {
    "schedule": {
        "preset": "copris",
        "groups_per_batch": 4,
        "group_size": 4,
        "pool_size": "auto",
        "max_staleness": 4,
        "start_order": "longest_expected",
    },
    "generator": {"replicas": 2, "slots": 16, "speculation": "history"},
    "teachers": {"twin": {"model": "recipe:countdown", "top_k": 8}},
    "trainer": {
        "train_steps": 100_000,
        "learning_rate": 4e-4,
        "algorithm": {"teacher": {"reverse_kl_coefficient": 0.1, "forward_kl_coefficient": 0.1, "with_reward": True}},
    },
    "evaluation": {"before_and_after": False, "every_versions": 5, "prompt_count": 8},
    "rollout": {"max_new_tokens": 128, "partial_save_tokens": 16},
    "agents": {"enabled": True},
    "gateway": {"enabled": True},
    "curriculum": {"planner": "quorum", "planner_options": {"share": 0.75}},
}
"""A run that never ends by itself, with every part that has a panel: evaluations, a planner, drafts, a teacher."""


@dataclass(frozen=True)
class Mesh:
    """A run in the background."""

    folder: Path

    def endpoints(self, service: str) -> list[Endpoint]:
        """Living processes of a service."""
        return read_endpoints(self.folder, service)

    def act(self, action: str) -> None:
        """Send an operator action of the gateway's page: ``pause`` or ``resume``."""
        self._post("gateway", f"api/v1/{action}")

    def complete(self) -> None:
        """Send a request to the OpenAI-compatible API, which may say that no generator serves at this moment."""
        self._post("agents", "/completions", {"model": RUN, "prompt": [1, 2, 3], "max_tokens": 4}, busy=503)

    def _post(self, service: str, path: str, body: dict[str, Any] | None = None, busy: int | None = None) -> None:
        (endpoint,) = self.endpoints(service)
        token = (self.folder / "gateway-token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.post(endpoint.url + path, headers=headers, json=body, timeout=60)
        assert answer.status_code < 300 or answer.status_code == busy, answer.text

    def kill(self, service: str) -> None:
        """kill -9 every process of a service."""
        for endpoint in self.endpoints(service):
            os.kill(endpoint.pid, signal.SIGKILL)


@contextmanager
def running_mesh(parent: Path) -> Iterator[Mesh]:
    """``rollmesh up`` until the end of the test."""
    line = write_small_run(parent, name=RUN, **SECTIONS)
    mesh = Mesh(line.folder)
    with (parent / "up.log").open("w") as log:
        process = line.start("up", str(line.run_file), output=log)
        try:
            what = "the first train step, the gateway and the agents service"
            until(
                lambda: bool(line.steps and mesh.endpoints("gateway") and mesh.endpoints("agents")),
                f"{what}: {parent / 'up.log'}",
                process,
            )
            yield mesh
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(120)


@dataclass
class Notifications:
    """Notifications that Prometheus sent to its Alertmanager."""

    port: int
    notes: list[tuple[str, str]] = field(default_factory=list)
    """(alert, firing or resolved), in order and without repetitions of the same."""

    def add(self, alert: str, status: str) -> None:
        """Note a change."""
        said = [last for name, last in self.notes if name == alert]
        if not said or said[-1] != status:
            self.notes.append((alert, status))

    def has(self, alert: str, *statuses: str, after: int = 0) -> bool:
        """Tell whether notes of an alert came with these statuses in this order, past the first ``after`` notes."""
        said = iter(status for name, status in self.notes[after:] if name == alert)
        return all(status in said for status in statuses)

    def quiet(self, alert: str) -> bool:
        """Tell whether the last note of an alert is its end, or there is none."""
        return [status for name, status in self.notes if name == alert][-1:] in ([], ["resolved"])


@contextmanager
def receiver() -> Iterator[Notifications]:
    """Takes ``POST /api/v2/alerts`` on a free port; an alert whose end has passed is resolved."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            now = datetime.now(UTC)
            for alert in body:
                ended = datetime.fromisoformat(alert["endsAt"]) <= now
                received.add(alert["labels"]["alertname"], "resolved" if ended else "firing")
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not to the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    received = Notifications(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def ask(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and newest values of an expression; AssertionError with Prometheus's words for one it refuses."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30).json()
        assert answer["status"] == "success", (expression, answer.get("error"))
        return [(series["metric"], float(series["value"][1])) for series in answer["data"]["result"]]

    def firing(self, alert: str) -> bool:
        """Tell whether an alert fires now."""
        return bool(self.ask(f'ALERTS{{alertname="{alert}", alertstate="firing"}}'))


@contextmanager
def watching(mesh: Mesh, parent: Path, hold: str) -> Iterator[tuple[Prometheus, Notifications]]:
    """Prometheus with the shipped rules, every alert's ``for`` replaced by ``hold``."""
    rules = parent / "rules"
    rules.mkdir()
    (rules / "recording.yaml").write_text(RECORDING.read_text())
    alerts = re.sub(r"^( +for: ).*$", rf"\g<1>{hold}", ALERTS.read_text(), flags=re.MULTILINE)
    (rules / "alerts.yaml").write_text(alerts)
    with receiver() as notifications:
        config = {
            "global": {"scrape_interval": f"{SCRAPE_SECONDS}s", "evaluation_interval": "1s"},
            "rule_files": [str(rules / "*.yaml")],
            "scrape_configs": [
                {
                    "job_name": "rollmesh",
                    "file_sd_configs": [{"files": [str(mesh.folder / "scrape" / "*.json")], "refresh_interval": "1s"}],
                }
            ],
            "alerting": {"alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{notifications.port}"]}]}]},
        }
        with running_prometheus(parent, config) as url:
            yield Prometheus(url), notifications
