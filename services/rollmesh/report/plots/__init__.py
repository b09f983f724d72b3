"""Plots of a run; matplotlib is imported with the first drawn plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.report.plots import learning_plots, mesh_plots, style
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import evaluation_points, timeline_series, train_series
from rollmesh.report.version_lives import version_lives

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_CAPTIONS = {
    "in_flight": "Running calls of the generators by policy version.",
    "reward": "Mean reward of each trained batch, and evaluations on separate prompts.",
    "length": "Tokens of the trained responses, and the share truncated by the token budget.",
    "staleness": "Train steps between the oldest policy in a trajectory's loss and the trainer.",
    "correction": "Share of trained tokens sampled from an older policy, and the effect of the importance weights.",
    "drift": "Entropy and KL(behavior || policy) per token, and the largest engine/trainer gap on the same weights.",
    "throughput": "Tokens generated and tokens trained per second of wall time.",
    "versions": "Seconds from the copy of a version's weights, after which training continues, until it is announced "
    "and until the first and the last generator serve it. The table of policy versions has their bytes.",
    "queue": "Trajectories by state, and groups that are open or ready for a batch.",
}
_WIDE = ("in_flight", "queue")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSpec:
    """Plot for which the folder has data."""

    name: str
    caption: str
    wide: bool
    draw: Callable[[], Figure]


def plot_specs(folder: RecordedRun) -> tuple[PlotSpec, ...]:
    """Return the plots with data in the folder, in reading order; none is drawn yet."""
    train = train_series(folder.metrics.records, folder.timeline.records)
    timeline = timeline_series(folder.timeline.records)
    evaluations = evaluation_points(folder.evaluations.records)
    lives = version_lives(folder.logs())
    steps, moments = len(train) > 0, len(timeline) > 1
    plots: dict[str, tuple[bool, Callable[[], Figure]]] = {
        "in_flight": (moments, partial(mesh_plots.in_flight_plot, timeline)),
        "reward": (steps or bool(evaluations), partial(learning_plots.reward_plot, train, evaluations)),
        "length": (steps, partial(learning_plots.length_plot, train)),
        "staleness": (steps, partial(mesh_plots.staleness_plot, train, folder.max_staleness)),
        "correction": (steps, partial(learning_plots.correction_plot, train)),
        "drift": (steps, partial(learning_plots.drift_plot, train)),
        "throughput": (steps or moments, partial(mesh_plots.throughput_plot, train, timeline)),
        "versions": (bool(lives), partial(mesh_plots.versions_plot, lives)),
        "queue": (moments, partial(mesh_plots.queue_plot, timeline)),
    }
    return tuple(
        PlotSpec(name=name, caption=_CAPTIONS[name], wide=name in _WIDE, draw=draw)
        for name, (available, draw) in plots.items()
        if available
    )


def write_plots(run: RecordedRun) -> list[tuple[PlotSpec, Path]]:
    """Draw every plot into ``plots/`` of the run folder, as SVG and PNG; return each with its SVG file.

    Raises ConfigError when matplotlib is not installed.
    """
    folder = run.path / "plots"
    folder.mkdir(exist_ok=True)
    with style.style():
        return [(spec, style.save(spec.draw(), folder, spec.name)[0]) for spec in plot_specs(run)]
