"""Leased trajectory in progress: its sampled tokens, its saved tokens and the requests to stop it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from rollmesh.errors import RollmeshError
from rollmesh.runtime.spans import NOTHING, Span
from rollmesh.segments import join_segments, slice_segment
from rollmesh.store.digest import TokenDigest
from rollmesh.store.queue_types import HeldTokens, ReleaseReason
from rollmesh.types import FinishReason, Int32Array, Segment, SegmentSource, Trajectory


class Parked(RollmeshError):
    """Signal that the trajectory must stop and become partial: its tokens are saved and its lease is released."""

    def __init__(self, reason: ReleaseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class LetGo(RollmeshError):
    """Signal that this worker no longer holds the lease of the trajectory."""


class ActiveTrajectory:
    """One trajectory while a worker holds its lease."""

    def __init__(
        self, trajectory: Trajectory, attempt: int = 1, snapshot: bytes | None = None, incarnation: int = 0
    ) -> None:
        self.incarnation = incarnation
        """Number of restarts; every write carries it."""
        self.snapshot = snapshot
        """Newest saved state of the environment, taken after a completed turn."""
        self.attempt = attempt
        """Leases without token progress, this one included."""
        self.failed_calls = 0
        """Generation calls in a row that failed without a token."""
        self.trajectory = trajectory
        """State at the lease: prompt, saved segments, trace."""
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
        """Generator instance of the current or the last call."""
        self.first_lease_time = 0.0
        """Time of the first lease by any worker, Unix seconds; 0 without a lease (evaluation)."""
        self.span: Span = NOTHING
        """Span of this lease in the trajectory's trace."""
        self.changed: Callable[[], None] = _nothing
        """Callback for new tokens, a stop request or its withdrawal, a lost lease and the end of the work."""
        self.first_token_reported = False
        """True once the queue stores the policy version of a first token that is not saved yet."""
        self.stop_requested = False
        """True once the reader of the answer needs no more tokens: the current call ends with the current chunk."""
        self.closed = False
        """True once the worker has ended its work on the trajectory."""
        self.recorded = False
        """True once the queue stores the outcome or the dead letter."""
        self._park: ReleaseReason | None = None
        self._lost = ""
        self._digest = TokenDigest()
        """Digest of the prefix requested last; the next request usually extends it by a few tokens."""

    @property
    def finished(self) -> bool:
        """True once the queue stores the last token; only the reward is missing."""
        return self.finish_reason is not None

    @property
    def trajectory_id(self) -> str:
        """Identity of the trajectory."""
        return self.trajectory.trajectory_id

    @property
    def traceparent(self) -> str:
        """Parent of further spans of this attempt; empty without a trace."""
        return self.span.traceparent or self.trajectory.traceparent

    @property
    def min_version(self) -> int:
        """Oldest policy version that may sample the next token."""
        # docs/architecture.md: The staleness bound
        own = self.start_floor if self.newest_version < 0 else self.newest_version
        return max(own, self.call_floor, 0)

    @property
    def prompt_token_count(self) -> int:
        """Length of the prompt."""
        return len(self.trajectory.prompt.token_ids)

    def context_ids(self) -> Int32Array:
        """Return the prompt and all later tokens, int32 [prompt_tokens + token_count]."""
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
        """Drop the tokens after the first ``token_count``, but no saved ones."""
        kept = max(token_count, self.saved_token_count)
        self._digest = TokenDigest()
        while self.token_count > kept:
            last = self.segments.pop()
            self.token_count -= len(last)
            if self.token_count < kept:
                self.segments.append(slice_segment(last, 0, kept - self.token_count))
                self.token_count = kept
        written = [s.policy_version for s in self.segments if s.source is SegmentSource.POLICY]
        self.newest_version = max(written, default=-1)

    @property
    def first_version(self) -> int | None:
        """Policy version of the first sampled token; None without one."""
        return next((s.policy_version for s in self.segments if s.source is SegmentSource.POLICY), None)

    def unsaved(self) -> list[Segment]:
        """Return the segments after the saved tokens; the first one is sliced if it is partly saved."""
        return list(join_segments(self._between(self.saved_token_count, self.token_count)))

    def digest_at(self, token_count: int) -> TokenDigest:
        """Return the digest of the first ``token_count`` tokens."""
        if token_count < self._digest.token_count:
            self._digest = TokenDigest()
        self._digest = self._digest.extended(self._between(self._digest.token_count, token_count))
        return self._digest

    def held_tokens(self) -> HeldTokens:
        """Return the state that the worker sends when it registers its trajectories again."""
        return HeldTokens(
            trajectory_id=self.trajectory_id,
            incarnation=self.incarnation,
            token_count=lambda: self.token_count,
            digest_at=self.digest_at,
        )

    def _between(self, first: int, last: int) -> Iterator[Segment]:
        """Yield the segments of the tokens from ``first`` up to ``last``, sliced at both ends."""
        start = 0
        for segment in self.segments:
            end = start + len(segment)
            if end > first and start < last:
                yield slice_segment(segment, max(0, first - start), last - start)
            start = end

    def restart(self) -> None:
        """Drop every token; the queue must have none either."""
        self.segments.clear()
        self.token_count = self.saved_token_count = 0
        self.first_token_reported = False
        self._digest = TokenDigest()
        self.newest_version = -1
        self.snapshot = None

    def result(self, reason: FinishReason) -> Trajectory:
        """Return the finished trajectory, for scoring."""
        return replace(self.trajectory, segments=join_segments(self.segments), finish_reason=reason)

    def park(self, reason: ReleaseReason) -> None:
        """Request that the trajectory stop at its next step and become partial; a shutdown overrides a pause."""
        if self._park is None or reason is ReleaseReason.DRAINED:
            self._park = reason
        self.changed()

    def unpark(self) -> None:
        """Withdraw a pause that has not stopped the trajectory yet."""
        if self._park is ReleaseReason.PAUSED:
            self._park = None
        self.changed()

    def lose(self, reason: str) -> None:
        """Mark the lease as lost; the next check raises LetGo."""
        self._lost = reason
        self.changed()

    @property
    def park_reason(self) -> ReleaseReason | None:
        """Reason of the pending stop request; None without one."""
        return self._park

    @property
    def wanted(self) -> bool:
        """True while the trajectory should continue."""
        return self._park is None and not self._lost

    def check_lost(self) -> None:
        """Raise LetGo if the lease is lost: the only reason to end a call in progress."""
        if self._lost:
            raise LetGo(self._lost)

    def check(self) -> None:
        """Raise LetGo or Parked if the trajectory must stop."""
        self.check_lost()
        if self._park is not None:
            raise Parked(self._park)


def _nothing() -> None:
    """Default of ``changed``."""
