"""Autoscaling rule of a service: the schema of the chart's ``files/autoscaling``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, Self

import yaml
from pydantic import Field, model_validator

from rollmesh.config.replica_bounds import MOST_REPLICAS
from rollmesh.config.section import Section

_PLACEHOLDER = re.compile(r"\$(\w+)")
_DURATION = re.compile(r"^(\d+)([smh])$")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


class Signal(Section):
    """One Prometheus query that proposes a number of replicas."""

    name: str = Field(pattern=r"^[a-z][a-z0-9-]*$")
    """Name within the rule."""
    metricType: Literal["Value", "AverageValue"]
    """Value: ceil(ready * value / target); AverageValue: ceil(value / target)."""
    target: float = Field(gt=0)
    """Value at which the number of replicas does not change."""
    query: str = Field(min_length=1)
    """PromQL query that returns one number; the reader substitutes ``$selector`` and ``$window``."""

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> Self:
        unknown = sorted(set(_PLACEHOLDER.findall(self.query)) - {"selector", "window"})
        if unknown:
            raise ValueError(f"query: ${unknown[0]} is not a placeholder: expected $selector or $window")
        return self


class ScalingPolicy(Section):
    """Maximum change of the replicas within a period, as a number or in percent of those at its start."""

    type: Literal["Pods", "Percent"]
    value: int = Field(ge=1)
    periodSeconds: int = Field(ge=1, le=1800)


class ScalingDirection(Section):
    """Rules of one direction: the most cautious proposal of the window counts, and Max the policy of most change."""

    stabilizationWindowSeconds: int = Field(ge=0, le=3600)
    selectPolicy: Literal["Max", "Min", "Disabled"] = "Max"
    policies: list[ScalingPolicy] = Field(min_length=1)


class ScalingBehavior(Section):
    """Rules of both directions."""

    scaleUp: ScalingDirection
    scaleDown: ScalingDirection


class AutoscalingRule(Section):
    """Autoscaling rule of one service: the largest proposal of its signals counts.

    Field names are those of Kubernetes' autoscaling/v2; ``window`` is the time range of the queries, for example 5m.
    """

    service: Literal["generator", "reward", "rollout", "teacher"]
    minReplicas: int = Field(ge=1, le=MOST_REPLICAS)
    maxReplicas: int = Field(ge=1, le=MOST_REPLICAS)
    window: str = Field(pattern=_DURATION.pattern)
    signals: list[Signal] = Field(min_length=1)
    behavior: ScalingBehavior

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.minReplicas > self.maxReplicas:
            raise ValueError(f"minReplicas={self.minReplicas} is above maxReplicas={self.maxReplicas}")
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals: names must differ, got {', '.join(names)}")
        return self

    def query(self, signal: Signal, selector: str, speed_up: float = 1.0) -> str:
        """Return a signal's query for one run; ``speed_up`` shortens the window."""
        number, unit = _DURATION.findall(self.window)[0]
        window = max(1000, round(1000 * int(number) * _SECONDS[unit] / speed_up))
        return signal.query.replace("$window", f"{window}ms").replace("$selector", selector)


def load_rule(file: Path) -> AutoscalingRule:
    """Read a rule file."""
    return AutoscalingRule.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
