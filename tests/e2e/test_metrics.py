"""Every service of a real run answers /metrics with every name that docs/metrics.md promises."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from rollmesh.runtime.endpoints import read_endpoints

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
}
"""What a trained step has moved, by service."""


def documented() -> dict[str, set[str]]:
    """Names of the table, by service."""
    names: dict[str, set[str]] = {service: set() for service in MOVED}
    for name in re.findall(r"^\| `(rollmesh_\w+)` \|", DOCUMENT.read_text(), re.MULTILINE):
        names[name.split("_")[1]].add(name)
    return names


def scraped(folder: Path, service: str) -> list[dict[str, float]]:
    """Sum over the labels of every sample, for each process of a service."""
    found = []
    for endpoint in read_endpoints(folder, service):
        totals: dict[str, float] = {}
        for family in text_string_to_metric_families(httpx.get(f"http://{endpoint.admin}/metrics", timeout=20).text):
            exported = f"{family.name}_total" if family.type == "counter" else family.name
            totals.setdefault(exported, 0.0)
            for sample in family.samples:
                totals[exported] += sample.value
        found.append(totals)
    return found


def test_every_documented_metric_is_exported_by_a_run_and_moves(started, wait_until) -> None:
    line, process = started(trainer={"train_steps": 60})
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 2, "two train steps", process)
    for service, names in documented().items():
        processes = scraped(line.folder, service)
        assert processes, service
        for totals in processes:
            ours = {name for name in totals if name.startswith("rollmesh_") and not name.endswith("_created")}
            assert ours == names, service
            for name in MOVED[service]:
                assert totals[f"rollmesh_{service}_{name}"] > 0, name

    mesh = line.json_lines("metrics.jsonl")[-1]["mesh"]
    assert sum(mesh["trained_groups_by_length_decile"]) == 4 * line.json_lines("metrics.jsonl")[-1]["train_step"]
    engine = line.json_lines("timeline.jsonl")[-1]["engine_totals"]
    assert engine["prefill_tokens"] > 0
    assert engine["busy_seconds"] > 0
