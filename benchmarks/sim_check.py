"""Train steps per second of real runs beside those of the simulator.

The mesh of the demo under several schedules, with real processes. Generators and trainer share all cores, or each side
has its own half; the engines run as fast as they can, or at a pace. For each of these four settings and each seed the
simulator is calibrated on a run of ``sync``, whose generators and trainer take turns: decode steps, prefill, train
steps, publication, loads, rewards and lengths. It predicts the runs right before and after that one, because the speed
of a machine changes with time.

A rate counts from the end of the first train step to the end of the last but one, real and simulated: starts and ends
of runs are left out.
"""

import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from benchmarks.frame import Bar, Measure, Quick, at_least, at_most
from benchmarks.processes import write_run_file
from benchmarks.real_run import real_run
from rollmesh.config import RunConfig
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.scheduling.presets import PRESETS, companion_fields
from rollmesh.sim.calibration import Calibration, updates_per_second
from rollmesh.sim.run_records import RunRecords

CALIBRATED_ON = "sync"
ARMS = ("copris", "areal", "pipeline", "rollpacker")
UPDATES, _QUICK_UPDATES = 8, 3
SEEDS, _QUICK_SEEDS = 3, 1
PACE = ((1, 0.02), (128, 0.04))
"""Seconds of a decode step by running calls, in the runs at a pace."""
_LONGEST = 256
"""Most tokens of an answer: half of the demo's, to keep a step short."""
_BARS = (at_least("ratio", 0.8), at_most("ratio", 1.2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Setting under which schedules are compared."""

    is_shared: bool
    """True if generators and trainer are on the same cores."""
    is_paced: bool

    def __str__(self) -> str:
        """Return text for the table."""
        return f"{'shared' if self.is_shared else 'separate'} cores, {'at a pace' if self.is_paced else 'no pace'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Rates of one real run and of its simulation, in train steps per second."""

    arm: str
    cell: Cell
    seed: int
    real: float
    simulated: float
    load_average: float
    """Load average of the machine over a minute, at the end of the real run."""
    neighbours: tuple[str, ...] = ()
    """Arms that the simulator predicts when it is calibrated on this run; empty for a predicted arm."""

    @property
    def name(self) -> str:
        """Arm, setting and seed."""
        arm = f"{self.arm} for {' and '.join(self.neighbours)}" if self.neighbours else self.arm
        return f"{arm}, {self.cell}, seed {self.seed}"

    def __str__(self) -> str:
        """Return a line for the console."""
        ratio = self.simulated / self.real
        return (
            f"{self.name}: real {self.real:.3f} updates/s, simulated {self.simulated:.3f}, ratio {ratio:.2f}; "
            f"load average {self.load_average:.1f}"
        )


CELLS = tuple(Cell(is_shared=shared, is_paced=paced) for paced, shared in product((False, True), (True, False)))


def run(
    *,
    quick: Quick = False,
    arm: Annotated[list[str] | None, typer.Option(help="Predicted preset; repeatable.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Runs of each arm and setting.", min=1)] = None,
    updates: Annotated[int | None, typer.Option(help="Train steps of a run that are measured.", min=2)] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for the run folders.")] = None,
) -> list[Measure]:
    """Measure; ``quick``: one seed and three train steps. ``output`` keeps the run folders and the pairs.

    Raises ConfigError, before a run, for an arm that is no preset or that the simulator is calibrated on.
    """
    arms = arm or ARMS
    for name in arms:
        if name == CALIBRATED_ON:
            raise ConfigError(f"--arm {name}: the simulator is calibrated on its runs; give a preset that it predicts")
        if name not in PRESETS:
            known = ", ".join(preset for preset in PRESETS if preset != CALIBRATED_ON)
            raise ConfigError(f"--arm {name}: no such preset; known are {known}")
    console = Console(stderr=True, soft_wrap=True, highlight=False)
    seeds = seeds or (_QUICK_SEEDS if quick else SEEDS)
    updates = updates or (_QUICK_UPDATES if quick else UPDATES)
    pairs = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-sim-check-") as temporary:
        root = output or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        for seed, cell in product(range(seeds), CELLS):
            for pair in _pairs(root / f"{cell}-{seed}".replace(", ", "-").replace(" ", "-"), cell, seed, arms, updates):
                console.print(str(pair))
                pairs.append(pair)
    return measures_of(pairs)


def measures_of(pairs: Sequence[Pair]) -> list[Measure]:
    """Return a row per pair, and per arm and cell the median ratio with its bars, if the arm was predicted."""

    def row(name: str, chosen: Sequence[Pair], bars: tuple[Bar, ...] = ()) -> Measure:
        load = statistics.median(pair.load_average for pair in chosen)
        return Measure(
            name=name,
            value=statistics.median(pair.simulated for pair in chosen),
            unit="updates/s",
            baseline=f"real, load average {load:.1f}",
            baseline_value=statistics.median(pair.real for pair in chosen),
            ratio=statistics.median(pair.simulated / pair.real for pair in chosen),
            bars=bars,
        )

    rows = [row(pair.name, [pair]) for pair in pairs]
    for arm, cell in dict.fromkeys((pair.arm, pair.cell) for pair in pairs):
        chosen = [pair for pair in pairs if (pair.arm, pair.cell) == (arm, cell)]
        if arm == CALIBRATED_ON:
            rows.append(row(f"{arm}, {cell}: median, calibrated on", chosen))
        else:
            rows.append(row(f"{arm}, {cell}: median", chosen, _BARS))
    return rows


def _pairs(root: Path, cell: Cell, seed: int, arms: Sequence[str], updates: int) -> Iterator[Pair]:
    """Run the arms two by two, the calibrating one between them, and simulate all three."""
    cores = sorted(os.sched_getaffinity(0))
    for first, *others in (arms[at : at + 2] for at in range(0, len(arms), 2)):
        runs: dict[str, tuple[RunConfig, RunRecords, float]] = {}
        for arm in (first, CALIBRATED_ON, *others):
            folder = root / first / arm
            folder.mkdir(parents=True, exist_ok=True)
            data = run_file(arm, cell, seed, updates, folder / "run")
            config = write_run_file(folder / "run.yaml", data)
            runs[arm] = config, real_run(folder, data, *sides(cell, cores)), os.getloadavg()[0]
        calibrating, found, _ = runs[CALIBRATED_ON]
        calibration = Calibration.on_cores(calibrating, found, cores=len(cores), is_shared=cell.is_shared)
        for arm, (config, found, load_average) in runs.items():
            yield Pair(
                arm=arm,
                cell=cell,
                seed=seed,
                real=found.updates_per_second,
                simulated=updates_per_second(calibration.own_settings(config)),
                load_average=load_average,
                neighbours=(first, *others) if arm == CALIBRATED_ON else (),
            )


def run_file(arm: str, cell: Cell, seed: int, updates: int, folder: Path) -> dict[str, Any]:
    """Return the demo's run file under a preset with the settings that go with it; one more step is not measured."""
    data: dict[str, Any] = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    data |= {"name": f"sim-check-{arm.replace('_', '-')}", "folder": str(folder), "seed": seed}
    data["schedule"] |= {"preset": arm, "pool_size": None, "max_staleness": None}
    data["trainer"] |= {"train_steps": updates + 1}
    data["rollout"] |= {"max_new_tokens": _LONGEST}
    data["evaluation"] = {"before_and_after": False}
    data["gateway"] = {"enabled": False}
    if cell.is_paced:
        data["generator"]["pace"] = [list(point) for point in PACE]
    for field, value in companion_fields(PRESETS[arm]):
        *path, name = field.split(".")
        section = data
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value
    return data


def sides(cell: Cell, cores: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the cores of the generators and those of all other processes. Raises ConfigError for a single core."""
    if len(cores) < 2:
        raise ConfigError(f"{len(cores)} core: sim-check gives generators and trainer cores of their own; it needs 2")
    half = len(cores) // 2
    return (cores, cores) if cell.is_shared else (cores[:half], cores[half:])
