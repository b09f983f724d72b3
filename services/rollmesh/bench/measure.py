"""One measured figure, and the bar that it has to reach."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Self

_JSON_FIELDS = ("name", "value", "unit", "baseline", "baseline_value", "ratio")


class Figure(StrEnum):
    """What of a measure a bar is about."""

    RATIO = "ratio"
    VALUE = "value"


class Direction(StrEnum):
    """On which side of its bar a figure has to be."""

    AT_LEAST = ">="
    AT_MOST = "<="


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What we ask of a figure."""

    figure: Figure
    direction: Direction
    limit: float

    def __str__(self) -> str:
        """``ratio >= 2.5``."""
        return f"{self.figure} {self.direction} {self.limit:,g}"

    def found_in(self, measure: Measure) -> float | None:
        """The figure of the measure that this is about."""
        return measure.ratio if self.figure is Figure.RATIO else measure.value

    def reached_by(self, measure: Measure) -> bool:
        """Whether the figure is known and not on the wrong side."""
        found = self.found_in(measure)
        if found is None:
            return False
        return found >= self.limit if self.direction is Direction.AT_LEAST else found <= self.limit


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
    bars: tuple[Bar, ...] = ()

    def figures(self) -> dict[str, str | float | None]:
        """What ``--json`` prints: everything but the bars."""
        return {name: getattr(self, name) for name in _JSON_FIELDS}

    def to_line(self) -> str:
        """All of it as a line of JSON, for ``from_line``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """The measure that another process wrote."""
        fields = json.loads(line)
        bars = tuple(
            Bar(figure=Figure(b["figure"]), direction=Direction(b["direction"]), limit=b["limit"])
            for b in fields.pop("bars")
        )
        return cls(**fields, bars=bars)


def compared(
    name: str, value: float, unit: str, baseline: str, baseline_value: float, bars: tuple[Bar, ...] = ()
) -> Measure:
    """A figure beside its baseline."""
    ratio = value / baseline_value if baseline_value else None
    return Measure(
        name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio, bars=bars
    )


def at_least(figure: Figure, limit: float) -> Bar:
    """The bar of a rate."""
    return Bar(figure=figure, direction=Direction.AT_LEAST, limit=limit)


def at_most(figure: Figure, limit: float) -> Bar:
    """The bar of a cost or a count."""
    return Bar(figure=figure, direction=Direction.AT_MOST, limit=limit)


def missed(measures: Iterable[Measure]) -> list[str]:
    """A line for each bar that a measure does not reach, with what it showed."""
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
