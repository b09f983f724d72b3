"""Columns of metrics.jsonl and timeline.jsonl as arrays, for curves and summaries.

A missing value is NaN, never 0. After a trainer crash, a step is replayed and logged again: the newest record of a step
counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rollmesh import step_metrics
from rollmesh.gateway.curves import LEAST_PAUSE_SECONDS
from rollmesh.report.recorded_run import Record

FloatArray = npt.NDArray[np.float64]

_PAUSE_FACTOR = 10.0
"""A run has paused where no record is so many times as long as usual between two, and ``LEAST_PAUSE_SECONDS``."""
QUEUE_STATES = ("pending", "partial", "resting", "leased", "finished")
"""Trajectory states in the timeline, in the order of the life cycle."""
GROUP_STATES = ("open_groups", "ready_groups")


def number(record: Record, path: str) -> float:
    """Return the number at a dotted path of nested objects; NaN if it is missing or not finite."""
    value = step_metrics.number(record, path)
    return value if math.isfinite(value) else math.nan


def column(records: Iterable[Record], path: str) -> FloatArray:
    """Return ``number`` of every record, float64 [records]."""
    return np.array([number(record, path) for record in records], np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSeries:
    """Columns with one entry per train step, ascending: ``series[field]`` for every field of ``STEP_METRICS``."""

    columns: Mapping[str, FloatArray]
    staleness_counts: Mapping[int, float]  # trajectories by staleness, over the run
    step_seconds: FloatArray  # sum over the phases of the step; NaN without recorded phases
    pauses: FloatArray  # [pauses, 2], see pauses_of
    sessions: FloatArray  # [sessions, 2], see sessions_of

    def __getitem__(self, field: str) -> FloatArray:
        return self.columns[field]

    def __len__(self) -> int:
        return len(self.step_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSeries:
    """Columns with one entry per sample of the launcher, ascending in time."""

    time: FloatArray  # unix seconds
    queue: Mapping[str, FloatArray]  # by trajectory state
    groups: Mapping[str, FloatArray]  # open_groups, ready_groups
    generated_tokens: FloatArray  # since the start of the run, non-decreasing
    versions: tuple[int, ...]  # policy versions with running calls, ascending
    running: FloatArray  # [versions, moments], running calls
    slots: FloatArray  # [moments], slots of serving generators
    dropped: Mapping[str, int]  # groups by reason, newest sample
    pauses: FloatArray  # [pauses, 2], see pauses_of

    def __len__(self) -> int:
        return len(self.time)


def newest_per_step(records: Sequence[Record]) -> list[Record]:
    """Select the newest record of every train step, ascending."""
    by_step: dict[int, Record] = {}
    for record in records:
        step = number(record, "train_step")
        if not math.isnan(step):
            by_step[int(step)] = record
    return [by_step[step] for step in sorted(by_step)]


def train_series(records: Sequence[Record], timeline: Sequence[Record] = ()) -> TrainSeries:
    """Read the columns of metrics.jsonl; the moments of the timeline tell when the run paused.

    The start of a session, until a generator serves, counts as a pause too: it takes minutes with a large model.
    """
    rows = newest_per_step(records)
    columns = {m.field: np.array([m.value(row) for row in rows], np.float64) for m in step_metrics.STEP_METRICS}
    for values in columns.values():
        values[~np.isfinite(values)] = math.nan
    phases = [row.get("seconds") for row in rows]
    spent = [sum(number(p, key) for key in p) if isinstance(p, Mapping) and p else math.nan for p in phases]
    step_seconds, time = np.array(spent, np.float64), column(rows, "time")
    served = [row for row in timeline if any(load.get("serving") for load in row.get("generators") or ())]
    pauses = pauses_of(column(served, "t"), time, step_seconds + np.nan_to_num(columns["wait_seconds"]))
    return TrainSeries(
        columns=columns,
        staleness_counts=_summed_counts(rows, "batch.trajectory_staleness.histogram"),
        step_seconds=step_seconds,
        pauses=pauses,
        sessions=sessions_of(time, step_seconds, pauses),
    )


def pauses_of(samples: FloatArray, time: FloatArray | None = None, busy: FloatArray | None = None) -> FloatArray:
    """Return (begin, end) of every stretch of the run without a record, [pauses, 2]: nothing ran.

    ``samples`` are the moments of the timeline, ``time`` the ends of the train steps, and ``busy`` their seconds with
    the wait for the batch: what these explain is no pause.
    """
    time, busy = (np.empty(0) if given is None else given for given in (time, busy))
    ends = np.concatenate([time, samples])
    begins = np.concatenate([time - np.nan_to_num(busy), samples])
    order = np.argsort(ends)[: np.count_nonzero(~np.isnan(ends))]
    if len(order) < 2:
        return np.empty((0, 2))
    ends, begins = ends[order], np.maximum(ends[order][:-1], begins[order][1:])
    longest = max(LEAST_PAUSE_SECONDS, _PAUSE_FACTOR * float(np.median(np.diff(ends))))
    found = begins - ends[:-1] > longest
    return np.stack([ends[:-1][found], begins[found]], axis=1)


def sessions_of(time: FloatArray, step_seconds: FloatArray, pauses: FloatArray) -> FloatArray:
    """Return (begin of the first step, end of the last step) of every session, [sessions, 2]: pauses lie between."""
    known = ~np.isnan(time)
    ends, begins = time[known], (time - np.nan_to_num(step_seconds))[known]
    if not len(ends):
        return np.empty((0, 2))
    within = (ends[:-1, None] <= pauses[:, 0]) & (pauses[:, 1] <= ends[1:, None])
    first = np.concatenate([[True], within.any(axis=1)])
    return np.stack([begins[first], ends[np.concatenate([first[1:], [True]])]], axis=1)


def seconds_of_training(sessions: FloatArray, moments: FloatArray) -> FloatArray:
    """Sum the seconds of the sessions up to each moment, [moments]; the time between sessions does not count."""
    begins, ends = sessions[:, 0], sessions[:, 1]
    return np.asarray((np.clip(moments[:, None], begins, ends) - begins).sum(axis=1), np.float64)


def broken(time: FloatArray, values: FloatArray, pauses: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return moments and values, [moments] or [rows, moments], with NaN in every pause: a line ends there."""
    at = np.searchsorted(time, pauses[:, 1])
    return np.insert(time, at, pauses.mean(axis=1)), np.insert(values.astype(np.float64), at, math.nan, axis=-1)


