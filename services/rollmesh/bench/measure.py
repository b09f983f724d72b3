"""Measured figures, and the bars that they must reach."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self

_JSON_FIELDS = ("name", "value", "unit", "baseline", "baseline_value", "ratio")


class Figure(StrEnum):
    """Part of a measure that a bar limits."""

    RATIO = "ratio"
    VALUE = "value"


class Direction(StrEnum):
    """Required side of a figure relative to its bar."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """Requirement for a figure."""

    figure: Figure
    direction: Direction
    limit: float

    def __str__(self) -> str:
        """Return text like ``ratio >= 2.5``."""
        return f"{self.figure} {self.direction} {self.limit:,g}"

    def found_in(self, measure: Measure) -> float | None:
        """Return the figure of the measure that this bar limits."""
        return measure.ratio if self.figure is Figure.RATIO else measure.value

    def reached_by(self, measure: Measure) -> bool:
        """Return True if the figure is known and on the required side."""
        found = self.found_in(measure)
        if found is None:
            return False
        return found >= self.limit if self.direction is Direction.AT_LEAST else found <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Figure and, optionally, its baseline from the same run."""

    name: str
    value: float
    unit: str
    baseline: str | None = None
    """Name of the baseline."""
    baseline_value: float | None = None
    ratio: float | None = None
    """Quotient value / baseline_value: above 1 is better for a rate, below 1 for a cost."""
    bars: tuple[Bar, ...] = ()

    def figures(self) -> dict[str, str | float | None]:
        """Return the fields that ``--json`` prints: all but the bars."""
        return {name: getattr(self, name) for name in _JSON_FIELDS}

    def to_line(self) -> str:
        """Return all fields as a line of JSON, for ``from_line``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read a measure that another process wrote."""
        fields = json.loads(line)
        bars = tuple(
            Bar(figure=Figure(b["figure"]), direction=Direction(b["direction"]), limit=b["limit"])
            for b in fields.pop("bars")
        )
        return cls(**fields, bars=bars)


def compared(
    name: str, value: float, unit: str, baseline: str, baseline_value: float, bars: tuple[Bar, ...] = ()
) -> Measure:
    """Return a measure with its baseline and their ratio."""
    ratio = value / baseline_value if baseline_value else None
    return Measure(
        name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio, bars=bars
    )


def at_least(figure: Figure, limit: float) -> Bar:
    """Return a lower bound, for a rate."""
    return Bar(figure=figure, direction=Direction.AT_LEAST, limit=limit)


def at_most(figure: Figure, limit: float) -> Bar:
    """Return an upper bound, for a cost or a count."""
    return Bar(figure=figure, direction=Direction.AT_MOST, limit=limit)


def missed(measures: Iterable[Measure]) -> list[str]:
    """Return a line for each bar that a measure misses, with the measured value."""
    return [
        f"{measure.name}: {bar.figure} {_shown(bar.found_in(measure))}, the bar is {bar.direction} {bar.limit:,g}"
        for measure in measures
        for bar in measure.bars
        if not bar.reached_by(measure)
    ]


def _shown(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"
