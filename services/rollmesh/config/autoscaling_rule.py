"""The rule by which a service is scaled: the file that the chart's autoscalers and ``rollmesh autoscale`` share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from rollmesh.config.replica_bounds import MOST_REPLICAS, SCALABLE
from rollmesh.config.section import Section
from rollmesh.config.yaml_text import parse_yaml
from rollmesh.errors import ConfigError

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
    """Value at which things may stay as they are."""
    query: str = Field(min_length=1)
    """PromQL with one number as its answer; ``$selector`` and ``$window`` are put in by the reader."""

    @model_validator(mode="after")
    def _placeholders_are_known(self) -> Self:
        unknown = sorted(set(_PLACEHOLDER.findall(self.query)) - {"selector", "window"})
        if unknown:
            raise ValueError(f"query: ${unknown[0]} is no placeholder: expected $selector or $window")
        return self


class ScalingPolicy(Section):
    """How much may change within a period."""

    type: Literal["Pods", "Percent"]
    """Replicas, or percent of what there was when the period began."""
    value: int = Field(ge=1)
    """Their number."""
    periodSeconds: int = Field(ge=1, le=1800)
    """The period."""


class ScalingDirection(Section):
    """Rules of one direction, as in autoscaling/v2."""

    stabilizationWindowSeconds: int = Field(ge=0, le=3600)
    """The most cautious proposal of so many seconds counts."""
    selectPolicy: Literal["Max", "Min", "Disabled"] = "Max"
    """Which policy counts: the one that allows the largest change, or the smallest."""
    policies: list[ScalingPolicy] = Field(min_length=1)
    """Limits of the change."""


class ScalingBehavior(Section):
    """Both directions."""

    scaleUp: ScalingDirection
    """More replicas."""
    scaleDown: ScalingDirection
    """Fewer replicas."""


class AutoscalingRule(Section):
    """When replicas of one service come and go. Field names are those of Kubernetes' autoscaling/v2."""

    service: Literal["generator", "reward", "rollout"]
    """What is scaled."""
    minReplicas: int = Field(ge=1, le=MOST_REPLICAS)
    """Never fewer."""
    maxReplicas: int = Field(ge=1, le=MOST_REPLICAS)
    """Never more."""
    window: str = Field(pattern=_DURATION.pattern)
    """Span over which the queries look, for example 5m."""
    signals: list[Signal] = Field(min_length=1)
    """The largest proposal wins."""
    behavior: ScalingBehavior
    """How fast."""

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.minReplicas > self.maxReplicas:
            raise ValueError(f"minReplicas={self.minReplicas} is above maxReplicas={self.maxReplicas}")
        names = [signal.name for signal in self.signals]
        if len(set(names)) < len(names):
            raise ValueError(f"signals: names must differ, got {', '.join(names)}")
        return self

    @property
    def window_seconds(self) -> int:
        """The window in seconds."""
        number, unit = _DURATION.findall(self.window)[0]
        return int(number) * _SECONDS[unit]

    def query(self, signal: Signal, selector: str, speed_up: float = 1.0) -> str:
        """A signal's query for one run; ``speed_up`` shortens the window."""
        window = max(1000, round(1000 * self.window_seconds / speed_up))
        return signal.query.replace("$window", f"{window}ms").replace("$selector", selector)


def load_rule(file: Path) -> AutoscalingRule:
    """Read a rule; ConfigError names the file, the field and what is wrong with it."""
    try:
        data: Any = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping with service (one of {', '.join(SCALABLE)}) and signals")
    try:
        return AutoscalingRule.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "rule"
        raise ConfigError(f"{file}: {where}: {first['msg']}") from error
