"""Leased trajectory in progress: its tokens, its calls, the requests to stop it and its end."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import numpy as np

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import lines_about
from rollmesh.runtime.spans import NOTHING, Span
from rollmesh.runtime.tracing import tracer
from rollmesh.segments import join_segments, slice_segment
from rollmesh.store.payload import TokenDigest
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
    """One trajectory while a worker holds its lease, with the part of its response that the queue stores."""

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        attempt: int = 1,
        snapshot: bytes | None = None,
        incarnation: int = 0,
        first_lease_time: float = 0.0,
        plan: Mapping[str, Any] | None = None,
    ) -> None:
        self.trajectory: Final = trajectory
        """State at the lease: prompt, saved segments, trace."""
        self.trajectory_id: Final = trajectory.trajectory_id
        self.prompt_token_count: Final = len(trajectory.prompt.token_ids)
        self.attempt: Final = attempt
        """Leases without token progress, this one included."""
        self.first_lease_time: Final = first_lease_time
        """Time of the first lease by any worker, Unix seconds; 0 without a lease (evaluation)."""
        self.plan: Final = plan or {}
        """Plan of the round that launched the trajectory; empty without one."""
        self.segments: list[Segment] = list(trajectory.segments)
        """All tokens after the prompt."""
        self.token_count = trajectory.response_token_count
        """Number of tokens after the prompt."""
        self.saved_token_count = self.token_count
        """Number of tokens that the queue stores."""
        self.newest_version = max(trajectory.policy_versions, default=-1)
        """Newest policy version that sampled a token; -1 without one."""
        self.first_token_reported = False
        """True if the queue stores the policy version of a first token that is not saved yet."""
        self.registrations = 0
        """Number of times that the worker has registered the trajectory again."""
        self.incarnation = incarnation
        """Number of restarts; every write carries it."""
        self.snapshot = snapshot
        """Newest saved state of the environment, taken after a completed turn."""
        self.generator = ""
        """Generator instance of the current or the last call."""
        self.cached_token_count = 0
        """Context tokens that this call found in a prefix cache."""
        self.failed_calls = 0
        """Generation calls in a row that failed without a token."""
        self.generates = False
        """True from the wait for a generator to the end of the answer."""
        self.stop_requested = False
        """True once the reader of the answer needs no more tokens of the current call."""
        self.park_reason: ReleaseReason | None = None
        """Reason of the pending stop request; None without one."""
        self.finish_reason = trajectory.finish_reason
        """Finish reason that the queue stores; None before."""
        self.recorded = False
        """True once the queue stores the outcome or the dead letter."""
        self.closed = False
        """True once the worker has ended its work on the trajectory."""
        self.span: Span = NOTHING
        """Span of this lease in the trajectory's trace."""
        self._digest = TokenDigest()  # of the prefix requested last, which the next request usually extends a little
        self._start_floor = self._call_floor = 0
        self._lost = ""
        self._observer: Callable[[ActiveTrajectory], None] | None = None

    # -- tokens ----------------------------------------------------------------------------------------------------
    def count_under(self, policy_version: int) -> int:
        """Return the number of tokens that a policy version sampled."""
        own = (s for s in self.segments if s.source is SegmentSource.POLICY and s.policy_version == policy_version)
        return sum(len(segment) for segment in own)

    @property
    def unreported_version(self) -> int | None:
        """Policy version of the first token while the queue does not know it; None otherwise."""
        if self.saved_token_count or self.first_token_reported:
            return None
        return next((s.policy_version for s in self.segments if s.source is SegmentSource.POLICY), None)

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
        self._notify()

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

    def restart(self, incarnation: int | None = None) -> None:
        """Drop every token; the queue must have none either. ``incarnation`` is the queue's new number of restarts."""
        self.segments.clear()
        self.token_count = self.saved_token_count = 0
        self.first_token_reported = False
        self._digest = TokenDigest()
        self.newest_version = -1
        self.snapshot = None
        if incarnation is not None:
            self.incarnation = incarnation

    def mark_registered(self, saved_token_count: int) -> None:
        """Note a registration with a server that may have been restored to a state before the last writes."""
        self.saved_token_count = min(saved_token_count, self.token_count)
        self.first_token_reported = False
        self.registrations += 1
        self._notify()

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

    # -- generation calls ------------------------------------------------------------------------------------------
    @property
    def min_version(self) -> int:
        """Oldest policy version that may sample the next token."""
        # docs/architecture.md: The staleness bound
        own = self._start_floor if self.newest_version < 0 else self.newest_version
        return max(own, self._call_floor, 0)

    def set_floors(self, *, start: int, call: int) -> None:
        """Set the oldest policy versions: ``start`` for a trajectory without tokens, ``call`` for any call."""
        self._start_floor, self._call_floor = start, call

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Mark the time of an answer, its wait for a generator included."""
        self.generates = True
        try:
            yield
        finally:
            self.generates = False

    @property
    def waits(self) -> bool:
        """True while the trajectory needs no generator: its tool, its environment or its agent works."""
        return not (self.generates or self.finished)

    def begin_call(self, generator: str) -> None:
        """Note the generator of a new call; a stop request concerned the call before."""
        self.generator = generator
        self.cached_token_count = 0
        self.stop_requested = False

    def request_stop(self, token_count: int) -> None:
        """End the current call with the current chunk; drop unsaved tokens after the first ``token_count``."""
        self.stop_requested = True
        self.trim(token_count)

    # -- requests to stop the work ---------------------------------------------------------------------------------
    def observe(self, observer: "Callable[[ActiveTrajectory], None]") -> None:
        """Call ``observer`` at new tokens, a stop request or its withdrawal, a lost lease and the end of the work."""
        self._observer = observer

    def _notify(self) -> None:
        if self._observer is not None:
            self._observer(self)

    def park(self, reason: ReleaseReason) -> None:
        """Request that the trajectory stop at its next step and become partial; a shutdown overrides a pause."""
        if self.park_reason is None or reason is ReleaseReason.DRAINED:
            self.park_reason = reason
        self._notify()

    def unpark(self) -> None:
        """Withdraw a pause that has not stopped the trajectory yet."""
        if self.park_reason is ReleaseReason.PAUSED:
            self.park_reason = None
        self._notify()

    def lose(self, reason: str) -> None:
        """Mark the lease as lost; the next check raises LetGo."""
        self._lost = reason
        self._notify()

    @property
    def wanted(self) -> bool:
        """True while the trajectory should continue."""
        return self.park_reason is None and not self._lost

    @property
    def lost(self) -> str:
        """Reason for the loss of the lease; empty while this worker holds it."""
        return self._lost

    def check_lost(self) -> None:
        """Raise LetGo if the lease is lost: the only reason to end a call in progress."""
        if self._lost:
            raise LetGo(self._lost)

    def check(self) -> None:
        """Raise LetGo or Parked if the trajectory must stop."""
        self.check_lost()
        if self.park_reason is not None:
            raise Parked(self.park_reason)

    # -- end -------------------------------------------------------------------------------------------------------
    @property
    def finished(self) -> bool:
        """True once the queue stores the last token; only the reward is missing."""
        return self.finish_reason is not None

    def close(self) -> None:
        """End the worker's work on the trajectory."""
        self.closed = True
        self._notify()

    def result(self, reason: FinishReason) -> Trajectory:
        """Return the finished trajectory, for scoring."""
        return replace(self.trajectory, segments=join_segments(self.segments), finish_reason=reason)

    @property
    def traceparent(self) -> str:
        """Parent of further spans of this attempt; empty without a trace."""
        return self.span.traceparent or self.trajectory.traceparent


