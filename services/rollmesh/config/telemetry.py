"""Telemetry section: logs, traces and trackers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rollmesh.config.section import Section


class TelemetryConfig(Section):
    """Logs, traces and trackers."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of written lines."""
    log_format: Literal["console", "json"] = "json"
    """Format of the service logs."""
    otlp_endpoint: str | None = Field(default=None, pattern=r"^https?://[^\s/]+")
    """Address of an OpenTelemetry collector (OTLP over HTTP), for example http://collector:4318; null disables tracing.
    Requires the extra ``tracing``."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of trajectories and train steps that are traced; every service samples the same ones."""
    trackers: list[Literal["tensorboard", "wandb"]] = Field(default_factory=list)
    """Trackers in addition to metrics.jsonl (extras of the same name)."""
    tracker_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the trackers, for example {"wandb": {"project": "mine"}}."""
