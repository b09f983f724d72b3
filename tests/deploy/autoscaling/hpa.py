"""Number of replicas by an autoscaling rule: the algorithm of a HorizontalPodAutoscaler (autoscaling/v2), pure.

Tests check the chart's rule with it, without Kubernetes. The documented parts of the algorithm are implemented:
one proposal per metric with a tolerance of 10%, the largest wins; no scale-down while a metric is missing;
stabilization windows (the most cautious proposal of the window counts); policies that limit the change within a
period; bounds.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmesh.config.replica_bounds import MOST_REPLICAS

from .rule import AutoscalingRule, ScalingDirection, Signal

_TOLERANCE = 0.1
_ROUNDING = 1e-9
"""Tolerance for rounding up: a float just above a whole number counts as that number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """Input of the autoscaler at one moment: replicas requested and ready, and values by signal, None without data."""

    now: float
    wanted: int
    ready: int
    values: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """State of the autoscaler between two evaluations of the rule."""

    proposals: tuple[tuple[float, int], ...] = ()
    """(time, proposed replicas) within the longest window."""
    changes: tuple[tuple[float, int], ...] = ()
    """(time, added replicas) within the longest period; negative for removed ones."""


def next_replicas(
    rule: AutoscalingRule, memory: ReplicaMemory, metrics: ReplicaMetrics, speed_up: float = 1.0
) -> tuple[int, ReplicaMemory]:
    """Compute the replicas to request now and the next state; ``speed_up`` divides all times of the rule."""
    # The first evaluation proposes the current number: nothing changes before a window has passed.
    proposals = memory.proposals or ((metrics.now, metrics.wanted),)
    proposals = (*proposals, (metrics.now, propose(rule, metrics)))
    steady = _stabilised(rule, proposals, metrics, speed_up)
    replicas = _limited(rule, memory.changes, steady, metrics, speed_up)
    changes = memory.changes
    if replicas != metrics.wanted:
        changes = (*changes, (metrics.now, replicas - metrics.wanted))
    directions = (rule.behavior.scaleUp, rule.behavior.scaleDown)
    window = max(direction.stabilizationWindowSeconds for direction in directions)
    period = max(policy.periodSeconds for direction in directions for policy in direction.policies)
    return replicas, ReplicaMemory(
        proposals=_since(proposals, metrics.now - window / speed_up),
        changes=_since(changes, metrics.now - period / speed_up),
    )


def propose(rule: AutoscalingRule, metrics: ReplicaMetrics) -> int:
    """Return the largest proposal of the signals within the bounds; the present number without data or replicas."""
    known = {s.name: v for s in rule.signals if (v := metrics.values.get(s.name)) is not None and math.isfinite(v)}
    if not known or not metrics.ready:
        return metrics.wanted
    largest = max(_proposal(s, known[s.name], metrics) for s in rule.signals if s.name in known)
    replicas = min(max(largest, rule.minReplicas), rule.maxReplicas)
    return replicas if len(known) == len(rule.signals) else max(replicas, metrics.wanted)


def _proposal(signal: Signal, value: float, metrics: ReplicaMetrics) -> int:
    per_replica = signal.target * (metrics.ready if signal.metricType == "AverageValue" else 1)
    ratio = value / per_replica
    if abs(ratio - 1) <= _TOLERANCE:
        return metrics.wanted
    # Bound the value before rounding: a huge one must not overflow.
    return math.ceil(min(ratio * metrics.ready, float(MOST_REPLICAS)) - _ROUNDING)


def _stabilised(
    rule: AutoscalingRule, proposals: Sequence[tuple[float, int]], metrics: ReplicaMetrics, speed_up: float
) -> int:
    """Scale up to the lowest proposal of the scale-up window, down to the highest of the scale-down window."""
    up = [n for t, n in proposals if t >= metrics.now - rule.behavior.scaleUp.stabilizationWindowSeconds / speed_up]
    down = [n for t, n in proposals if t >= metrics.now - rule.behavior.scaleDown.stabilizationWindowSeconds / speed_up]
    return min(max(metrics.wanted, min(up)), max(down))


def _limited(
    rule: AutoscalingRule, changes: Sequence[tuple[float, int]], steady: int, metrics: ReplicaMetrics, speed_up: float
) -> int:
    """Apply the policies of the direction."""
    if steady > metrics.wanted:
        most = max(_limits(rule.behavior.scaleUp, changes, metrics, speed_up, sign=1))
        return max(metrics.wanted, min(steady, most))
    if steady < metrics.wanted:
        least = min(_limits(rule.behavior.scaleDown, changes, metrics, speed_up, sign=-1))
        return min(metrics.wanted, max(steady, least))
    return steady


def _limits(
    direction: ScalingDirection,
    changes: Sequence[tuple[float, int]],
    metrics: ReplicaMetrics,
    speed_up: float,
    sign: int,
) -> list[int]:
    """Return the number of replicas that each policy allows."""
    limits = []
    for policy in direction.policies:
        before = metrics.wanted - sum(n for t, n in changes if t > metrics.now - policy.periodSeconds / speed_up)
        if policy.type == "Pods":
            limits.append(before + sign * policy.value)
        else:
            share = before * (1 + sign * policy.value / 100)
            limits.append(math.ceil(share - _ROUNDING) if sign > 0 else math.floor(share + _ROUNDING))
    return limits


def _since(entries: Sequence[tuple[float, int]], start: float) -> tuple[tuple[float, int], ...]:
    return tuple(entry for entry in entries if entry[0] >= start)
