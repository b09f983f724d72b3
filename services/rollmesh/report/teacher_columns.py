"""Check of the teachers' columns in the batch files, and a sample of them computed again under the teacher's model."""

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.config.recipes import resolve_model
from rollmesh.config.run import RunConfig
from rollmesh.config.teachers import TeacherConfig, teacher_of_domain
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.report.audit_result import GAP_BOUNDS, MOST_EXCUSED_SHARE, TeacherCheck
from rollmesh.report.console import listed
from rollmesh.report.rescore import gaps_of_version
from rollmesh.runtime.lifecycle import many_imports
from rollmesh.teacher.teacher_model import manifest_digest
from rollmesh.types import Batch, Float64Array, Segment, SegmentSource, TeacherColumn, Trajectory

if TYPE_CHECKING:
    from rollmesh.trainer.learner.policy_scorer import PolicyScorer

_SAMPLE = 32
"""Columns of a teacher that are computed again."""


@dataclass(slots=True)
class ColumnCounts:
    """Columns of one teacher in the batch files."""

    digests: Counter[str] = field(default_factory=Counter)
    """Columns by manifest digest."""
    tokens: int = 0
    missing: list[str] = field(default_factory=list)
    """Trajectories of its prompts without a column of it."""
    unsound: list[str] = field(default_factory=list)
    """Trajectories with another number of scores than tokens, or with scores that are not finite."""
    sample: list[Trajectory] = field(default_factory=list)


class TaughtTrajectories:
    """Columns over the batch files, by teacher; empty in a run without teachers."""

    def __init__(self, teachers: Mapping[str, TeacherConfig]) -> None:
        self.counts = {name: ColumnCounts() for name in teachers}
        self._teachers = teachers
        self._rng = random.Random(0)

    def add(self, batch: Batch) -> None:
        """Count the columns of a batch."""
        if not self.counts:
            return
        for trajectory in (t for group in batch.groups for t in group.trajectories):
            name = teacher_of_domain(self._teachers, trajectory.prompt.domain)
            if name is not None:
                self._add(self.counts[name], name, trajectory)

    def _add(self, counts: ColumnCounts, name: str, trajectory: Trajectory) -> None:
        column = trajectory.teacher
        if column is None or column.teacher != name:
            counts.missing.append(trajectory.trajectory_id)
            return
        counts.digests[column.manifest_digest] += 1
        counts.tokens += len(column.logprobs)
        if not _is_sound(column, trajectory.response_token_count, self._teachers[name].top_k):
            counts.unsound.append(trajectory.trajectory_id)
            return
        # Every column is in the sample with the same probability.
        seen = counts.digests.total()
        place = len(counts.sample) if seen <= _SAMPLE else self._rng.randrange(seen)
        if place < _SAMPLE:
            counts.sample[place : place + 1] = [trajectory]


def _is_sound(column: TeacherColumn, token_count: int, top_k: int) -> bool:
    logprobs, top = column.logprobs, column.top_logprobs
    if len(logprobs) != token_count or not np.isfinite(logprobs).all():
        return False
    return top_k == 0 if top is None else top.shape == (token_count, top_k) and bool(np.isfinite(top).all())


def check_columns(taught: TaughtTrajectories, config: RunConfig | None) -> tuple[TeacherCheck, ...]:
    """Check the columns of every teacher, and compute a sample of them again where its folder is there."""
    return () if config is None else tuple(_check(name, counts, config) for name, counts in taught.counts.items())


