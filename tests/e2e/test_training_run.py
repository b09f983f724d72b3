"""One training run from all sides: metrics, and a kill at the end."""

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import EmbeddedServer

from .conftest import ENDLESS, WAIT_SECONDS, CommandLine, until, write_small_run

pytestmark = [pytest.mark.long, pytest.mark.slow]

DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
MOVED = {
    "rollout": ("sampled_tokens_total", "leases_total", "groups_admitted_total", "last_finished_timestamp_seconds"),
    "generator": (
        "generated_tokens_total",
        "running_slot_seconds_total",
        "reloads_total",
        "last_call_timestamp_seconds",
    ),
    "reward": ("answers_total", "outcomes_total", "last_outcome_timestamp_seconds"),
    "trainer": ("trained_tokens_total", "groups_total", "checkpoint_writes_total", "last_step_timestamp_seconds"),
    "gateway": ("look_seconds", "last_look_timestamp_seconds", "store_call_seconds"),
    "agents": ("store_call_seconds",),
}
"""Metrics that a trained step changes, by service."""


@dataclass(frozen=True)
class Training:
    """``rollmesh up`` in the background."""

    line: CommandLine
    process: subprocess.Popen[str]
    output: Path

    @property
    def folder(self) -> Path:
        return self.line.folder

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Lines of the trained steps."""
        return self.line.json_lines("metrics.jsonl")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition; the end of the run ends the wait."""
        until(condition, f"{what} (output in {self.output})", self.process)

    def trains(self, steps: int) -> None:
        """Wait for further train steps."""
        self.line.trains(self.process, steps)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run of every service that never ends by itself; the last test of this file kills it."""
    line = write_small_run(
        tmp_path_factory.mktemp("training"),
        trainer={"train_steps": ENDLESS},
        agents={"enabled": True},
        gateway={"enabled": True},
    )
    output = line.run_file.with_name("up.log")
    with output.open("w") as log:
        process = line.start("up", str(line.run_file), output=log)
    try:
        yield Training(line, process, output)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        EmbeddedServer(line.folder / "redis").kill()


# Metrics ----------------------------------------------------------------------------------------------------------


def documented() -> dict[str, set[str]]:
    """Names of the table, by service."""
    text = DOCUMENT.read_text()
    sections = {service: text.partition(f"\n## {service}\n")[2].partition("\n## ")[0] for service in MOVED}
    return {
        service: set(re.findall(r"^\| `(rollmesh_\w+)` \|", section, re.MULTILINE))
        for service, section in sections.items()
    }


def scraped(folder: Path, service: str) -> list[dict[str, float]]:
    """Sum over the labels of every sample, for each process of a service."""
    found = []
    for endpoint in read_endpoints(folder, service):
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(
            httpx.get(f"http://{endpoint.admin}/metrics", timeout=WAIT_SECONDS).text
        ):
            exported = f"{family.name}_total" if family.type == "counter" else family.name
            totals.setdefault(exported, 0.0)
            for sample in family.samples:
                totals[exported] += sample.value
        found.append(totals)
    return found


def lacking(folder: Path) -> list[str]:
    """Return the metrics that no process of their service exports yet, or that have not changed in some process."""
    found = []
    for service in MOVED:
        processes = scraped(folder, service)
        found += [f"a {service}"] * (not processes)
        for name in MOVED[service]:
            exported = f"rollmesh_{service}_{name}"
            found += [exported for totals in processes if not totals.get(exported)]
    return found


def test_every_documented_metric_is_exported_by_a_run_and_moves(training: Training) -> None:
    training.trains(2)
    missing = ["not looked yet"]

    def everything_moves() -> bool:
        missing[:] = lacking(training.folder)
        return not missing

    # Each process has its share of the work after a while: the second generator may come late to it.
    training.until(everything_moves, "every metric to move")
    for service, names in documented().items():
        for totals in scraped(training.folder, service):
            ours = {name for name in totals if name.startswith("rollmesh_") and not name.endswith("_created")}
            assert ours == names, service

    report = training.steps[-1]
    assert sum(report["mesh"]["trained_groups_by_length_decile"]) == 4 * report["train_step"]

    def engines_are_reported() -> bool:
        engines = [record["mesh"]["engines"] for record in training.steps]
        working = [e for e in engines if e["prefill_tokens"] > 0 and e["running_slot_seconds"] > 0]
        return any(0 <= e["reprefill_share"] < 1 and 0 < e["bubble_ratio"] < 1 for e in working)

    training.until(engines_are_reported, "a train step that reports what the engines did")


# The end -----------------------------------------------------------------------------------


def test_a_second_signal_kills_everything_without_a_drain(training: Training) -> None:
    training.until((training.folder / "config.yaml").exists, "the first launcher")
    training.until(lambda: {e.service for e in read_endpoints(training.folder)} == set(MOVED), "every service")
    pids = {e.pid for e in read_endpoints(training.folder)}
    (worker,) = read_endpoints(training.folder, "rollout")
    os.kill(worker.pid, signal.SIGSTOP)  # it cannot drain, and has half a minute to do so
    training.process.send_signal(signal.SIGTERM)
    training.until(lambda: "draining services" in training.output.read_text(), "the drain")
    training.process.send_signal(signal.SIGINT)
    assert training.process.wait(WAIT_SECONDS) == 130, training.output.read_text()
    assert "killed without draining" in training.output.read_text()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert EmbeddedServer(training.folder / "redis").pid is None
