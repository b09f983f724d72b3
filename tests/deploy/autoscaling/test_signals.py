"""The chart's autoscaling rules against series of a run, by promtool: paused, complete, and beside another run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..prometheus.conftest import tool
from .rule import load_rule

RULES = Path(__file__).parents[3] / "helm" / "rollmesh" / "files" / "autoscaling"
STARVED = {
    'rollmesh_rollout_leader{instance="r0"}': 1,
    'rollmesh_rollout_queue_groups{instance="r0",state="cut"}': 0,
    'rollmesh_rollout_queue_groups{instance="r0",state="ready"}': 0,
    'rollmesh_rollout_queue_trajectories{instance="r0",state="leased"}': 24,
    'rollmesh_rollout_pool_trajectories{instance="r0"}': 24,
    'rollmesh_rollout_batch_groups{instance="r0"}': 4,
    'rollmesh_rollout_max_staleness_steps{instance="r0"}': 4,
    'rollmesh_rollout_paused{instance="r0",by="person"}': 0,
    'rollmesh_rollout_run_complete{instance="r0"}': 0,
    'rollmesh_rollout_in_flight_trajectories{instance="r0",service="rollout"}': 24,
    'rollmesh_rollout_in_flight_trajectories{instance="agents",service="agents"}': 5000,
}
"""A run whose trainer waits although the pool is full."""


def test_signals_of_a_starved_a_paused_and_a_complete_run(tmp_path: Path) -> None:
    full = {"trainer-wait": 1, "ready-queue-room": 0.5, "staleness-headroom": 0.9}
    expect(tmp_path, "generator", STARVED, full)
    paused = STARVED | {'rollmesh_rollout_paused{instance="r0",by="person"}': 1}
    expect(tmp_path, "generator", paused, full | {"trainer-wait": None})
    complete = STARVED | {
        'rollmesh_rollout_run_complete{instance="r0"}': 1,
        'rollmesh_rollout_queue_trajectories{instance="r0",state="leased"}': 0,
    }
    expect(tmp_path, "generator", complete, dict.fromkeys(full, 0))


def test_what_the_agents_service_holds_is_no_work_for_rollout_workers(tmp_path: Path) -> None:
    expect(tmp_path, "rollout", STARVED, {"in-flight": 24})


def expect(folder: Path, service: str, series: dict[str, float], values: dict[str, float | None]) -> None:
    """The rule's answers for this run, while another one on the same Prometheus says the opposite."""
    rule = load_rule(RULES / f"{service}.yaml")
    inputs = []
    for name, value in series.items():
        for run, shown in (("here", value), ("other", 7 - value if value < 7 else 1)):
            inputs.append({"series": name.replace("{", f'{{run="{run}",'), "values": f"{shown}x60"})
    checks: list[dict[str, Any]] = []
    for signal in rule.signals:
        if signal.name in values:
            wanted = values[signal.name]
            samples = [] if wanted is None else [{"labels": "{}", "value": wanted}]
            checks.append({"expr": rule.query(signal, 'run="here"'), "eval_time": "30m", "exp_samples": samples})
    assert len(checks) == len(values)
    file = folder / "signals_test.yaml"
    case = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([tool("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)
