"""A trajectory in the hands of this worker: what was sampled, what is saved, and whether it has to be let go."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rollmesh.errors import RollmeshError
from rollmesh.runtime.spans import NOTHING, Span
from rollmesh.segments import join_segments, part_of
from rollmesh.store.digest import TokenDigest
from rollmesh.store.queue_types import HeldTokens, ReleaseReason
from rollmesh.types import FinishReason, Int32Array, Segment, SegmentSource, Trajectory


class Parked(RollmeshError):
    """The trajectory comes to rest as a partial one: its tokens are saved and the lease goes back."""

    def __init__(self, reason: ReleaseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class LetGo(RollmeshError):
    """The queue no longer wants this worker to continue the trajectory."""


class ActiveTrajectory:
    """One trajectory while a worker holds it. Tokens are only ever appended."""

    def __init__(
        self, trajectory: Trajectory, attempt: int = 1, snapshot: bytes | None = None, incarnation: int = 0
    ) -> None:
        self.incarnation = incarnation
        """How often it has begun again; every write states it."""
        self.snapshot = snapshot
        """State of its environment after a completed turn, as it was saved last."""
        self.attempt = attempt
        """Leases without token progress, this one included."""
        self.failed_calls = 0
        """Generation calls in a row that broke without a token."""
        self.trajectory = trajectory
        """As it was leased: prompt, saved segments, trace."""
        self.segments: list[Segment] = list(trajectory.segments)
        self.token_count = trajectory.response_token_count
        self.saved_token_count = self.token_count
        self.newest_version = max(trajectory.policy_versions, default=-1)
        self.start_floor = 0
        """Oldest policy version on which a trajectory without tokens may start (Desired.start_at_version)."""
        self.call_floor = 0
        """Oldest policy version for any call (Desired.interrupt_below_version)."""
        self.finish_reason = trajectory.finish_reason
        self.generator = ""
        """Instance of the generator whose call is under way, or was the last."""
        self.first_lease_time = 0.0
        """When it was first leased, by whomever, in Unix seconds; 0 for one that is not leased (evaluation)."""
        self.span: Span = NOTHING
        """What this worker does with it, in the trajectory's trace."""
        self.changed: Callable[[], None] = _nothing
        """Called when tokens arrive, when it is to come to rest or to go on, is lost, or is no longer held."""
        self.first_token_reported = False
        """Whether the queue knows the policy version of the first token although it is not saved."""
        self.enough = False
        """Whoever reads the answer needs no more of it: a call under way ends with the chunk at hand."""
        self.over = False
        """The worker has ended its work on it."""
        self.recorded = False
        """The queue has its outcome, or its dead letter."""
        self._park: ReleaseReason | None = None
        self._lost = ""
        self._digest = TokenDigest()
        """Of the tokens that were asked about last: the next question is mostly about a few more."""

    @property
    def finished(self) -> bool:
        """Whether the queue has its last token; what is left is the reward."""
        return self.finish_reason is not None

    @property
    def trajectory_id(self) -> str:
        """Identity of the trajectory."""
        return self.trajectory.trajectory_id

    @property
    def traceparent(self) -> str:
        """Where further spans of this attempt belong; empty when there is no trace."""
        return self.span.traceparent or self.trajectory.traceparent

    @property
    def min_version(self) -> int:
        """Oldest policy version that may write the next token."""
        own = self.start_floor if self.newest_version < 0 else self.newest_version
        return max(own, self.call_floor, 0)

    @property
    def prompt_token_count(self) -> int:
        """Length of the prompt."""
        return len(self.trajectory.prompt.token_ids)

    def context_ids(self) -> Int32Array:
        """Prompt and everything since, int32 [prompt_tokens + token_count]."""
        parts = [self.trajectory.prompt.token_ids, *(s.token_ids for s in self.segments)]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def add(self, segment: Segment) -> None:
        """Append tokens."""
        if len(segment) == 0:
            return
        self.segments.append(segment)
        self.token_count += len(segment)
        if segment.source is SegmentSource.POLICY:
            self.newest_version = max(self.newest_version, segment.policy_version)
        self.changed()

    def trim(self, token_count: int) -> None:
        """Forget the tokens after the first ``token_count``; those that are saved stay."""
        kept = max(token_count, self.saved_token_count)
        self._digest = TokenDigest()
        while self.token_count > kept:
            last = self.segments.pop()
            self.token_count -= len(last)
            if self.token_count < kept:
                self.segments.append(part_of(last, 0, kept - self.token_count))
                self.token_count = kept
        written = [s.policy_version for s in self.segments if s.source is SegmentSource.POLICY]
        self.newest_version = max(written, default=-1)

    @property
    def first_version(self) -> int | None:
        """Policy version of the first token; None before it."""
        return next((s.policy_version for s in self.segments if s.source is SegmentSource.POLICY), None)

    def unsaved(self) -> list[Segment]:
        """Segments after the saved tokens; the first one is sliced where the saved part ends inside it."""
        return list(join_segments(self._between(self.saved_token_count, self.token_count)))

    def digest_at(self, token_count: int) -> TokenDigest:
        """Digest of the first ``token_count`` tokens."""
        if token_count < self._digest.token_count:
            self._digest = TokenDigest()
        self._digest = self._digest.extended(self._between(self._digest.token_count, token_count))
        return self._digest

    def stated(self) -> HeldTokens:
        """What the queue is told of it when everything held is registered again."""
        return HeldTokens(
            trajectory_id=self.trajectory_id,
            incarnation=self.incarnation,
            token_count=lambda: self.token_count,
            digest_at=self.digest_at,
        )

    def _between(self, first: int, last: int) -> Iterator[Segment]:
        """The tokens from ``first`` up to ``last``; segments are cut where they end inside one."""
        start = 0
        for segment in self.segments:
            end = start + len(segment)
            if end > first and start < last:
                yield part_of(segment, max(0, first - start), last - start)
            start = end

    def restart(self) -> None:
        """Forget every token; the queue has none either."""
        self.segments.clear()
        self.token_count = self.saved_token_count = 0
        self.first_token_reported = False
        self._digest = TokenDigest()
        self.newest_version = -1
        self.snapshot = None

    def result(self, reason: FinishReason) -> Trajectory:
        """The trajectory as it ended, for scoring."""
        return replace(self.trajectory, segments=join_segments(self.segments), finish_reason=reason)

    def park(self, reason: ReleaseReason) -> None:
        """Ask the trajectory to come to rest at its next step; a shutdown outweighs a pause."""
        if self._park is None or reason is ReleaseReason.DRAINED:
            self._park = reason
        self.changed()

    def unpark(self) -> None:
        """The pause ended before the trajectory came to rest."""
        if self._park is ReleaseReason.PAUSED:
            self._park = None
        self.changed()

    def lose(self, reason: str) -> None:
        """The queue does not hold the trajectory for this worker any more."""
        self._lost = reason
        self.changed()

    @property
    def parking(self) -> ReleaseReason | None:
        """Why it is to come to rest; None when it is not."""
        return self._park

    @property
    def wanted(self) -> bool:
        """Whether the trajectory should go on."""
        return self._park is None and not self._lost

    def check_lost(self) -> None:
        """Raise LetGo when the queue has given the trajectory up; a call under way ends for that reason only."""
        if self._lost:
            raise LetGo(self._lost)

    def check(self) -> None:
        """Raise LetGo or Parked when the trajectory must not go on."""
        self.check_lost()
        if self._park is not None:
            raise Parked(self._park)


def _nothing() -> None:
    """Nobody looks."""
