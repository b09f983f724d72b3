"""The chart's autoscaling rules: complete, as docs/scaling.md says, and against series of a run, by promtool."""

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from ..prometheus.conftest import tool
from .hpa import ReplicaMetrics, propose
from .rule import load_rule

RULES = Path(__file__).parents[3] / "helm" / "rollmesh" / "files" / "autoscaling"
FILES = sorted(RULES.glob("*.yaml"))
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


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_rules_of_the_chart_are_valid_and_for_the_service_that_names_them(file: Path) -> None:
    loaded = load_rule(file)
    assert loaded.service == file.stem
    for signal in loaded.signals:
        text = loaded.query(signal, 'run="a"', speed_up=20)
        assert "$" not in text and 'run="a"' in text


def test_there_is_a_rule_for_every_service_that_scales() -> None:
    assert [file.stem for file in FILES] == ["generator", "reward", "rollout", "teacher"]


def generators(**values: float) -> int:
    """Return the proposal of the chart's rule for three generators."""
    shipped = load_rule(RULES / "generator.yaml")
    names = {signal.name: values[signal.name.replace("-", "_")] for signal in shipped.signals}
    return propose(shipped, ReplicaMetrics(now=0, wanted=3, ready=3, values=names))


def test_the_generator_rule_adds_when_the_trainer_waits_and_removes_only_idle_generators() -> None:
    assert generators(trainer_wait=0.4, ready_queue_room=0.5, staleness_headroom=0.9) == 6
    assert generators(trainer_wait=0.0, ready_queue_room=0.5, staleness_headroom=0.3) == 3
    assert generators(trainer_wait=0.0, ready_queue_room=0.0, staleness_headroom=0.9) == 3
    assert generators(trainer_wait=0.05, ready_queue_room=0.0, staleness_headroom=0.3) == 1
    assert generators(trainer_wait=0.0, ready_queue_room=0.1, staleness_headroom=0.55) == 2


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


def test_a_teacher_is_judged_by_its_own_processes(tmp_path: Path) -> None:
    """Two processes, of which one has work half of the time: 12 sequences a minute, of 20 s each."""
    rates = {"score_seconds_sum": 240, "score_seconds_count": 12, "busy_seconds_total": 30}
    series = {f'rollmesh_teacher_{name}{{teacher="a",instance="0"}}': f"0+{rate}x60" for name, rate in rates.items()}
    idle = {f'rollmesh_teacher_{name}{{teacher="a",instance="1"}}': "0x60" for name in rates}
    other = {f'rollmesh_teacher_{name}{{teacher="b",instance="2"}}': "0+1x60" for name in rates}
    expect(tmp_path, "teacher", series | idle | other, {"score-time": 20, "utilisation": 0.25}, ',teacher="a"')
    expect(tmp_path, "teacher", idle | other, {"score-time": 0, "utilisation": 0}, ',teacher="a"')


def expect(
    folder: Path,
    service: str,
    series: Mapping[str, float | str],
    values: dict[str, float | None],
    further: str = "",
) -> None:
    """The rule's answers for this run, while another one on the same Prometheus says the opposite.

    A value is at rest, or written as promtool reads one that grows; ``further`` are conditions beside the run.
    """
    rule = load_rule(RULES / f"{service}.yaml")
    inputs = []
    for name, value in series.items():
        opposite = 7 - value if isinstance(value, (int, float)) and value < 7 else 1
        for run, shown in (("here", value), ("other", opposite)):
            text = shown if isinstance(shown, str) else f"{shown}x60"
            inputs.append({"series": name.replace("{", f'{{run="{run}",'), "values": text})
    checks: list[dict[str, Any]] = []
    for signal in rule.signals:
        if signal.name in values:
            wanted = values[signal.name]
            samples = [] if wanted is None else [{"labels": "{}", "value": wanted}]
            checks.append(
                {"expr": rule.query(signal, f'run="here"{further}'), "eval_time": "30m", "exp_samples": samples}
            )
    assert len(checks) == len(values)
    file = folder / "signals_test.yaml"
    case = {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run([tool("promtool"), "test", "rules", file], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(done.stdout + done.stderr)
