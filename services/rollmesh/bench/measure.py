"""One measured figure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """A figure and, where there is one, the baseline measured in the same run."""

    name: str
    value: float
    unit: str
    baseline: str | None = None
    """What it is compared with."""
    baseline_value: float | None = None
    ratio: float | None = None
    """value / baseline_value: above 1 is better for a rate, below 1 for a cost."""


def compared(name: str, value: float, unit: str, baseline: str, baseline_value: float) -> Measure:
    """A figure beside its baseline."""
    ratio = value / baseline_value if baseline_value else None
    return Measure(name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio)
