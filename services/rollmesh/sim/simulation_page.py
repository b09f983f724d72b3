"""The page of simulated arms: their figures and their running calls in one file that opens offline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text
from rollmesh.report.report_file import page_in_one_file
from rollmesh.sim.arms import Arm
from rollmesh.sim.figures import Figures
from rollmesh.sim.run_timeline import RunTimeline
from rollmesh.types import Float64Array

BEST_SHARE = 0.98
"""Share of the largest throughput from which on less staleness counts more."""
_MOST_MOMENTS = 300


@dataclass(frozen=True, slots=True)
class DrawnArm:
    """One arm with its figures after the warm-up, and samples of the whole run."""

    arm: Arm
    figures: Figures
    timeline: RunTimeline


def best_arm(arms: Sequence[DrawnArm]) -> DrawnArm:
    """Return the arm with the least mean staleness among those with nearly the largest throughput."""
    largest = max(each.figures.trained_tokens_per_second for each in arms)
    fast = [each for each in arms if each.figures.trained_tokens_per_second >= BEST_SHARE * largest]
    return min(fast, key=lambda each: (each.figures.mean_staleness, -each.figures.trained_tokens_per_second))


def check_target(file: Path) -> None:
    """Raise ConfigError for a file that cannot be written, before minutes are spent on a simulation."""
    if not file.parent.is_dir() or file.is_dir():
        raise ConfigError(f"--page {file}: give a file in a folder that exists, such as simulation.html")


def write_simulation_page(arms: Sequence[DrawnArm], file: Path) -> None:
    """Write the page of the arms."""
    best = best_arm(arms)
    shown = [_arm(each, is_best=each is best and len(arms) > 1) for each in arms]
    write_text(file, page_in_one_file("simulation.html", "simulation", {"arms": shown}))


def _arm(each: DrawnArm, *, is_best: bool) -> Mapping[str, Any]:
    time, versions, running = each.timeline.arrays()
    kept = slice(None, None, max(1, -(-len(time) // _MOST_MOMENTS)))
    time, versions, running = time[kept], versions[:, kept], running[:, kept]
    return {
        "name": each.arm.name,
        "best": is_best,
        "tokens_per_second": each.figures.trained_tokens_per_second,
        "mean_staleness": each.figures.mean_staleness,
        "staleness": each.figures.staleness,
        "update_seconds": each.figures.update_seconds,
        "time": time.tolist(),
        "slots": (each.arm.settings.fleet.slots * (versions >= 0).sum(axis=0)).tolist(),
        "running": _by_version(versions, running),
        "generators": _by_version(versions, np.ones_like(running)),
    }


def _by_version(versions: Float64Array, values: Float64Array) -> list[Mapping[str, Any]]:
    """Sum values [generators, moments] by version, each from its first to its last moment."""
    found: list[Mapping[str, Any]] = []
    for version in np.unique(versions[versions >= 0]):
        total = np.where(versions == version, values, 0).sum(axis=0)
        used = np.flatnonzero(total)
        if len(used):
            calls = total[used[0] : used[-1] + 1].tolist()
            found.append({"policy_version": int(version), "first": int(used[0]), "calls": calls})
    return found
