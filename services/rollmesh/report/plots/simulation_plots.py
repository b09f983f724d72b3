"""Plots of simulated arms: time per update, staleness, throughput, running calls, generators by policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.report.plots import style as s
from rollmesh.report.series import FloatArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GENERATORS = 40
"""Rows of the picture of generators: the first ones of a larger fleet."""
BEST_SHARE = 0.98
"""Share of the largest throughput from which on less staleness counts more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlottedArm:
    """Figures and samples of one simulated arm; times are virtual."""

    name: str
    update_seconds: Sequence[float]
    staleness: Mapping[int, int]
    """Trajectories by the staleness of their oldest token in the loss."""
    mean_staleness: float
    tokens_per_second: float
    """Tokens trained on."""
    time: FloatArray  # [moments], seconds
    versions: FloatArray  # [generators, moments], policy version served; -1 for none
    running: FloatArray  # [generators, moments], running calls
    slots: int
    """Slots of one generator."""


def best_arm(arms: Sequence[PlottedArm]) -> PlottedArm:
    """Return the arm with the least mean staleness among those with nearly the largest throughput."""
    largest = max(arm.tokens_per_second for arm in arms)
    fast = [arm for arm in arms if arm.tokens_per_second >= BEST_SHARE * largest]
    return min(fast, key=lambda arm: (arm.mean_staleness, -arm.tokens_per_second))


def update_seconds_plot(arms: Sequence[PlottedArm]) -> Figure:
    """Draw the time of every update by arm: dots, the middle eight tenths as a line, the median as a ring."""
    figure = s.new_figure(width=s.WIDE, height=_height(arms))
    (axes,) = s.panels(figure, (1,))
    for row, arm in enumerate(arms):
        seconds = np.array(arm.update_seconds)
        low, middle, high = np.quantile(seconds, (0.1, 0.5, 0.9))
        axes.plot(seconds, np.full(len(seconds), row), ".", color=s.BLUE, alpha=0.35, markeredgewidth=0)
        axes.plot([low, high], [row, row], color=s.BLUE)
        axes.plot([middle], [row], "o", color=s.ORANGE, markeredgecolor=s.SURFACE, markersize=7)
    axes.set_title("Time per update: every update, 10% to 90%, median")
    s.finish(axes, x="virtual seconds", y="")
    axes.set_xlim(left=0)
    _rows(axes, [arm.name for arm in arms])
    return figure


def staleness_plot(arms: Sequence[PlottedArm]) -> Figure:
    """Draw the share of trajectories by the staleness of their oldest token, one row of squares per arm."""
    figure = s.new_figure(width=s.WIDE, height=_height(arms))
    (axes,) = s.panels(figure, (1,))
    for row, arm in enumerate(arms):
        total = max(1, sum(arm.staleness.values()))
        for age, count in arm.staleness.items():
            share = count / total
            axes.barh(row, 0.96, left=age - 0.48, height=0.8, color=s.BLUE, alpha=0.08 + 0.92 * share)
            ink = s.SURFACE if share > 0.45 else s.INK
            axes.text(age, row, f"{share:.0%}", ha="center", va="center", fontsize=8, color=ink)
    axes.set_title("Trajectories by staleness")
    s.finish(axes, x="staleness of the oldest token in the loss, train steps", y="", integer_x=True)
    _rows(axes, [arm.name for arm in arms])
    return figure


def throughput_plot(arms: Sequence[PlottedArm], *, is_sweep: bool) -> Figure:
    """Draw tokens per second over staleness, with the best arm marked; the values of a sweep are joined by a line."""
    figure = s.new_figure(width=s.WIDE, height=4.2)
    (axes,) = s.panels(figure, (1,))
    ages = [arm.mean_staleness for arm in arms]
    rates = [arm.tokens_per_second for arm in arms]
    axes.plot(ages, rates, "o-" if is_sweep else "o", color=s.BLUE, clip_on=False, markersize=5)
    best = best_arm(arms)
    axes.plot([best.mean_staleness], [best.tokens_per_second], "o", color=s.ORANGE, markersize=9, clip_on=False)
    for arm in arms:
        # The values of one field differ in the value only.
        label = arm.name.rpartition("=")[2] if is_sweep else arm.name
        axes.annotate(
            f"{label} (best)" if arm is best else label,
            (arm.mean_staleness, arm.tokens_per_second),
            xytext=(0, 8 if arm is best else -13),
            textcoords="offset points",
            ha="center",
            fontsize=8,
            color=s.INK if arm is best else s.MUTED,
        )
    subject = arms[0].name.rpartition("=")[0] if is_sweep else "arm"
    axes.set_title(
        f"Throughput over staleness by {subject}; best: least staleness with {BEST_SHARE:.0%} of the largest"
    )
    s.finish(axes, x="mean staleness, train steps", y="trained tokens per second")
    axes.margins(x=0.12)
    axes.set_ylim(0, 1.12 * max(rates))
    s.thousands(axes.yaxis)
    return figure


