"""Plots of a run; matplotlib is imported with the first drawn plot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.report.plots import learning_plots, mesh_plots, style
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import evaluation_points, timeline_series, train_series

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotSpec:
    """Plot for which the folder has data."""

    name: str
    caption: str
    wide: bool
    draw: Callable[[], Figure]


def plot_specs(folder: RecordedRun) -> tuple[PlotSpec, ...]:
    """Return the plots with data in the folder, in reading order; none is drawn yet."""
    train = train_series(folder.metrics.records)
    timeline = timeline_series(folder.timeline.records)
    evaluations = evaluation_points(folder.evaluations.records)
    bound = folder.max_staleness
    specs: list[PlotSpec] = []

    def add(available: bool, name: str, caption: str, draw: Callable[[], Figure], wide: bool = False) -> None:
        if available:
            specs.append(PlotSpec(name=name, caption=caption, wide=wide, draw=draw))

    steps, moments = len(train) > 0, len(timeline) > 1
    add(
        moments,
        "in_flight",
        "Running calls of the generators by policy version.",
        lambda: mesh_plots.in_flight_plot(timeline),
        wide=True,
    )
    add(
        steps or bool(evaluations),
        "reward",
        "Mean reward of each trained batch, and evaluations on separate prompts.",
        lambda: learning_plots.reward_plot(train, evaluations),
    )
    add(
        steps,
        "length",
        "Tokens of the trained responses, and the share truncated by the token budget.",
        lambda: learning_plots.length_plot(train),
    )
    add(
        steps,
        "staleness",
        "Train steps between the oldest policy in a trajectory's loss and the trainer.",
        lambda: mesh_plots.staleness_plot(train, bound),
    )
    add(
        steps,
        "correction",
        "Share of trained tokens sampled from an older policy, and the effect of the importance weights.",
        lambda: learning_plots.correction_plot(train),
    )
    add(
        steps,
        "drift",
        "Entropy and KL(behavior || policy) per token, and the largest engine/trainer gap on the same weights.",
        lambda: learning_plots.drift_plot(train),
    )
    add(
        steps or moments,
        "throughput",
        "Tokens generated and tokens trained per second of wall time.",
        lambda: mesh_plots.throughput_plot(train, timeline),
    )
    add(
        moments,
        "queue",
        "Trajectories by state, and groups that are open or ready for a batch.",
        lambda: mesh_plots.queue_plot(timeline),
        wide=True,
    )
    return tuple(specs)


def write_plots(run_folder: Path) -> tuple[Path, ...]:
    """Draw every plot into ``plots/`` of the run folder, as SVG and PNG; return the files.

    Raises ConfigError when matplotlib is not installed, DataError for a missing folder.
    """
    specs = plot_specs(RecordedRun(run_folder))
    folder = run_folder / "plots"
    folder.mkdir(exist_ok=True)
    files: list[Path] = []
    with style.style():
        for spec in specs:
            files.extend(style.save(spec.draw(), folder, spec.name))
    return tuple(files)
