"""Re-scoring of an audit: every pure segment of every batch file with the verified checkpoint of its policy version."""

import importlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.policies import UnsoundPolicy, VerifiedPolicy
from rollmesh.errors import CheckpointError, Reason
from rollmesh.kept_sets import slice_sets, trajectory_sets
from rollmesh.report.audit_result import (
    GAP_BOUNDS,
    LARGE_MEAN,
    RESOLUTION_FACTOR,
    ROUNDING_FACTOR,
    GapBounds,
    Rescoring,
    VersionGap,
)
from rollmesh.report.ledger_check import Trained
from rollmesh.runtime.capacity import this_machine
from rollmesh.runtime.lifecycle import many_imports
from rollmesh.types import (
    Float32Array,
    Float64Array,
    FloatArray,
    Int32Array,
    KeptSets,
    PolicyRecord,
    SegmentSource,
    Trajectory,
)

if TYPE_CHECKING:
    from rollmesh.trainer.learner.policy_scorer import PolicyScorer


PRUNED = "checkpoint pruned"
MISSING = "checkpoint missing although checkpoints.keep_last retains it"
NOT_FINITE_GAP = 1e9
"""Gap of a logprob that is not finite; the constant is finite, so that the result is valid JSON."""
LARGE_GAP = 1e-5
"""Gap above which a trajectory is scored again in float64.

Two float32 programs differ by the rounding of both; against float64, only the rounding of the engine remains.
"""
_CACHED_BATCHES = 8
_MOST_MODELS = 4
"""Most versions that are in memory at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Gaps ``|behavior_logprob - re-scored|`` of tokens, with their float32 resolution."""

    values: Float64Array  # [tokens], nats
    resolution: Float64Array  # [tokens], nats; 0 if not computed

    def over(self, bound: float) -> tuple[int, Float64Array]:
        """Return the number of tokens over ``bound`` beyond rounding, and the gaps of those explained by rounding."""
        beyond = self.values > bound
        excused = beyond & (self.values <= RESOLUTION_FACTOR * self.resolution)
        return int((beyond & ~excused).sum()), self.values[excused]

    @property
    def mean(self) -> float:
        """Mean of the gaps; 0 without tokens."""
        return float(self.values.mean()) if len(self.values) else 0.0

    @property
    def not_finite(self) -> int:
        """Number of tokens whose logprob is not finite."""
        return int((self.values == NOT_FINITE_GAP).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PureSegment:
    """Position of a segment in the tokens of its trajectory, with the logprobs of its sampler."""

    start: int
    """Index of the first token, including the prompt."""
    behavior_logprobs: Float32Array  # [tokens]
    temperature: float

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.start + len(self.behavior_logprobs)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Tokens of a trajectory up to its last segment of one version, with their kept sets, and these segments."""

    token_ids: Int32Array
    kept_sets: KeptSets | None
    segments: list[PureSegment]


def rescore(
    store: CheckpointStore,
    trained: Trained,
    published: "PublishedPolicies",
    *,
    dtype: str,
    train_steps: Mapping[int, int],
    advance: Callable[[], None],
) -> Rescoring:
    """Score every pure segment counted in ``trained``, with one load per version, in ascending order.

    ``dtype`` is that of the engine: gaps of a float32 engine that are large are computed again in float64. ``advance``
    is called after each version.
    """
    # Consecutive versions occur in the same batches.
    cached, reading = lru_cache(maxsize=_CACHED_BATCHES)(store.read_batch), threading.Lock()
    gaps: list[VersionGap] = []

    def trajectories(version: int) -> Iterator[Trajectory]:
        for step in sorted(trained.pure_segments[version]):
            with reading:
                groups = cached(step).groups
            for group in groups:
                yield from group.trajectories

    def gap_of(version: int) -> VersionGap:
        measured, bounds, skipped = Gaps(values=np.empty(0), resolution=np.empty(0)), GAP_BOUNDS[dtype], ""
        try:
            policy = published.open(version)
            if policy is None:
                skipped = PRUNED if published.is_prunable(version) else MISSING
            else:
                measured, bounds = _measured(_load(policy), version, partial(trajectories, version), dtype)
        except CheckpointError as error:
            skipped = f"checkpoint refused: {error}"
        segments, tokens = trained.pure_segments[version].total(), trained.pure_tokens[version]
        return _version_gap(version, train_steps.get(version), segments, tokens, measured, bounds, skipped)

    for found in _side_by_side(gap_of, sorted(trained.pure_segments)):
        gaps.append(found)
        advance()
    scored = [gap for gap in gaps if not gap.skipped]
    skipped_gaps = [gap for gap in gaps if gap.skipped]
    announced = [published.announced(gap.policy_version) for gap in scored]
    return Rescoring(
        dtype=dtype,
        bound=GAP_BOUNDS[dtype].token,
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


def _measured(
    scorer: "PolicyScorer", version: int, trajectories: Callable[[], Iterator[Trajectory]], dtype: str
) -> tuple[Gaps, GapBounds]:
    """Return the gaps of a version's tokens and their bounds, in bfloat16 by the rounding of the model itself."""
    exact = partial(_in_dtype, scorer, "float64") if dtype == "float32" else None
    gaps, bounds = gaps_of_version(scorer, version, trajectories(), exact), GAP_BOUNDS[dtype]
    if dtype == "bfloat16" and gaps.mean > LARGE_MEAN:
        rounding = own_rounding(scorer, _in_dtype(scorer, dtype), version, trajectories())
        bounds = replace(bounds, mean=min(bounds.mean, max(LARGE_MEAN, ROUNDING_FACTOR * rounding)))
    return gaps, bounds


def _version_gap(
    version: int, train_step: int | None, segments: int, tokens: int, measured: Gaps, bounds: GapBounds, skipped: str
) -> VersionGap:
    over_bound, excused = measured.over(bounds.token)
    values, counted = measured.values, len(measured.values) - len(excused)
    return VersionGap(
        policy_version=version,
        train_step=train_step,
        segments=segments,
        tokens=tokens,
        largest_gap=float(values.max()) if len(values) else None,
        mean_gap=float((values.sum() - excused.sum()) / counted) if counted else None,
        mean_bound=bounds.mean,
        over_bound=over_bound,
        unresolvable=len(excused),
        largest_unresolvable=float(excused.max(initial=0.0)),
        not_finite=measured.not_finite,
        skipped=skipped,
    )


def gaps_of_version(
    scorer: "PolicyScorer",
    version: int,
    trajectories: Iterable[Trajectory],
    exact: "Callable[[], PolicyScorer] | None" = None,
) -> Gaps:
    """Compute the gap of every token in a pure segment of ``version``.

    Trajectories with a gap over ``LARGE_GAP`` are scored again by ``exact()``, if it is given. For those that remain
    over the bound of float32, the resolution is computed. A logprob that is not finite has the gap ``NOT_FINITE_GAP``.
    """
    values: list[Float64Array] = []
    resolution: list[Float64Array] = []
    for temperature, work in _by_temperature(version, trajectories).items():
        gaps = _gaps(scorer, temperature, work)
        resolved = [np.zeros_like(gap) for gap in gaps]
        large = [at for at, gap in enumerate(gaps) if gap.max() > LARGE_GAP]
        if large and exact is not None:
            exact_scorer = exact()
            rescored = _gaps(exact_scorer, temperature, [work[at] for at in large])
            for at, gap in zip(large, rescored, strict=True):
                gaps[at] = gap
            over = [at for at in large if gaps[at].max() > GAP_BOUNDS["float32"].token]
            effects = exact_scorer.resolution(*_inputs(temperature, [work[at] for at in over]))
            for at, effect in zip(over, effects, strict=True):
                resolved[at] = _segment_values(effect, work[at].segments)
        values += gaps
        resolution += resolved
    return Gaps(values=_joined(values), resolution=_joined(resolution))


def own_rounding(
    fine: "PolicyScorer", coarse: "PolicyScorer", version: int, trajectories: Iterable[Trajectory]
) -> float:
    """Compute the mean gap between two dtypes of the trainer's program, over the tokens of ``gaps_of_version``."""
    gaps: list[Float64Array] = []
    for temperature, work in _by_temperature(version, trajectories).items():
        inputs = _inputs(temperature, work)
        pairs = zip(fine.logprobs(*inputs), coarse.logprobs(*inputs), work, strict=True)
        gaps += [np.abs(_segment_values(one - other, each.segments)) for one, other, each in pairs]
    return float(_joined(gaps).mean())


def _by_temperature(version: int, trajectories: Iterable[Trajectory]) -> dict[float, list[ScoredTokens]]:
    found: dict[float, list[ScoredTokens]] = {}
    for trajectory in trajectories:
        ids = np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids]).astype(np.int32, copy=False)
        sets = trajectory_sets(trajectory)
        segments = pure_segments(trajectory, version)
        for temperature in {segment.temperature for segment in segments}:
            selected = [segment for segment in segments if segment.temperature == temperature]
            end = selected[-1].end
            scored = ScoredTokens(token_ids=ids[:end], kept_sets=sets and slice_sets(sets, 0, end), segments=selected)
            found.setdefault(temperature, []).append(scored)
    return found


