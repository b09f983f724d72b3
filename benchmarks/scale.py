"""CPU time per finished trajectory of a mesh, at increasing numbers of rollouts in flight.

Redis, the leader, two workers and the reward service are those of a run. The generators are EMULATED: the real service
and contract in separate processes, over token streams of a steady rate per call, without a model. 1,000 further
generators only renew their records. Batches are claimed, checked and acknowledged without training.
"""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.frame import NONE, Bar, Measure, Quick, at_least, at_most, compared
from benchmarks.scale_mesh import THIS_BUILD, Level, Load, measure_level
from rollmesh.errors import ConfigError

TOKENS_PER_SECOND = 30.0
"""Mean rate of an emulated call."""
LEVELS = (1_000, 4_000, 10_000)
_QUICK_LEVELS = (100, 200)
_OURS = ("Redis", "workers", "leader")
"""Parts whose cost must be flat; the other parts replace generators, verifiers and the trainer."""
_TOTAL = "CPU of Redis, workers and leader a trajectory"
_FLAT = 1.3
_TAUGHT = 1.2
"""Largest cost of a trajectory with a teacher, as a multiple of that without one."""
_HELD = 0.95
"""Required share of the rollouts in flight, and of the tokens per second of each; below it the mesh is overloaded."""


def run(
    *,
    quick: Quick = False,
    level: Annotated[list[int] | None, typer.Option(help="Rollouts in flight; repeatable.", min=1)] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="Services folder of another build, measured alternately with this one.")
    ] = None,
    mean_tokens: Annotated[int, typer.Option(help="Mean tokens of an emulated answer.", min=8)] = 2048,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens per chunk of an emulated stream.", min=1)] = 512,
    teacher: Annotated[bool, typer.Option(help="Measure every level also with an emulated teacher.")] = False,
) -> list[Measure]:
    """Measure every level in turn, also of ``baseline``, the services folder of another build, and with a teacher."""
    if baseline is not None and not (baseline / "rollmesh" / "runtime" / "tasks.py").is_file():
        raise ConfigError(
            f"--baseline {baseline}: no services folder of a build with this store interface (one object per role)"
        )
    measured: dict[int, Level] = {}
    others: dict[int, Level] = {}
    taught: dict[int, Level] = {}
    requested = sorted(set(level or (_QUICK_LEVELS if quick else LEVELS)))
    for in_flight in requested:
        load = Load(
            in_flight=in_flight,
            generators=8 if quick else 64,
            registered=20 if quick else 1_000,
            mean_tokens=64 if quick else mean_tokens,
            chunk_tokens=16 if quick else chunk_tokens,
            tokens_per_second=TOKENS_PER_SECOND,
            warm_up_seconds=2.0 if quick else 2 * mean_tokens / TOKENS_PER_SECOND,
            window_seconds=4.0 if quick else 180.0 if in_flight == requested[-1] else 60.0,
        )
        if baseline is not None:
            others[in_flight] = _level(load, baseline)
        measured[in_flight] = _level(load, THIS_BUILD)
        if teacher:
            taught[in_flight] = _level(replace(load, taught=True), THIS_BUILD)
    rows = [_measures(n, level, others.get(n), "the other build") for n, level in measured.items()]
    rows += [_measures(n, level, measured[n], "without a teacher") for n, level in taught.items()]
    return [*(measure for row in rows for measure in row), *_flatness(measured)]


def _level(load: Load, build: Path) -> Level:
    with tempfile.TemporaryDirectory(prefix="rollmesh-scale-") as folder:
        return asyncio.run(measure_level(Path(folder), load, build.resolve()))


def _measures(in_flight: int, level: Level, other: Level | None, name_of_other: str) -> list[Measure]:
    """Return all figures of one level, with those of another one as the baseline, if there is one."""
    before = None if other is None else _figures(in_flight, other)
    where = f"{in_flight:,} in flight{', with a teacher' if level.taught else ''}"
    return [
        Measure(name=f"{where}: {name}", value=value, unit=unit, bars=bars)
        if before is None
        else compared(f"{where}: {name}", value, unit, name_of_other, before[name][0], bars)
        for name, (value, unit, bars) in _figures(in_flight, level).items()
        if before is None or name in before
    ]


def _figures(in_flight: int, level: Level) -> dict[str, tuple[float, str, tuple[Bar, ...]]]:
    figures: dict[str, tuple[float, str, tuple[Bar, ...]]] = {
        "held": (level.in_flight, "rollouts", (at_least("value", _HELD * in_flight),)),
        "finished": (level.finished / level.seconds, "1/s", ()),
        "tokens of a call": (
            level.tokens / level.seconds / level.in_flight,
            "1/s",
            (at_least("value", _HELD * TOKENS_PER_SECOND),),
        ),
    }
    for part in (*_OURS, *(part for part in level.cpu_seconds if part not in _OURS)):
        figures[f"CPU of {part} a trajectory"] = (1000 * level.cpu_seconds[part] / level.finished, "ms", ())
    for name, values in level.samples.items():
        for percent in (50, 99):
            figures[f"{name}, p{percent}"] = (1000 * float(np.percentile(values, percent)), "ms", ())
    bars = (at_most("ratio", _TAUGHT),) if level.taught else ()
    figures[_TOTAL] = (1000 * _cost(level) / level.finished, "ms", bars)
    return figures | {name: (count, "count", NONE) for name, count in level.faults.items()}


def _cost(level: Level) -> float:
    return sum(level.cpu_seconds[part] for part in _OURS)


def _flatness(levels: dict[int, Level]) -> list[Measure]:
    """Compare the cost of a trajectory with that at the smallest level, and measure the cost of each further one.

    The fixed cost of an idle mesh (heartbeats, snapshots, registry) has the largest share at the smallest level and
    hides growth; the cost of further trajectories excludes it.
    """
    (least, first), *larger = levels.items()
    cost, further = 1000 * _cost(first) / first.finished, None
    measures, before = [], first
    for in_flight, level in larger:
        bars = (at_most("ratio", _FLAT),) if in_flight == max(levels) else ()
        name = f"{_TOTAL}, {in_flight:,} in flight beside {least:,}"
        measures.append(compared(name, 1000 * _cost(level) / level.finished, "ms", f"{least:,} in flight", cost, bars))
        added = level.finished / level.seconds - before.finished / before.seconds
        value = 1000 * (_cost(level) / level.seconds - _cost(before) / before.seconds) / added
        further = further or value
        name = f"CPU of Redis, workers and leader for each further trajectory, up to {in_flight:,} in flight"
        measures.append(compared(name, value, "ms", "the first such step", further))
        before = level
    return measures