def running_calls_plot(arm: PlottedArm) -> Figure:
    """Draw the running calls stacked by the policy version that decodes them."""
    figure = s.new_figure(width=s.WIDE, height=3.1)
    (axes,) = s.panels(figure, (1,))
    versions = _versions(arm)
    unit, label = _unit(arm.time)
    base = np.zeros(len(arm.time))
    for version, colour in zip(versions, s.version_colours(versions), strict=True):
        calls = np.where(arm.versions == version, arm.running, 0).sum(axis=0)
        axes.fill_between(arm.time / unit, base, base + calls, color=colour, linewidth=0, step="post")
        base = base + calls
    slots = arm.slots * (arm.versions >= 0).sum(axis=0)
    dashes = (0, (4, 3))
    axes.plot(
        arm.time / unit, slots, color=s.MUTED, linewidth=1.1, linestyle=dashes, drawstyle="steps-post", label="slots"
    )
    axes.set_title(f"Running calls by policy version: {arm.name}")
    s.finish(axes, x=label, y="running calls", zero=True)
    s.legend(axes)
    s.version_bar(figure, axes, versions)
    return figure


def generators_plot(arm: PlottedArm) -> Figure:
    """Draw a row per generator, coloured by the version it decodes with; pale while it has no running call."""
    count = min(len(arm.versions), MOST_GENERATORS)
    figure = s.new_figure(width=s.WIDE, height=1.2 + 0.16 * max(8, count))
    (axes,) = s.panels(figure, (1,))
    versions = _versions(arm)
    colours = dict(zip(versions, s.version_colours(versions), strict=True))
    unit, label = _unit(arm.time)
    for row in range(count):
        for version, is_busy, start, end in _spans(arm, row):
            colour = colours[version] if is_busy else s.GRID
            axes.broken_barh([(start / unit, (end - start) / unit)], (row - 0.42, 0.84), color=colour, linewidth=0)
    shown = f"the first {count} of {len(arm.versions)} generators" if count < len(arm.versions) else "the generators"
    axes.set_title(f"Policy version of {shown}: {arm.name}")
    s.finish(axes, x=label, y="generator")
    axes.set_ylim(count - 0.5, -0.5)
    s.version_bar(figure, axes, versions)
    return figure


def _spans(arm: PlottedArm, row: int) -> list[tuple[int, bool, float, float]]:
    """Return (version, whether calls run, start, end) of a generator; times without a policy are left out."""
    states = zip(arm.versions[row].astype(int).tolist(), (arm.running[row] > 0).tolist(), strict=True)
    spans, at = [], 0
    for (version, is_busy), moments in groupby(states):
        end = at + len(list(moments))
        until = min(end, len(arm.time) - 1)
        if version >= 0 and until > at:
            spans.append((version, is_busy, float(arm.time[at]), float(arm.time[until])))
        at = end
    return spans


def _versions(arm: PlottedArm) -> list[int]:
    return sorted(set(arm.versions[arm.versions >= 0].astype(int).tolist()))


def _unit(time: FloatArray) -> tuple[float, str]:
    """Return the seconds per unit of the axis, and its label."""
    for seconds, name in ((3600.0, "hours"), (60.0, "minutes")):
        if time[-1] > 3 * seconds:
            return seconds, f"virtual {name}"
    return 1.0, "virtual seconds"


def _height(arms: Sequence[PlottedArm]) -> float:
    return 1.3 + 0.3 * len(arms)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Label one row per arm, the first at the top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
