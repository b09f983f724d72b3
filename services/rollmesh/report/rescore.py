"""The re-scoring part of an audit: every pure segment of every batch file, with the very checkpoint it names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeAlias

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.report.audit_result import (
    GAP_BOUNDS,
    LARGEST_EXCUSED_GAP,
    RESOLUTION_FACTOR,
    Rescoring,
    VersionGap,
)
from rollmesh.report.ledger_counts import Trained
from rollmesh.report.published import PublishedPolicies
from rollmesh.types import Batch, Float32Array, Float64Array, FloatArray, Int32Array, SegmentSource, Trajectory

PRUNED = "checkpoint pruned"
GONE = "checkpoint gone, which checkpoints.keep_last keeps"
NO_NUMBER_GAP = 1e9
"""Gap of a logprob that is no finite number; itself finite, so that the result stays valid JSON."""
DOUBTED_GAP = 1e-5
"""A trajectory with a larger gap is scored once more in float64: two float32 programs differ by the rounding of both,
the engine answers for its own only."""
_CACHED_BATCHES = 8


class SegmentScorer(Protocol):
    """A policy that scores sequences; ``trainer.scorer.PolicyScorer`` is one."""

    def logprobs(self, sequences: list[Int32Array], temperature: float) -> list[FloatArray]:
        """Log-probability of each token given its predecessors, [tokens - 1] per sequence."""
        ...


class ExactScorer(SegmentScorer, Protocol):
    """A scorer in float64, which also knows what float32 can tell apart."""

    def resolution(self, sequences: list[Int32Array], temperature: float) -> list[Float64Array]:
        """How far the last float32 bit of weights and positions moves each logprob, [tokens - 1] per sequence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """``|behavior_logprob - re-scored|`` of tokens, and what is to be said of those over the bound."""

    values: Float64Array  # [tokens], nats
    resolution: Float64Array  # [tokens], nats; 0 where nobody asked

    def over(self, bound: float) -> tuple[int, Float64Array]:
        """Number of tokens over ``bound`` that are the engine's, and the gaps of those that are the arithmetic's."""
        beyond = self.values > bound
        limit = np.minimum(RESOLUTION_FACTOR * self.resolution, LARGEST_EXCUSED_GAP)
        excused = beyond & (self.values <= limit)
        return int((beyond & ~excused).sum()), self.values[excused]

    @property
    def not_finite(self) -> int:
        """Tokens whose logprob is no finite number."""
        return int((self.values == NO_NUMBER_GAP).sum())


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


_Work: TypeAlias = tuple[Int32Array, list[PureSegment]]
"""A trajectory's ids up to the end of its last segment of one version, and these segments."""


def rescore(
    store: CheckpointStore,
    trained: Trained,
    published: PublishedPolicies,
    *,
    dtype: str,
    train_steps: Mapping[int, int],
    load: Callable[[Path], SegmentScorer],
    load_exact: Callable[[Path], ExactScorer] | None,
    advance: Callable[[], None],
) -> Rescoring:
    """Score every pure segment that ``trained`` counted; one load per version, ascending.

    ``load`` makes a scorer of a verified policy folder, ``load_exact`` one that computes in float64 (None: doubts are
    not looked into); ``advance`` is called after each version.
    """
    batches = _BatchCache(store)
    bound = GAP_BOUNDS[dtype].token
    gaps: list[VersionGap] = []
    for version in sorted(trained.pure_segments):
        found, skipped = Gaps(values=np.empty(0), resolution=np.empty(0)), ""
        try:
            folder = published.open(version)
            if folder is None:
                skipped = PRUNED if published.outlived(version) else GONE
            else:
                exact = None if load_exact is None else partial(load_exact, folder)
                steps = sorted(trained.pure_segments[version])
                trajectories = (t for step in steps for t in batches.trajectories(step))
                found = gaps_of_version(load(folder), version, trajectories, exact)
        except CheckpointError as error:
            skipped = f"checkpoint refused: {error}"
        segments, tokens = trained.pure_segments[version].total(), trained.pure_tokens[version]
        gaps.append(_version_gap(version, train_steps.get(version), segments, tokens, found, bound, skipped))
        advance()
    scored = [gap for gap in gaps if not gap.skipped]
    skipped_gaps = [gap for gap in gaps if gap.skipped]
    announced = [published.announced(gap.policy_version) for gap in scored]
    return Rescoring(
        dtype=dtype,
        bound=bound,
        largest_gap=max((gap.largest_gap for gap in scored if gap.largest_gap is not None), default=None),
        segments=sum(gap.segments for gap in scored),
        tokens=sum(gap.tokens for gap in scored),
        policy_tokens=trained.policy_tokens,
        skipped_impure_segments=trained.impure_segments,
        skipped_impure_tokens=trained.impure_tokens,
        skipped_segments=sum(gap.segments for gap in skipped_gaps),
        skipped_tokens=sum(gap.tokens for gap in skipped_gaps),
        pruned_tokens=sum(gap.tokens for gap in skipped_gaps if gap.skipped == PRUNED),
        versions=tuple(gaps),
        announced_manifests=None if None in announced else sum(map(bool, announced)),
    )


