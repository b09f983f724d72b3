"""Number of replicas by an autoscaling rule: the algorithm of a HorizontalPodAutoscaler (autoscaling/v2), pure.

Tests check the chart's rule with it, without Kubernetes. The documented parts of the algorithm are implemented:
one proposal per metric with a tolerance of 10%, the largest wins; no scale-down while a metric is missing;
stabilization windows (the most cautious proposal of the window counts); policies that limit the change within a
period; bounds.
"""

from __future__ import annotations

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
    """Input of the autoscaler at one moment."""

    now: float
    """Seconds of a monotonic clock."""
    wanted: int
    """Replicas requested at present."""
    ready: int
    """Ready replicas."""
    values: Mapping[str, float | None]
    """Values by signal; None without data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """State of the autoscaler between two evaluations of the rule."""

    proposals: tuple[tuple[float, int], ...] = ()
    """(time, proposed replicas) within the longest window."""
    changes: tuple[tuple[float, int], ...] = ()
    """(time, added replicas) within the longest period; negative for removed ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDecision:
    """Result of one evaluation of the rule."""

    replicas: int
    memory: ReplicaMemory
    reason: str
    """Explanation for the log."""


def next_replicas(
    rule: AutoscalingRule, memory: ReplicaMemory, metrics: ReplicaMetrics, speed_up: float = 1.0
) -> ReplicaDecision:
    """Compute the replicas to request now and the next state; ``speed_up`` divides all times of the rule."""
    if metrics.wanted == 0:
        return ReplicaDecision(
            replicas=0, memory=ReplicaMemory(), reason="scaled to zero by an operator: autoscaling is off"
        )
    proposal, reason = propose(rule, metrics)
    # The first evaluation proposes the current number: nothing changes before a window has passed.
    proposals = memory.proposals or ((metrics.now, metrics.wanted),)
    proposals = (*proposals, (metrics.now, proposal))
    steady = _stabilised(rule, proposals, metrics, speed_up)
    replicas = _limited(rule, memory.changes, steady, metrics, speed_up)
    if replicas != proposal:
        reason += f"; {replicas} for now"
    changes = (
        memory.changes if replicas == metrics.wanted else (*memory.changes, (metrics.now, replicas - metrics.wanted))
    )
    return ReplicaDecision(
        replicas=replicas,
        memory=ReplicaMemory(
            proposals=_since(proposals, metrics.now - _longest_window(rule) / speed_up),
            changes=_since(changes, metrics.now - _longest_period(rule) / speed_up),
        ),
        reason=reason,
    )


def propose(rule: AutoscalingRule, metrics: ReplicaMetrics) -> tuple[int, str]:
    """Return the largest proposal of the signals within the bounds, and an explanation."""
    known = {s.name: v for s in rule.signals if (v := metrics.values.get(s.name)) is not None and math.isfinite(v)}
    missing = [s.name for s in rule.signals if s.name not in known]
    if not known:
        return metrics.wanted, f"{metrics.wanted}: no signal has data"
    if not metrics.ready:
        return metrics.wanted, f"{metrics.wanted}: no replica is ready yet"
    proposals = {s.name: _proposal(s, known[s.name], metrics) for s in rule.signals if s.name in known}
    winner = max(proposals, key=lambda name: proposals[name])
    replicas = min(max(proposals[winner], rule.minReplicas), rule.maxReplicas)
    words = ", ".join(f"{name} {known[name]:.2f} -> {proposals[name]}" for name in proposals)
    if missing and replicas < metrics.wanted:
        return metrics.wanted, f"{metrics.wanted}: {words}, but no scale-down while {', '.join(missing)} has no data"
    return replicas, f"{replicas}: {words}"


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
    """Apply the policies of the direction; bounds changed by an operator take effect at once."""
    if not rule.minReplicas <= metrics.wanted <= rule.maxReplicas:
        return min(max(metrics.wanted, rule.minReplicas), rule.maxReplicas)
    if steady > metrics.wanted:
        limits = _limits(rule.behavior.scaleUp, changes, metrics, speed_up, sign=1)
        best = max(limits) if rule.behavior.scaleUp.selectPolicy == "Max" else min(limits, default=metrics.wanted)
        return max(metrics.wanted, min(steady, best))
    if steady < metrics.wanted:
        limits = _limits(rule.behavior.scaleDown, changes, metrics, speed_up, sign=-1)
        best = min(limits) if rule.behavior.scaleDown.selectPolicy == "Max" else max(limits, default=metrics.wanted)
        return min(metrics.wanted, max(steady, best))
    return steady


def _limits(
    direction: ScalingDirection,
    changes: Sequence[tuple[float, int]],
    metrics: ReplicaMetrics,
    speed_up: float,
    sign: int,
) -> list[int]:
    """Return the number of replicas that each policy allows."""
    if direction.selectPolicy == "Disabled":
        return [metrics.wanted]
    limits = []
    for policy in direction.policies:
        before = metrics.wanted - sum(n for t, n in changes if t > metrics.now - policy.periodSeconds / speed_up)
        if policy.type == "Pods":
            limits.append(before + sign * policy.value)
        else:
            share = before * (1 + sign * policy.value / 100)
            limits.append(math.ceil(share - _ROUNDING) if sign > 0 else math.floor(share + _ROUNDING))
    return limits


def _longest_window(rule: AutoscalingRule) -> int:
    return max(d.stabilizationWindowSeconds for d in (rule.behavior.scaleUp, rule.behavior.scaleDown))


def _longest_period(rule: AutoscalingRule) -> int:
    return max(p.periodSeconds for d in (rule.behavior.scaleUp, rule.behavior.scaleDown) for p in d.policies)


def _since(entries: Sequence[tuple[float, int]], start: float) -> tuple[tuple[float, int], ...]:
    return tuple(entry for entry in entries if entry[0] >= start)
