"""Every service of a real run answers /metrics with every name that docs/metrics.md promises."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.runtime.endpoints import read_endpoints

from .conftest import ENDLESS, WAIT_SECONDS

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


def test_every_documented_metric_is_exported_by_a_run_and_moves(started, wait_until) -> None:
    line, process = started(trainer={"train_steps": ENDLESS}, agents={"enabled": True})
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 2, "two train steps", process)
    missing = ["not looked yet"]

    def everything_moves() -> bool:
        missing[:] = lacking(line.folder)
        return not missing

    # Each process has its share of the work after a while: the second generator may come late to it.
    wait_until(everything_moves, "every metric to move", process)
    for service, names in documented().items():
        for totals in scraped(line.folder, service):
            ours = {name for name in totals if name.startswith("rollmesh_") and not name.endswith("_created")}
            assert ours == names, service

    report = line.json_lines("metrics.jsonl")[-1]
    assert sum(report["mesh"]["trained_groups_by_length_decile"]) == 4 * report["train_step"]

    def engines_are_reported() -> bool:
        engines = [record["mesh"]["engines"] for record in line.json_lines("metrics.jsonl")]
        working = [e for e in engines if e["prefill_tokens"] > 0 and e["running_slot_seconds"] > 0]
        return any(0 <= e["reprefill_share"] < 1 and 0 < e["bubble_ratio"] < 1 for e in working)

    wait_until(engines_are_reported, "a train step that reports what the engines did", process)
