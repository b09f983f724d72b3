"""Plots of simulated arms in a folder, in the style of the report."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rollmesh.errors import ConfigError
from rollmesh.report.plots import simulation_plots as plots
from rollmesh.report.plots import style
from rollmesh.sim.arms import Arm
from rollmesh.sim.figures import Figures
from rollmesh.sim.run_timeline import RunTimeline

_NO_FILE_NAME = re.compile(r"[^A-Za-z0-9._=-]+")


def plotted_arm(arm: Arm, found: Figures, timeline: RunTimeline) -> plots.PlottedArm:
    """Return the data of the plots of one arm: figures after the warm-up, and samples of the whole run."""
    time, versions, running = timeline.arrays()
    return plots.PlottedArm(
        name=arm.name,
        update_seconds=found.update_seconds,
        staleness=found.staleness,
        mean_staleness=found.mean_staleness,
        tokens_per_second=found.trained_tokens_per_second,
        time=time,
        versions=versions,
        running=running,
        slots=arm.settings.fleet.slots,
    )


def make_plots_folder(folder: Path) -> None:
    """Make the folder of the plots. Raises ConfigError if it cannot be made, or when matplotlib is not installed."""
    style.style()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--plots {folder}: no folder can be made there ({error.strerror}); give another one"
        ) from error


def write_simulation_plots(arms: Sequence[plots.PlottedArm], folder: Path, *, is_sweep: bool) -> list[Path]:
    """Draw every plot into the folder, as SVG and PNG; returns the SVG files."""
    drawn = {
        "update_seconds": partial(plots.update_seconds_plot, arms),
        "staleness": partial(plots.staleness_plot, arms),
        "throughput": partial(plots.throughput_plot, arms, is_sweep=is_sweep),
    }
    for arm in arms:
        name = _NO_FILE_NAME.sub("-", arm.name)
        drawn[f"running_calls-{name}"] = partial(plots.running_calls_plot, arm)
        drawn[f"generators-{name}"] = partial(plots.generators_plot, arm)
    with style.style():
        return [style.save(draw(), folder, name)[0] for name, draw in drawn.items()]
