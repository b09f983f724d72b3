"""Leased trajectory in progress: its calls, the requests to stop it and its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from rollmesh.errors import RollmeshError
from rollmesh.runtime.spans import NOTHING, Span
from rollmesh.segments import join_segments
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import FinishReason, Segment, Trajectory
from rollmesh.worker.response_tokens import ResponseTokens


class Parked(RollmeshError):
    """Signal that the trajectory must stop and become partial: its tokens are saved and its lease is released."""

    def __init__(self, reason: ReleaseReason) -> None:
        super().__init__(reason)
        self.reason = reason


class LetGo(RollmeshError):
    """Signal that this worker no longer holds the lease of the trajectory."""


class ActiveTrajectory(ResponseTokens):
    """One trajectory while a worker holds its lease; every change is one of its methods."""

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
        super().__init__(trajectory, snapshot, incarnation)
        self.attempt: Final = attempt
        """Leases without token progress, this one included."""
        self.first_lease_time: Final = first_lease_time
        """Time of the first lease by any worker, Unix seconds; 0 without a lease (evaluation)."""
        self.plan: Final = plan or {}
        """Plan of the round that launched the trajectory; empty without one."""
        self._start_floor = 0
        self._call_floor = 0
        self._generator = ""
        self._failed_calls = 0
        self._stop_requested = False
        self._park: ReleaseReason | None = None
        self._lost = ""
        self._finish_reason = trajectory.finish_reason
        self._recorded = False
        self._closed = False
        self._span: Span = NOTHING
        self._observer: Callable[[ActiveTrajectory], None] | None = None

    def add(self, segment: Segment) -> None:
        """Append tokens."""
        super().add(segment)
        if len(segment):
            self._notify()

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

    @property
    def generator(self) -> str:
        """Generator instance of the current or the last call."""
        return self._generator

    @property
    def failed_calls(self) -> int:
        """Generation calls in a row that failed without a token."""
        return self._failed_calls

    @property
    def stop_requested(self) -> bool:
        """True once the reader of the answer needs no more tokens of the current call."""
        return self._stop_requested

    def begin_call(self, generator: str) -> None:
        """Note the generator of a new call; a stop request concerned the call before."""
        self._generator = generator
        self._stop_requested = False

    def call_failed(self) -> None:
        """Count a call that failed without a token."""
        self._failed_calls += 1

    def call_progressed(self) -> None:
        """End the row of failed calls."""
        self._failed_calls = 0

    def request_stop(self, token_count: int) -> None:
        """End the current call with the current chunk; drop unsaved tokens after the first ``token_count``."""
        self._stop_requested = True
        self.trim(token_count)

    # -- requests to stop the work ---------------------------------------------------------------------------------
    def observe(self, observer: Callable[[ActiveTrajectory], None]) -> None:
        """Call ``observer`` at new tokens, a stop request or its withdrawal, a lost lease and the end of the work."""
        self._observer = observer

    def _notify(self) -> None:
        if self._observer is not None:
            self._observer(self)

    def park(self, reason: ReleaseReason) -> None:
        """Request that the trajectory stop at its next step and become partial; a shutdown overrides a pause."""
        if self._park is None or reason is ReleaseReason.DRAINED:
            self._park = reason
        self._notify()

    def unpark(self) -> None:
        """Withdraw a pause that has not stopped the trajectory yet."""
        if self._park is ReleaseReason.PAUSED:
            self._park = None
        self._notify()

    def lose(self, reason: str) -> None:
        """Mark the lease as lost; the next check raises LetGo."""
        self._lost = reason
        self._notify()

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

    # -- end -------------------------------------------------------------------------------------------------------
    @property
    def finish_reason(self) -> FinishReason | None:
        """Finish reason that the queue stores; None before."""
        return self._finish_reason

    @property
    def finished(self) -> bool:
        """True once the queue stores the last token; only the reward is missing."""
        return self._finish_reason is not None

    @property
    def recorded(self) -> bool:
        """True once the queue stores the outcome or the dead letter."""
        return self._recorded

    @property
    def closed(self) -> bool:
        """True once the worker has ended its work on the trajectory."""
        return self._closed

    def mark_finished(self, reason: FinishReason) -> None:
        """Note that the queue stores the last token."""
        self._finish_reason = reason

    def mark_recorded(self) -> None:
        """Note that the queue stores the outcome or the dead letter."""
        self._recorded = True

    def close(self) -> None:
        """End the worker's work on the trajectory."""
        self._closed = True
        self._notify()

    def result(self, reason: FinishReason) -> Trajectory:
        """Return the finished trajectory, for scoring."""
        return replace(self.trajectory, segments=join_segments(self.segments), finish_reason=reason)

    # -- trace -----------------------------------------------------------------------------------------------------
    @property
    def span(self) -> Span:
        """Span of this lease in the trajectory's trace."""
        return self._span

    @property
    def traceparent(self) -> str:
        """Parent of further spans of this attempt; empty without a trace."""
        return self._span.traceparent or self.trajectory.traceparent

    def begin_attempt(self, span: Span) -> None:
        """Note the span of this lease."""
        self._span = span
