"""Plots of the mesh: staleness, throughput, rollouts in flight by policy version, queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.report.plots import style as s
from rollmesh.report.series import FloatArray, TimelineSeries, TrainSeries, binned, broken, rate, smoothed
from rollmesh.report.version_lives import VersionLife

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MINUTES_AFTER_SECONDS = 180.0


def staleness_plot(train: TrainSeries, max_staleness: int | None) -> Figure:
    """Draw staleness per step, and its histogram over the run."""
    figure = s.new_figure()
    over_time, histogram = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.9, 1]})
    step, largest = train["train_step"], train["batch.trajectory_staleness.max"]
    over_time.plot(step, largest, color=s.GREY, drawstyle="steps-mid", label="largest")
    over_time.plot(step, train["staleness_mean"], color=s.BLUE, label="mean")
    if max_staleness is not None:
        over_time.axhline(max_staleness, color=s.RED, linewidth=1.2, linestyle=(0, (4, 3)), label="bound")
    over_time.set_title("Staleness")
    s.finish(over_time, x="train step", y="train steps", zero=True, integer_x=True)
    s.legend(over_time)
    total = sum(train.staleness_counts.values())
    if total:
        values = list(train.staleness_counts)
        histogram.bar(values, [c / total for c in train.staleness_counts.values()], width=0.72, color=s.BLUE)
    s.finish(histogram, x="staleness, train steps", y="trajectories", integer_x=True)
    s.percent_axis(histogram, top=None)
    return figure


def throughput_plot(train: TrainSeries, timeline: TimelineSeries) -> Figure:
    """Draw generated and trained tokens per second."""
    figure = s.new_figure()
    (axes,) = s.panels(figure, (1,))
    start, unit, label = _clock(timeline.time, train["time"])
    total = np.cumsum(np.nan_to_num(train["batch.trained_tokens"]))
    lines = {
        "generated": (s.BLUE, binned(timeline.time, timeline.generated_tokens, limit=120), timeline.pauses),
        "trained": (s.ORANGE, (train["time"], total), train.pauses),
    }
    for name, (colour, (time, tokens), pauses) in lines.items():
        moments, per_second = rate(*broken(time, tokens, pauses))
        shown = np.where(np.isnan(per_second), np.nan, smoothed(per_second, 5))
        axes.plot((moments - start) / unit, shown, color=colour, label=name)
    axes.set_title("Throughput")
    s.finish(axes, x=label, y="tokens per second", zero=True)
    s.thousands(axes.yaxis)
    s.legend(axes)
    return figure


def versions_plot(lives: Sequence[VersionLife]) -> Figure:
    """Draw the seconds until each version is announced and served."""
    figure = s.new_figure()
    (axes,) = s.panels(figure, (1,))
    version = [life.policy_version for life in lives]
    lines = {
        "served by the last generator": (s.GREY, [life.last_served for life in lives]),
        "served by the first generator": (s.BLUE, [life.first_served for life in lives]),
        "announced": (s.ORANGE, [life.announced for life in lives]),
    }
    for label, (colour, seconds) in lines.items():
        axes.plot(version, np.array(seconds, np.float64), color=colour, marker=".", label=label)
    axes.set_title("Life of a version")
    s.finish(axes, x="policy version", y="seconds", zero=True, integer_x=True)
    s.legend(axes)
    return figure


def in_flight_plot(timeline: TimelineSeries) -> Figure:
    """Draw running calls stacked by policy version, with a colour ramp from old to new."""
    figure = s.new_figure(width=s.WIDE, height=3.1)
    (axes,) = s.panels(figure, (1,))
    start, unit, label = _clock(timeline.time)
    time, running = _binned(timeline, timeline.running)
    _, slots = _binned(timeline, timeline.slots)
    clock = (time - start) / unit
    base = np.zeros(len(clock))
    for row, colour in zip(running, s.version_colours(timeline.versions), strict=True):
        # Draw only the range with running calls (and one moment around it), to limit the file size of long runs.
        visible = np.convolve(row > 0, np.ones(3), "same") > 0
        axes.fill_between(clock, base, base + row, where=visible, color=colour, linewidth=0, interpolate=False)
        base = base + row
    if len(clock):
        axes.plot(
            clock, slots, color=s.MUTED, linewidth=1.1, linestyle=(0, (4, 3)), label="slots of serving generators"
        )
    axes.set_title("Rollouts in flight by policy version")
    s.finish(axes, x=label, y="running calls", zero=True)
    s.legend(axes)
    if timeline.versions:
        s.version_bar(figure, axes, timeline.versions)
    return figure


def queue_plot(timeline: TimelineSeries) -> Figure:
    """Draw trajectories stacked by state, and the open and ready groups."""
    figure = s.new_figure(width=s.WIDE, height=3.9)
    trajectories, groups = s.panels(figure, (1.7, 1))
    start, unit, label = _clock(timeline.time)
    states = (
        ("leased", "leased", s.BLUE),
        ("finished", "waiting for reward", s.GREEN),
        ("partial", "partial", s.ORANGE),
        ("resting", "resting", s.PURPLE),
        ("pending", "pending", s.GREY),
    )
    clock = (_binned(timeline, timeline.time)[0] - start) / unit
    base = np.zeros(len(clock))
    for state, name, colour in states:
        if state == "resting" and not np.nansum(timeline.queue[state]):
            continue  # most runs have none, and older ones have no such column
        upper = base + _binned(timeline, timeline.queue[state])[1]
        trajectories.fill_between(clock, base, upper, color=colour, alpha=0.85, linewidth=0, label=name)
        base = upper
    trajectories.set_title("Trajectory queue")
    s.finish(trajectories, x="", y="trajectories", zero=True)
    s.legend(trajectories)
    for name, colour in (("open", s.BLUE), ("ready", s.PURPLE)):
        groups.plot(
            clock, _binned(timeline, timeline.groups[f"{name}_groups"])[1], color=colour, linewidth=1.4, label=name
        )
    s.finish(groups, x=label, y="groups", zero=True)
    s.legend(groups)
    return figure


def _binned(timeline: TimelineSeries, values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return at most some hundred moments and means, and NaN where the run paused."""
    return broken(*binned(timeline.time, np.nan_to_num(values)), timeline.pauses)


def _clock(*times: FloatArray) -> tuple[float, float, str]:
    """Choose (first moment, seconds per unit, axis label) for the length of the run."""
    known = np.concatenate([t[~np.isnan(t)] for t in times])
    if len(known) == 0:
        return 0.0, 1.0, "seconds"
    start, span = float(known.min()), float(known.max() - known.min())
    if span > 100 * MINUTES_AFTER_SECONDS:
        return start, 3600.0, "hours since the start"
    if span > MINUTES_AFTER_SECONDS:
        return start, 60.0, "minutes since the start"
    return start, 1.0, "seconds since the start"