def _inputs(temperature: float, work: Sequence[ScoredTokens]) -> tuple[list[Int32Array], float, list[KeptSets | None]]:
    """Return the arguments of ``PolicyScorer.logprobs``."""
    return [each.token_ids for each in work], temperature, [each.kept_sets for each in work]


def _gaps(scorer: "PolicyScorer", temperature: float, work: Sequence[ScoredTokens]) -> list[Float64Array]:
    """Compute the gaps of the segments of each trajectory, one array per trajectory."""
    gaps: list[Float64Array] = []
    for values, each in zip(scorer.logprobs(*_inputs(temperature, work)), work, strict=True):
        behavior = np.concatenate([s.behavior_logprobs for s in each.segments]).astype(np.float64)
        difference = np.abs(_segment_values(values, each.segments) - behavior)
        gaps.append(np.nan_to_num(difference, nan=NOT_FINITE_GAP, posinf=NOT_FINITE_GAP))
    return gaps


def _segment_values(values: FloatArray, segments: Sequence[PureSegment]) -> Float64Array:
    """Select the entries of the segments' tokens; ``values`` has one entry per token from the second one."""
    return np.concatenate([values[s.start - 1 : s.end - 1] for s in segments]).astype(np.float64)


def _joined(arrays: Sequence[Float64Array]) -> Float64Array:
    return np.concatenate(arrays) if arrays else np.empty(0)