def _check(name: str, counts: ColumnCounts, config: RunConfig) -> TeacherCheck:
    check = TeacherCheck(
        teacher=name,
        manifest_digests=tuple(sorted(counts.digests)),
        columns=counts.digests.total(),
        tokens=counts.tokens,
        missing=tuple(counts.missing),
        unsound=tuple(counts.unsound),
    )
    teacher = config.teachers[name]
    if teacher.model is None:
        return replace(check, note="its model is behind an address")
    if not counts.sample:
        return replace(check, note="there is no sound column")
    try:
        folder = resolve_model(teacher.model, f"teachers.{name}.model")
        if check.manifest_digests != (digest := manifest_digest(folder),):
            return replace(check, note=f"{folder} has another model now (manifest digest {digest[:12]})")
        return _computed_again(check, counts.sample, teacher, str(folder), config.rollout.temperature)
    except (CheckpointError, ConfigError, OSError) as error:
        return replace(check, note=str(error))


def _computed_again(
    check: TeacherCheck, sample: list[Trajectory], teacher: TeacherConfig, folder: str, temperature: float
) -> TeacherCheck:
    with many_imports():
        import torch

        from rollmesh.trainer.learner.policy_scorer import PolicyScorer
    load = partial(PolicyScorer.from_folder, folder)
    scorer, bound = load(), GAP_BOUNDS[teacher.dtype].token
    exact = partial(load, dtype=torch.float64) if teacher.dtype == "float32" else None
    written = [trajectory for trajectory in sample if trajectory.response_token_count]
    gaps = gaps_of_version(scorer, 0, [_as_sampled(trajectory, temperature) for trajectory in written], exact)
    over, excused = gaps.over(bound)
    top = np.concatenate([np.empty(0), *(_top_gaps(scorer, t, temperature) for t in written if teacher.top_k)])
    # Rounding moves few tokens over the bound.
    for count, tokens in ((len(excused), len(gaps.values)), (int((top > bound).sum()), len(top))):
        over += count if count > MOST_EXCUSED_SHARE * tokens else 0
    return replace(
        check,
        checked_columns=len(sample),
        checked_tokens=len(gaps.values),
        largest_gap=float(max(gaps.values.max(initial=0.0), top.max(initial=0.0))),
        over_bound=over,
    )


def _as_sampled(trajectory: Trajectory, temperature: float) -> Trajectory:
    """Return the trajectory as if its teacher, as policy version 0, had sampled the response."""
    assert trajectory.teacher is not None
    segment = Segment(
        token_ids=trajectory.response_ids,
        behavior_logprobs=trajectory.teacher.logprobs,
        policy_version=0,
        kv_min_version=0,
        source=SegmentSource.POLICY,
        temperature=temperature,
    )
    return replace(trajectory, segments=(segment,))


def _top_gaps(scorer: "PolicyScorer", trajectory: Trajectory, temperature: float) -> Float64Array:
    """Return the gaps of the log-probabilities of the most likely tokens, by rank: equally likely ones may swap."""
    column = trajectory.teacher
    assert column is not None
    assert column.top_logprobs is not None
    ids = np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids]).astype(np.int32)
    top_k = column.top_logprobs.shape[1]
    ((_, _, again),) = scorer.response_scores([ids], [len(trajectory.prompt.token_ids)], temperature, top_k)
    return np.abs(again.astype(np.float64) - column.top_logprobs).ravel()


def column_problems(checks: tuple[TeacherCheck, ...]) -> Iterator[str]:
    """Yield a description of every failed check of the columns."""
    for check in checks:
        name = f"teachers.{check.teacher}"
        if len(check.manifest_digests) > 1:
            digests = listed([digest[:12] for digest in check.manifest_digests])
            yield f"{name}: its columns are of {len(check.manifest_digests)} models (manifest digests {digests})"
        if check.missing:
            yield f"{name}: {len(check.missing)} trajectories have no column of it: {listed(check.missing)}"
        if check.unsound:
            yield (
                f"{name}: {len(check.unsound)} columns have another number of scores than the response has tokens, or "
                f"scores that are not finite: {listed(check.unsound)}"
            )
        if check.over_bound:
            yield (
                f"{name}: {check.over_bound} log-probabilities of {check.checked_columns} columns are up to "
                f"{check.largest_gap:.3g} nats from its model"
            )