def timeline_series(records: Sequence[Record]) -> TimelineSeries:
    """Read the columns of timeline.jsonl."""
    rows = sorted((r for r in records if not math.isnan(number(r, "t"))), key=lambda r: number(r, "t"))
    dropped = rows[-1].get("dropped") if rows else None
    versions, running, slots = _in_flight(rows)
    time = column(rows, "t")
    return TimelineSeries(
        time=time,
        pauses=pauses_of(time),
        queue={state: column(rows, f"view.{state}") for state in QUEUE_STATES},
        groups={state: column(rows, f"view.{state}") for state in GROUP_STATES},
        generated_tokens=_without_resets(column(rows, "generated_token_total")),
        versions=versions,
        running=running,
        slots=slots,
        dropped={str(k): int(v) for k, v in dropped.items()} if isinstance(dropped, Mapping) else {},
    )


def published_versions(
    metrics: Iterable[Record], timeline: Iterable[Record], evaluations: Iterable[Record]
) -> dict[int, int]:
    """Return the train step of every published version, ascending by version; empty without a recorded version.

    A version that no record has takes the train step of the version before it, as a rollback publishes one. This is too
    early for versions that a rollback abandoned, which only the timeline knows.
    """
    steps, newest = {0: 0}, -1
    for records, version_path, step_path in (
        (timeline, "view.policy_version", "view.policy_train_step"),
        (evaluations, "policy_version", "train_step"),
        (metrics, "policy_version", "train_step"),
    ):
        for record in records:
            version, step = number(record, version_path), number(record, step_path)
            if version >= 0:
                newest = max(newest, int(version))
                if not math.isnan(step):
                    steps[int(version)] = int(step)
    for version in range(1, newest + 1):
        steps.setdefault(version, steps[version - 1])
    return {version: steps[version] for version in range(newest + 1)}


def binned(time: FloatArray, values: FloatArray, limit: int = 360) -> tuple[FloatArray, FloatArray]:
    """Average over at most ``limit`` equal intervals of time; ``values`` is [moments] or [rows, moments].

    This limits the size of the curves of long runs. Empty intervals are omitted.
    """
    if len(time) <= limit:
        return time, values
    edges = np.linspace(time[0], time[-1], limit + 1)
    index = np.clip(np.searchsorted(edges, time, side="right") - 1, 0, limit - 1)
    count = np.bincount(index, minlength=limit)
    used = count > 0

    def mean(row: FloatArray) -> FloatArray:
        total = np.bincount(index, weights=row, minlength=limit)
        return np.asarray(total[used] / count[used], np.float64)

    means = np.array([mean(row) for row in np.atleast_2d(values)], np.float64)
    return mean(time), means.reshape(*values.shape[:-1], np.count_nonzero(used))


def rate(time: FloatArray, total: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Compute (moments, units per second) between consecutive values of a running total."""
    if len(time) < 2:
        return np.empty(0), np.empty(0)
    seconds = np.diff(time)
    usable = seconds > 0
    return (time[1:])[usable], np.diff(total)[usable] / seconds[usable]


def _without_resets(total: FloatArray) -> FloatArray:
    """Convert a running total with resets to a non-decreasing one.

    A restart of a generator removes its part from the sum. That interval counts as 0, because the increase of the other
    generators is unknown.
    """
    if len(total) == 0:
        return total
    newest_known = np.maximum.accumulate(np.where(np.isnan(total), 0, np.arange(len(total))))
    filled = np.nan_to_num(total[newest_known])
    return np.cumsum(np.maximum(np.diff(filled, prepend=0.0), 0.0))


def _summed_counts(rows: Iterable[Record], path: str) -> dict[int, float]:
    """Sum the histograms at ``path`` over the rows, by ascending value."""
    total: dict[int, float] = {}
    for row in rows:
        counts = step_metrics.lookup(row, path)
        for name in counts if isinstance(counts, Mapping) else ():
            total[int(name)] = total.get(int(name), 0.0) + number(counts, name)
    return dict(sorted(total.items()))


def _in_flight(rows: Sequence[Record]) -> tuple[tuple[int, ...], FloatArray, FloatArray]:
    """Return (versions, running calls [versions, moments], slots [moments])."""
    running: list[dict[int, float]] = []
    slots = np.zeros(len(rows))
    for moment, row in enumerate(rows):
        by_version: dict[int, float] = {}
        for generator in row.get("generators") or ():
            version, count = number(generator, "policy_version"), number(generator, "running")
            if not math.isnan(version + count):
                by_version[int(version)] = by_version.get(int(version), 0.0) + count
            if generator.get("serving"):
                slots[moment] += np.nan_to_num(number(generator, "slots"))
        running.append(by_version)
    versions = tuple(sorted({v for moment in running for v, count in moment.items() if count > 0}))
    table = np.array([[moment.get(v, 0.0) for moment in running] for v in versions], np.float64)
    return versions, table.reshape(len(versions), len(rows)), slots