@contextmanager
def attempt_on(active: ActiveTrajectory) -> Iterator[None]:
    """Open the span of one lease and add the trajectory's id to the log lines within it."""
    span = tracer().span(
        "attempt",
        active.trajectory.traceparent,
        trajectory=active.trajectory_id,
        attempt=active.attempt,
        resumed_tokens=active.saved_token_count,
    )
    active.span = span
    with lines_about(active.trajectory_id), span:
        yield


def end_of_trajectory(active: ActiveTrajectory, outcome: str, reward: float) -> None:
    """Send the root span of the trace, from the first lease to the outcome.

    The worker that records the outcome sends it, so the trace has its root even if earlier workers were killed.
    """
    if not tracer().on:
        return
    trajectory = active.trajectory
    start_ns = min(int(active.first_lease_time * 1e9), time.time_ns()) if active.first_lease_time else None
    tracer().span(
        "trajectory",
        trajectory.traceparent,
        root=True,
        start_ns=start_ns,
        trajectory=trajectory.trajectory_id,
        group=trajectory.group_id,
        birth_version=trajectory.birth_version,
        newest_version=active.newest_version,
        tokens=active.token_count,
        finish_reason=active.finish_reason.value if active.finish_reason is not None else "",
        outcome=outcome,
        reward=reward,
    ).end()