def pure_segments(trajectory: Trajectory, version: int) -> list[PureSegment]:
    """Return the non-empty pure segments of one version, in order."""
    segments: list[PureSegment] = []
    start = len(trajectory.prompt.token_ids)
    for segment in trajectory.segments:
        matches = segment.source is SegmentSource.POLICY and segment.pure and segment.policy_version == version
        if matches and len(segment) and segment.behavior_logprobs is not None:
            segments.append(
                PureSegment(start=start, behavior_logprobs=segment.behavior_logprobs, temperature=segment.temperature)
            )
        start += len(segment)
    return segments


def _side_by_side(gap_of: Callable[[int], VersionGap], versions: Sequence[int]) -> Iterator[VersionGap]:
    """Yield the gaps of the versions in order, of as many at the same time as torch leaves cores idle.

    Where torch has all cores, as by default, and on a GPU it is one at a time.
    """
    if not versions:
        return
    with many_imports():
        import torch

        importlib.import_module("rollmesh.trainer.learner.policy_scorer")
    count = 1 if torch.cuda.is_available() else this_machine().cores // torch.get_num_threads()
    if count <= 1:
        yield from map(gap_of, versions)
        return
    pool = ThreadPoolExecutor(min(count, _MOST_MODELS), thread_name_prefix="rescore")
    try:
        yield from pool.map(gap_of, versions)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C waits for no further version


def _load(policy: VerifiedPolicy) -> "PolicyScorer":
    from rollmesh.trainer.learner.policy_scorer import PolicyScorer

    return PolicyScorer.from_policy(policy)


def _in_dtype(scorer: "PolicyScorer", dtype: str) -> "PolicyScorer":
    import torch

    return scorer.in_dtype(getattr(torch, dtype))


class PublishedPolicies:
    """Policy versions of a checkpoint store, checked against the registry if it is available."""

    def __init__(
        self,
        store: CheckpointStore,
        registry: Iterable[PolicyRecord] | None,
        train_steps: Mapping[int, int],
        keep_last: int | None,
    ) -> None:
        """Read the complete policies of ``store``.

        ``registry`` is None when the queue was unreachable; ``train_steps`` contains the train step of each version;
        ``keep_last`` is ``checkpoints.keep_last``, or None without a readable run file.
        """
        self._store = store
        self._keep_last = keep_last
        self._registry = None if registry is None else {record.policy_version: record for record in registry}
        self._train_steps = train_steps
        self._complete = _complete(store)

    def announced(self, version: int) -> bool | None:
        """Tell whether the registry contains the version and ``open`` compares digests; None without a registry."""
        return None if self._registry is None else version in self._registry

    def is_prunable(self, version: int) -> bool:
        """Tell whether the trainer prunes the version: at least ``keep_last`` newer versions exist."""
        newer = sum(other > version for other in _complete(self._store))
        return self._keep_last is not None and newer >= self._keep_last

    def open(self, version: int) -> VerifiedPolicy | None:
        """Return a verified version; None if it is missing.

        Raises CheckpointError for a damaged folder, or one that differs from the announcement in the registry.
        """
        announced, complete = (self._registry or {}).get(version), self._complete.get(version)
        record = announced or complete
        if record is not None:
            try:
                return self._store.open(record)
            except CheckpointError as error:
                # A folder that still exists was not pruned: one of its files is missing.
                if error.reason != Reason.MISSING or _complete(self._store).get(version) == record:
                    raise
        if complete is not None and announced is not None:
            raise CheckpointError(
                f"{complete.path} claims this version; the registry announced {announced.path}, which is missing",
                reason=Reason.MISMATCH,
            )
        unsound = next((u for u in self._store.unsound_policies() if self._may_be(u, version, record)), None)
        if unsound is not None:
            raise CheckpointError(unsound.reason, reason=Reason.TAMPERED)
        return None

    def _may_be(self, unsound: UnsoundPolicy, version: int, record: PolicyRecord | None) -> bool:
        if record is not None:
            return unsound.path == record.path
        if unsound.policy_version is not None:
            return unsound.policy_version == version
        return unsound.train_step == self._train_steps.get(version)


def _complete(store: CheckpointStore) -> dict[int, PolicyRecord]:
    return {record.policy_version: record for record in store.complete_policies()}
