"""Result of a run that has ended, and its resolved run file."""

from __future__ import annotations

from typing import Literal

from rollmesh.gateway.models.api_model import ApiModel


class ResultLine(ApiModel):
    """One fact about an ended run."""

    name: str
    """Name: state, reward of the last step, audit, ..."""
    value: str
    """Value with its unit."""


class RunResultView(ApiModel):
    """Result of a run that has ended, read from its run folder."""

    time: float | None
    """Time of the newest record of the run; null without any."""
    lines: list[ResultLine]
    """Facts, the state first."""
    report: bool
    """True if ``/report.html`` is served."""


class RunSettings(ApiModel):
    """Resolved run file without its secrets."""

    yaml: str
    """Text of the run file."""


class EndEvent(ApiModel):
    """Data of an ``end`` event: the last one, before the gateway shuts down."""

    time: float
    """Time of the shutdown."""
    by: Literal["launcher", "signal"]
    """launcher: the launcher that started this gateway stops the run; signal: only this gateway is stopped."""
