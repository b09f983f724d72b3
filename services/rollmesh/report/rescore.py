"""The re-scoring part of an audit: every pure segment of every batch file, with the very checkpoint it names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.report.ledger import Trained
from rollmesh.report.verdict import LOGPROB_BOUNDS, RESOLUTION_FACTOR, Rescoring, VersionGap
from rollmesh.types import Batch, Float32Array, Float64Array, Int32Array, PolicyRecord, SegmentSource, Trajectory

PRUNED = "checkpoint pruned"
NO_NUMBER_GAP = 1e9
"""Gap of a logprob that is no finite number; itself finite, so that the result stays valid JSON."""
DOUBTED_GAP = 1e-5
"""A trajectory with a larger gap is scored once more in float64: two float32 programs differ by the rounding of both,
the engine answers for its own only."""
_CACHED_BATCHES = 8


class Scorer(Protocol):
    """A policy that scores sequences; ``trainer.scorer.PolicyScorer`` is one."""

    def logprobs(self, sequences: list[Int32Array], temperature: float) -> list[Float32Array]:
        """Log-probability of each token given its predecessors, [tokens - 1] per sequence."""
        ...


class ExactScorer(Scorer, Protocol):
    """A scorer in float64, which also knows what float32 can tell apart."""

    def resolution(self, sequences: list[Int32Array], temperature: float) -> list[Float64Array]:
        """How far the last float32 bit of the weights moves each log-probability, [tokens - 1] per sequence."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """``|behavior_logprob - re-scored|`` of tokens, and what is to be said of those over the bound."""

    values: Float64Array  # [tokens], nats
    resolution: Float64Array  # [tokens], nats; 0 where nobody asked

    def over(self, bound: float) -> tuple[int, int]:
        """Tokens over ``bound`` that float32 resolves, and those that it does not."""
        beyond = self.values > bound
        excused = beyond & (self.values <= RESOLUTION_FACTOR * self.resolution)
        return int((beyond & ~excused).sum()), int(excused.sum())


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
    *,
    dtype: str,
    train_steps: Mapping[int, int],
    load: Callable[[Path], Scorer],
    load_exact: Callable[[Path], ExactScorer] | None,
    advance: Callable[[], None],
) -> Rescoring:
    """Score every pure segment that ``trained`` counted; one load per version, ascending.

    ``load`` makes a scorer of a verified policy folder, ``load_exact`` one that computes in float64 (None: doubts are
    not looked into); ``advance`` is called after each version.
    """
    records = {record.policy_version: record for record in store.complete_policies()}
    batches = _BatchCache(store)
    gaps: list[VersionGap] = []
    for version in sorted(trained.pure_segments):
        gaps.append(
            _rescore_version(
                store,
                records.get(version),
                version,
                trained,
                batches,
                load,
                load_exact,
                train_steps.get(version),
                dtype,
            )
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
    load_exact: Callable[[Path], ExactScorer] | None,
    train_step: int | None,
    dtype: str,
) -> VersionGap:
    segments, tokens = trained.pure_segments[version].total(), trained.pure_tokens[version]
    skipped, gaps = PRUNED, Gaps(values=np.empty(0), resolution=np.empty(0))
    if record is not None:
        try:
            folder = store.open(record).folder
            exact = None if load_exact is None else partial(load_exact, folder)
            trajectories = (t for step in sorted(trained.pure_segments[version]) for t in batches.trajectories(step))
            gaps, skipped = gaps_of_version(load(folder), version, trajectories, exact), ""
        except CheckpointError as error:
            skipped = PRUNED if getattr(error, "reason", None) == Reason.MISSING else f"checkpoint refused: {error}"
    over_bound, unresolvable = gaps.over(LOGPROB_BOUNDS[dtype])
    return VersionGap(
        policy_version=version,
        train_step=train_step,
        segments=segments,
        tokens=tokens,
        largest_gap=float(gaps.values.max()) if len(gaps.values) else None,
        mean_gap=float(gaps.values.mean()) if len(gaps.values) else None,
        over_bound=over_bound,
        unresolvable=unresolvable,
        skipped=skipped,
    )


def gaps_of_version(
    scorer: Scorer, version: int, trajectories: Iterable[Trajectory], exact: Callable[[], ExactScorer] | None = None
) -> Gaps:
    """The gap of every token in a pure segment of ``version``.

    Trajectories with a gap over ``DOUBTED_GAP`` are judged by ``exact()``, if it is given, and those that stay over the
    bound of float32 get their resolution. A logprob that is no number
    gives ``NO_NUMBER_GAP``, never a small one.
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
            bad = [at for at in doubted if gaps[at].max() > LOGPROB_BOUNDS["float32"]]
            for at, moved in zip(bad, judge.resolution([work[at][0] for at in bad], temperature), strict=True):
                resolved[at] = _of_segments(moved, work[at][1])
        values += gaps
        resolution += resolved
    return Gaps(values=_joined(values), resolution=_joined(resolution))


def _gaps(scorer: Scorer, temperature: float, work: Sequence[_Work]) -> list[Float64Array]:
    """The gaps of each trajectory's segments, one array per trajectory."""
    gaps: list[Float64Array] = []
    for values, (_, segments) in zip(scorer.logprobs([ids for ids, _ in work], temperature), work, strict=True):
        behavior = np.concatenate([s.behavior_logprobs for s in segments]).astype(np.float64)
        difference = np.abs(_of_segments(values, segments) - behavior)
        gaps.append(np.nan_to_num(difference, nan=NO_NUMBER_GAP, posinf=NO_NUMBER_GAP))
    return gaps


def _of_segments(values: npt.NDArray[Any], segments: Sequence[PureSegment]) -> Float64Array:
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
