"""The rules of the chart are complete, and that of generators proposes what docs/scaling.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from .hpa import ReplicaMetrics, propose
from .rule import load_rule

RULES = sorted((Path(__file__).parents[3] / "helm" / "rollmesh" / "files" / "autoscaling").glob("*.yaml"))


@pytest.mark.parametrize("file", RULES, ids=lambda f: f.stem)
def test_the_rules_of_the_chart_are_valid_and_for_the_service_that_names_them(file: Path) -> None:
    loaded = load_rule(file)
    assert loaded.service == file.stem
    for signal in loaded.signals:
        text = loaded.query(signal, 'run="a"', speed_up=20)
        assert "$" not in text and 'run="a"' in text


def test_there_is_a_rule_for_every_service_that_scales() -> None:
    assert [file.stem for file in RULES] == ["generator", "reward", "rollout", "teacher"]


def generators(**values: float) -> int:
    """Return the proposal of the chart's rule for three generators."""
    shipped = load_rule(next(file for file in RULES if file.stem == "generator"))
    names = {signal.name: values[signal.name.replace("-", "_")] for signal in shipped.signals}
    return propose(shipped, ReplicaMetrics(now=0, wanted=3, ready=3, values=names))


def test_the_generator_rule_adds_when_the_trainer_waits_and_removes_only_idle_generators() -> None:
    assert generators(trainer_wait=0.4, ready_queue_room=0.5, staleness_headroom=0.9) == 6
    assert generators(trainer_wait=0.0, ready_queue_room=0.5, staleness_headroom=0.3) == 3
    assert generators(trainer_wait=0.0, ready_queue_room=0.0, staleness_headroom=0.9) == 3
    assert generators(trainer_wait=0.05, ready_queue_room=0.0, staleness_headroom=0.3) == 1
    assert generators(trainer_wait=0.0, ready_queue_room=0.1, staleness_headroom=0.55) == 2
