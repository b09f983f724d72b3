"""How many replicas a rule wants: what a HorizontalPodAutoscaler (autoscaling/v2) computes, as a pure function.

So that the rule which the chart hands to Kubernetes can be run, tested and watched on one machine. Followed are the
documented parts of the algorithm: one proposal per metric with a tolerance of 10%, the largest wins; no scale-down
while a metric is missing; stabilization windows (the most cautious proposal of the window counts); policies that limit
the change within a period; bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollmesh.config.autoscaling_rule import AutoscalingRule, ScalingDirection, Signal
from rollmesh.config.replica_bounds import MOST_REPLICAS

_TOLERANCE = 0.1
_ROUNDING = 1e-9
"""A ratio of floats that means a whole number shall not be rounded up to the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMetrics:
    """What the autoscaler sees at one moment."""

    now: float
    """Seconds; any clock that does not jump."""
    wanted: int
    """Replicas asked for at present."""
    ready: int
    """Replicas that work."""
    values: Mapping[str, float | None]
    """Answers by signal; None where there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """What the autoscaler remembers between looks."""

    proposals: tuple[tuple[float, int], ...] = ()
    """(when, replicas proposed), as far back as a window reaches."""
    changes: tuple[tuple[float, int], ...] = ()
    """(when, replicas added), as far back as a period reaches; negative ones were taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaVerdict:
    """The end of one look."""

    replicas: int
    memory: ReplicaMemory
    why: str
    """In words, for the log."""


def next_replicas(
    rule: AutoscalingRule, memory: ReplicaMemory, look: ReplicaMetrics, speed_up: float = 1.0
) -> ReplicaVerdict:
    """Replicas to ask for now, and what to remember. ``speed_up`` divides all times of the rule."""
    if look.wanted == 0:
        return ReplicaVerdict(replicas=0, memory=ReplicaMemory(), why="scaled to zero by a person: autoscaling rests")
    proposal, why = propose(rule, look)
    # The first look proposes what there is: nothing changes before a window has been seen.
    proposals = memory.proposals or ((look.now, look.wanted),)
    proposals = (*proposals, (look.now, proposal))
    steady = _stabilised(rule, proposals, look, speed_up)
    replicas = _limited(rule, memory.changes, steady, look, speed_up)
    if replicas != proposal:
        why += f"; {replicas} for now"
    changes = memory.changes if replicas == look.wanted else (*memory.changes, (look.now, replicas - look.wanted))
    return ReplicaVerdict(
        replicas=replicas,
        memory=ReplicaMemory(
            proposals=_since(proposals, look.now - _longest_window(rule) / speed_up),
            changes=_since(changes, look.now - _longest_period(rule) / speed_up),
        ),
        why=why,
    )


def propose(rule: AutoscalingRule, look: ReplicaMetrics) -> tuple[int, str]:
    """The largest proposal of the signals within the bounds, and whose it is."""
    known = {s.name: v for s in rule.signals if (v := look.values.get(s.name)) is not None and math.isfinite(v)}
    missing = [s.name for s in rule.signals if s.name not in known]
    if not known:
        return look.wanted, f"{look.wanted}: no signal has data"
    if not look.ready:
        return look.wanted, f"{look.wanted}: no replica works yet"
    proposals = {s.name: _proposal(s, known[s.name], look) for s in rule.signals if s.name in known}
    winner = max(proposals, key=lambda name: proposals[name])
    replicas = min(max(proposals[winner], rule.minReplicas), rule.maxReplicas)
    words = ", ".join(f"{name} {known[name]:.2f} -> {proposals[name]}" for name in proposals)
    if missing and replicas < look.wanted:
        return look.wanted, f"{look.wanted}: {words}, but none leave while {', '.join(missing)} has no data"
    return replicas, f"{replicas}: {words}"


def _proposal(signal: Signal, value: float, look: ReplicaMetrics) -> int:
    per_replica = signal.target * (look.ready if signal.metricType == "AverageValue" else 1)
    ratio = value / per_replica
    if abs(ratio - 1) <= _TOLERANCE:
        return look.wanted
    # Bounded before it is made whole: a value beyond all measure must not overflow.
    return math.ceil(min(ratio * look.ready, float(MOST_REPLICAS)) - _ROUNDING)


def _stabilised(
    rule: AutoscalingRule, proposals: Sequence[tuple[float, int]], look: ReplicaMetrics, speed_up: float
) -> int:
    """Go up only as far as every proposal of the window went, down only as far as every one of the longer window."""
    up = [n for t, n in proposals if t >= look.now - rule.behavior.scaleUp.stabilizationWindowSeconds / speed_up]
    down = [n for t, n in proposals if t >= look.now - rule.behavior.scaleDown.stabilizationWindowSeconds / speed_up]
    return min(max(look.wanted, min(up)), max(down))


def _limited(
    rule: AutoscalingRule, changes: Sequence[tuple[float, int]], steady: int, look: ReplicaMetrics, speed_up: float
) -> int:
    """What the policies of the direction allow; bounds that a person has moved hold at once."""
    if not rule.minReplicas <= look.wanted <= rule.maxReplicas:
        return min(max(look.wanted, rule.minReplicas), rule.maxReplicas)
    if steady > look.wanted:
        limits = _limits(rule.behavior.scaleUp, changes, look, speed_up, sign=1)
        best = max(limits) if rule.behavior.scaleUp.selectPolicy == "Max" else min(limits, default=look.wanted)
        return max(look.wanted, min(steady, best))
    if steady < look.wanted:
        limits = _limits(rule.behavior.scaleDown, changes, look, speed_up, sign=-1)
        best = min(limits) if rule.behavior.scaleDown.selectPolicy == "Max" else max(limits, default=look.wanted)
        return min(look.wanted, max(steady, best))
    return steady


def _limits(
    direction: ScalingDirection, changes: Sequence[tuple[float, int]], look: ReplicaMetrics, speed_up: float, sign: int
) -> list[int]:
    """Replicas that each policy allows to reach."""
    if direction.selectPolicy == "Disabled":
        return [look.wanted]
    limits = []
    for policy in direction.policies:
        before = look.wanted - sum(n for t, n in changes if t > look.now - policy.periodSeconds / speed_up)
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
