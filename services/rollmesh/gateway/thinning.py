"""Curves of any length in bounded memory: neighboring points are merged when there are too many."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

MOST_POINTS = 4096


@dataclass(slots=True)
class Point:
    """Aggregate of the values in one range of x."""

    first: float
    last: float
    total: float
    low: float
    high: float
    count: int = 1

    def merged(self, other: Point) -> Point:
        """Return both ranges merged; ``other`` is the later one."""
        return Point(
            first=self.first,
            last=other.last,
            total=self.total + other.total,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            count=self.count + other.count,
        )

    @property
    def x(self) -> float:
        """Middle of the range."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.count


@dataclass(slots=True)
class Curve:
    """Points by ascending x, each with about the same number of values."""

    most_points: int = MOST_POINTS
    _points: list[Point] = field(default_factory=list)
    _values_per_point: int = 1

    def __len__(self) -> int:
        return len(self._points)

    def add(self, x: float, value: float) -> None:
        """Add a value.

        If ``x`` is not beyond the last x, the values from ``x`` on are replaced: a restarted trainer repeats steps.
        """
        if self._points and x <= self._points[-1].last:
            self.remove_from(x)
        point = Point(first=x, last=x, total=value, low=value, high=value)
        if self._points and self._points[-1].count < self._values_per_point:
            self._points[-1] = self._points[-1].merged(point)
            return
        self._points.append(point)
        if len(self._points) > self.most_points:
            self._values_per_point *= 2
            self._points = _merged(self._points, 2)

    def points(self, most: int) -> list[Point]:
        """Return at most ``most`` points over the whole curve."""
        return _merged(self._points, -(-len(self._points) // most)) if len(self._points) > most else list(self._points)

    def remove_from(self, x: float) -> None:
        """Remove the values at ``x`` and beyond, and the values merged with them."""
        self._points = self._points[: bisect_left([point.last for point in self._points], x)]


def _merged(points: Sequence[Point], size: int) -> list[Point]:
    """Merge every ``size`` neighbors into one point."""
    return [reduce(Point.merged, points[at : at + size]) for at in range(0, len(points), size)]
