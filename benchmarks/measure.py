"""Measured figures, and the bars that they must reach."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal, Self

FigureName = Literal["ratio", "value"]


@dataclass(frozen=True, slots=True)
class Bar:
    """Requirement for a figure of a measure."""

    figure: FigureName
    direction: Literal[">=", "<="]
    limit: float

    def __str__(self) -> str:
        """Return text like ``ratio >= 2.5``."""
        return f"{self.figure} {self.direction} {self.limit:,g}"

    def found_in(self, measure: Measure) -> float | None:
        """Return the figure of the measure that this bar limits."""
        return measure.ratio if self.figure == "ratio" else measure.value

    def reached_by(self, measure: Measure) -> bool:
        """Return True if the figure is known and on the required side."""
        found = self.found_in(measure)
        if found is None:
            return False
        return found >= self.limit if self.direction == ">=" else found <= self.limit


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
        return {name: value for name, value in asdict(self).items() if name != "bars"}

    def to_line(self) -> str:
        """Return all fields as a line of JSON, for ``from_line``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Self:
        """Read a measure that another process wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "bars": tuple(Bar(**bar) for bar in fields["bars"])})


def compared(
    name: str, value: float, unit: str, baseline: str, baseline_value: float, bars: tuple[Bar, ...] = ()
) -> Measure:
    """Return a measure with its baseline and their ratio."""
    ratio = value / baseline_value if baseline_value else None
    return Measure(
        name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio, bars=bars
    )


def at_least(figure: FigureName, limit: float) -> Bar:
    """Return a lower bound, for a rate."""
    return Bar(figure, ">=", limit)


def at_most(figure: FigureName, limit: float) -> Bar:
    """Return an upper bound, for a cost or a count."""
    return Bar(figure, "<=", limit)


NONE = (at_most("value", 0.0),)
"""Bars of a count that must be 0."""


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


def interleaved(work: Mapping[str, Callable[[], object]], repetitions: int, *, warm_up: int = 1) -> dict[str, float]:
    """Return the median process CPU seconds of each function; all run in turn.

    The first ``warm_up`` rounds are not measured.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(warm_up + repetitions):
        for name, function in work.items():
            start = time.process_time()
            function()
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(values[warm_up:]) for name, values in taken.items()}
