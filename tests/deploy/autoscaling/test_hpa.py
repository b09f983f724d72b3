"""The rule against Kubernetes' documented arithmetic, and what must hold whatever the signals say."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .hpa import ReplicaMemory, ReplicaMetrics, next_replicas, propose
from .rule import AutoscalingRule, load_rule

RULES = sorted((Path(__file__).parents[3] / "helm" / "rollmesh" / "files" / "autoscaling").glob("*.yaml"))


def rule(**changes: Any) -> AutoscalingRule:
    signals = [
        {"name": "wait", "metricType": "Value", "target": 0.2, "query": "wait"},
        {"name": "load", "metricType": "AverageValue", "target": 10, "query": "load"},
    ]
    pods = [{"type": "Pods", "value": 1, "periodSeconds": 60}]
    data = {
        "service": "generator",
        "minReplicas": 1,
        "maxReplicas": 8,
        "window": "5m",
        "signals": signals,
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [{"type": "Percent", "value": 100, "periodSeconds": 60}],
            },
            "scaleDown": {"stabilizationWindowSeconds": 120, "policies": pods},
        },
    }
    return AutoscalingRule.model_validate({**data, **changes})


def look(wanted: int, *, ready: int | None = None, now: float = 0.0, **values: float | None) -> ReplicaMetrics:
    return ReplicaMetrics(now=now, wanted=wanted, ready=wanted if ready is None else ready, values=values)


@pytest.mark.parametrize(
    ("replicas", "wait", "load", "expected"),
    [
        *((2, 0.5, 0, 5), (2, 0.0, 31, 4), (4, 0.1, 5, 2)),
        # a tenth off the target changes nothing
        *((3, 0.22, 1, 3), (3, 0.18, 1, 3), (3, 0.0, 32.9, 3)),
        # the largest proposal wins within the bounds
        *((2, 0.3, 60, 6), (2, 1.0, 1000, 8), (2, 1e308, 0, 8), (2, 0.0, 0, 1)),
        # a missing signal keeps replicas from leaving but not from coming
        *((3, None, 1, 3), (3, None, 45, 5), (3, None, None, 3), (3, float("nan"), 1, 3), (3, float("inf"), 1, 3)),
    ],
)
def test_a_value_scales_the_ready_replicas_and_an_average_value_divides(
    replicas: int, wait: float | None, load: float | None, expected: int
) -> None:
    assert propose(rule(), look(replicas, wait=wait, load=load)) == expected
    assert propose(rule(), look(replicas, ready=0, wait=wait, load=load)) == replicas, "no replica works yet"


def run(spec: AutoscalingRule, wanted: int, values: list[dict[str, float | None]], every: float) -> list[int]:
    """Replicas after each look; whatever is asked for works at once."""
    memory, replicas = ReplicaMemory(), []
    for number, answers in enumerate(values):
        wanted, memory = next_replicas(spec, memory, look(wanted, now=number * every, **answers))
        replicas.append(wanted)
    return replicas


def test_replicas_double_at_most_once_a_period_on_the_way_up() -> None:
    assert run(rule(), 1, [{"wait": 1.0, "load": 0}] * 12, every=15) == [1, 2, 2, 2, 2, 4, 4, 4, 4, 8, 8, 8]


def test_replicas_leave_one_a_period_after_the_window_has_seen_no_need_of_them() -> None:
    quiet = [{"wait": 0.0, "load": 0.0}] * 24
    assert run(rule(), 3, quiet, every=15) == [3] * 9 + [2] * 4 + [1] * 11


def test_one_starved_moment_in_the_window_keeps_the_replicas() -> None:
    values = [{"wait": 0.0, "load": 0.0}] * 7 + [{"wait": 0.2, "load": 0.0}] + [{"wait": 0.0, "load": 0.0}] * 8
    assert run(rule(), 3, values, every=15)[:16] == [3] * 16


def test_bounds_that_have_moved_hold_at_once() -> None:
    assert next_replicas(rule(maxReplicas=2), ReplicaMemory(), look(5, wait=0.0, load=0.0))[0] == 2


def test_autoscaling_rests_at_zero_replicas() -> None:
    assert next_replicas(rule(), ReplicaMemory(), look(0, wait=1.0, load=100)) == (0, ReplicaMemory())


VALUES = st.one_of(st.none(), st.floats(0, 50, allow_nan=False), st.just(float("nan")))
ANSWERS = st.lists(st.fixed_dictionaries({"wait": VALUES, "load": VALUES}), min_size=1, max_size=40)


@given(answers=ANSWERS, wanted=st.integers(1, 8), every=st.sampled_from([5.0, 15.0, 40.0]))
def test_replicas_stay_within_bounds_and_change_no_faster_than_the_policies_allow(
    answers: list[dict[str, float | None]], wanted: int, every: float
) -> None:
    after = run(rule(), wanted, answers, every)
    assert all(1 <= n <= 8 for n in after)
    for number, (before, now) in enumerate(itertools.pairwise([wanted, *after])):
        a_period_ago = int((number * every - 60) // every)
        then = after[a_period_ago] if a_period_ago >= 0 else wanted
        if now > before:
            assert now <= 2 * then
        if now < before:
            assert now >= then - 1


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
