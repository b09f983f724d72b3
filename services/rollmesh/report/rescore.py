"""The re-scoring part of an audit: every pure segment of every batch file, with the very checkpoint it names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.report.ledger import Trained
from rollmesh.report.verdict import LOGPROB_BOUNDS, Rescoring, VersionGap
from rollmesh.types import Batch, Float32Array, Int32Array, PolicyRecord, SegmentSource, Trajectory

PRUNED = "checkpoint pruned"
NO_NUMBER_GAP = 1e9
"""Gap of a logprob that is no finite number; itself finite, so that the result stays valid JSON."""
_CACHED_BATCHES = 8


class Scorer(Protocol):
    """A policy that scores sequences; ``trainer.scorer.PolicyScorer`` is one."""

    def logprobs(self, sequences: list[Int32Array], temperature: float) -> list[Float32Array]:
        """Log-probability of each token given its predecessors, [tokens - 1] per sequence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PureSegment:
    """Where a segment lies in its trajectory's tokens, and what its sampler said."""

    start: int
    """Index of its first token, prompt included."""
    behavior_logprobs: Float32Array  # [tokens]
    temperature: float

    @property
    def end(self) -> int:
        """Index after its last token."""
        return self.start + len(self.behavior_logprobs)


def rescore(
    store: CheckpointStore,
    trained: Trained,
    *,
    dtype: str,
    train_steps: Mapping[int, int],
    load: Callable[[Path], Scorer],
    advance: Callable[[], None],
) -> Rescoring:
    """Score every pure segment that ``trained`` counted; one load per version, ascending.

    ``load`` makes a scorer of a verified policy folder; ``advance`` is called after each version.
    """
    records = {record.policy_version: record for record in store.complete_policies()}
    batches = _BatchCache(store)
    gaps: list[VersionGap] = []
    for version in sorted(trained.pure_segments):
        gaps.append(
            _rescore_version(store, records.get(version), version, trained, batches, load, train_steps.get(version))
        )
        advance()
    scored = [gap for gap in gaps if not gap.skipped]
    worst = [gap.largest_gap for gap in scored if gap.largest_gap is not None]
    return Rescoring(
        dtype=dtype,
        bound=LOGPROB_BOUNDS[dtype],
        largest_gap=max(worst) if worst else None,
        segments=sum(gap.segments for gap in scored),
        tokens=sum(gap.tokens for gap in scored),
        skipped_impure_segments=trained.impure_segments,
        skipped_segments=sum(gap.segments for gap in gaps if gap.skipped),
        versions=tuple(gaps),
    )


def _rescore_version(
    store: CheckpointStore,
    record: PolicyRecord | None,
    version: int,
    trained: Trained,
    batches: _BatchCache,
    load: Callable[[Path], Scorer],
    train_step: int | None,
) -> VersionGap:
    segments, tokens = trained.pure_segments[version].total(), trained.pure_tokens[version]
    skipped, differences = PRUNED, np.empty(0)
    if record is not None:
        try:
            scorer = load(store.open(record).folder)
            trajectories = (t for step in sorted(trained.pure_segments[version]) for t in batches.trajectories(step))
            differences, skipped = gaps_of_version(scorer, version, trajectories), ""
        except CheckpointError as error:
            skipped = PRUNED if getattr(error, "reason", None) == Reason.MISSING else f"checkpoint refused: {error}"
    return VersionGap(
        policy_version=version,
        train_step=train_step,
        segments=segments,
        tokens=tokens,
        largest_gap=float(differences.max()) if len(differences) else None,
        mean_gap=float(differences.mean()) if len(differences) else None,
        skipped=skipped,
    )


def gaps_of_version(scorer: Scorer, version: int, trajectories: Iterable[Trajectory]) -> npt.NDArray[np.float64]:
    """``|behavior_logprob - re-scored|`` of every token in a pure segment of ``version``, float64 [tokens].

    A logprob that is no number gives ``NO_NUMBER_GAP``, never a small one.
    """
    by_temperature: dict[float, list[tuple[Int32Array, list[PureSegment]]]] = {}
    for trajectory in trajectories:
        ids = np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids]).astype(np.int32, copy=False)
        segments = pure_segments(trajectory, version)
        for temperature in {segment.temperature for segment in segments}:
            mine = [segment for segment in segments if segment.temperature == temperature]
            by_temperature.setdefault(temperature, []).append((ids[: mine[-1].end], mine))
    parts: list[npt.NDArray[np.float64]] = []
    for temperature, work in by_temperature.items():
        scores = scorer.logprobs([ids for ids, _ in work], temperature)
        for values, (_, segments) in zip(scores, work, strict=True):
            for segment in segments:
                difference = values[segment.start - 1 : segment.end - 1].astype(np.float64) - segment.behavior_logprobs
                parts.append(np.nan_to_num(np.abs(difference), nan=NO_NUMBER_GAP, posinf=NO_NUMBER_GAP))
    return np.concatenate(parts) if parts else np.empty(0)


def pure_segments(trajectory: Trajectory, version: int) -> list[PureSegment]:
    """The non-empty pure segments of one version, in order."""
    found: list[PureSegment] = []
    start = len(trajectory.prompt.token_ids)
    for segment in trajectory.segments:
        mine = segment.source is SegmentSource.POLICY and segment.pure and segment.policy_version == version
        if mine and len(segment) and segment.behavior_logprobs is not None:
            found.append(
                PureSegment(start=start, behavior_logprobs=segment.behavior_logprobs, temperature=segment.temperature)
            )
        start += len(segment)
    return found


class _BatchCache:
    """The last few batches: neighbouring versions are spread over the same ones."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._kept: OrderedDict[int, Batch] = OrderedDict()

    def trajectories(self, train_step: int) -> Iterator[Trajectory]:
        """All trajectories of one batch file."""
        if train_step not in self._kept:
            self._kept[train_step] = self._store.read_batch(train_step)
            while len(self._kept) > _CACHED_BATCHES:
                self._kept.popitem(last=False)
        for group in self._kept[train_step].groups:
            yield from group.trajectories