def _version_gap(
    version: int, train_step: int | None, segments: int, tokens: int, found: Gaps, bound: float, skipped: str
) -> VersionGap:
    over_bound, excused = found.over(bound)
    return VersionGap(
        policy_version=version,
        train_step=train_step,
        segments=segments,
        tokens=tokens,
        largest_gap=float(found.values.max()) if len(found.values) else None,
        mean_gap=_mean_without(found.values, excused),
        over_bound=over_bound,
        unresolvable=len(excused),
        largest_unresolvable=float(excused.max(initial=0.0)),
        not_finite=found.not_finite,
        skipped=skipped,
    )


def _mean_without(values: Float64Array, excused: Float64Array) -> float | None:
    """Mean of the gaps that are not excused; None without one."""
    count = len(values) - len(excused)
    return float((values.sum() - excused.sum()) / count) if count else None


def gaps_of_version(
    scorer: SegmentScorer,
    version: int,
    trajectories: Iterable[Trajectory],
    exact: Callable[[], ExactScorer] | None = None,
) -> Gaps:
    """The gap of every token in a pure segment of ``version``.

    Trajectories with a gap over ``DOUBTED_GAP`` are judged by ``exact()``, if it is given, and those that stay over the
    bound of float32 get their resolution. A logprob that is no number gives ``NO_NUMBER_GAP``, never a small one.
    """
    by_temperature: dict[float, list[_Work]] = {}
    for trajectory in trajectories:
        ids = np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids]).astype(np.int32, copy=False)
        segments = pure_segments(trajectory, version)
        for temperature in {segment.temperature for segment in segments}:
            mine = [segment for segment in segments if segment.temperature == temperature]
            by_temperature.setdefault(temperature, []).append((ids[: mine[-1].end], mine))
    values: list[Float64Array] = []
    resolution: list[Float64Array] = []
    for temperature, work in by_temperature.items():
        gaps = _gaps(scorer, temperature, work)
        resolved = [np.zeros_like(gap) for gap in gaps]
        doubted = [at for at, gap in enumerate(gaps) if gap.max() > DOUBTED_GAP]
        if doubted and exact is not None:
            judge = exact()
            for at, gap in zip(doubted, _gaps(judge, temperature, [work[at] for at in doubted]), strict=True):
                gaps[at] = gap
            bad = [at for at in doubted if gaps[at].max() > GAP_BOUNDS["float32"].token]
            for at, moved in zip(bad, judge.resolution([work[at][0] for at in bad], temperature), strict=True):
                resolved[at] = _of_segments(moved, work[at][1])
        values += gaps
        resolution += resolved
    return Gaps(values=_joined(values), resolution=_joined(resolution))


def _gaps(scorer: SegmentScorer, temperature: float, work: Sequence[_Work]) -> list[Float64Array]:
    """The gaps of each trajectory's segments, one array per trajectory."""
    gaps: list[Float64Array] = []
    for values, (_, segments) in zip(scorer.logprobs([ids for ids, _ in work], temperature), work, strict=True):
        behavior = np.concatenate([s.behavior_logprobs for s in segments]).astype(np.float64)
        difference = np.abs(_of_segments(values, segments) - behavior)
        gaps.append(np.nan_to_num(difference, nan=NO_NUMBER_GAP, posinf=NO_NUMBER_GAP))
    return gaps


def _of_segments(values: FloatArray, segments: Sequence[PureSegment]) -> Float64Array:
    """The entries of the segments' tokens, of one entry per token from the second one on."""
    return np.concatenate([values[s.start - 1 : s.end - 1] for s in segments]).astype(np.float64)


def _joined(parts: Sequence[Float64Array]) -> Float64Array:
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
