"""Autoscaling rule of a service: the schema of the chart's ``files/autoscaling``."""

import re
from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from rollmesh.config.section import Section

_DURATION = re.compile(r"^(\d+)([smh])$")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class Signal(Section):
    """One Prometheus query that proposes a number of replicas."""

    name: str
    metricType: Literal["Value", "AverageValue"]
    """Value: ceil(ready * value / target); AverageValue: ceil(value / target)."""
    target: float
    """Value at which the number of replicas does not change."""
    query: str
    """PromQL query that returns one number; the reader substitutes ``$selector`` and ``$window``."""


class ScalingPolicy(Section):
    """Maximum change of the replicas within a period, as a number or in percent of those at its start."""

    type: Literal["Pods", "Percent"]
    value: int
    periodSeconds: int


class ScalingDirection(Section):
    """Rules of one direction: the most cautious proposal of the window counts, and the policy of most change."""

    stabilizationWindowSeconds: int
    selectPolicy: Literal["Max"]
    policies: list[ScalingPolicy]


class ScalingBehavior(Section):
    """Rules of both directions."""

    scaleUp: ScalingDirection
    scaleDown: ScalingDirection


class AutoscalingRule(Section):
    """Autoscaling rule of one service: the largest proposal of its signals counts.

    Field names are those of Kubernetes' autoscaling/v2; ``window`` is the time range of the queries, for example 5m.
    """

    service: Literal["generator", "reward", "rollout", "teacher"]
    minReplicas: int
    maxReplicas: int
    window: str = Field(pattern=_DURATION.pattern)
    signals: list[Signal]
    behavior: ScalingBehavior

    def query(self, signal: Signal, selector: str, speed_up: float = 1.0) -> str:
        """Return a signal's query for one run; ``speed_up`` shortens the window."""
        number, unit = _DURATION.findall(self.window)[0]
        window = max(1000, round(1000 * int(number) * _SECONDS[unit] / speed_up))
        return signal.query.replace("$window", f"{window}ms").replace("$selector", selector)


def load_rule(file: Path) -> AutoscalingRule:
    """Read a rule file."""
    return AutoscalingRule.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
