"""Timeline of rollouts: the tokens of each policy version, poll by poll."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rollmesh.gateway.models.live import RolloutSpan, Timeline, TimelineDelta, VersionInterval
from rollmesh.store.inspection import TrajectoryMark
from rollmesh.types import TrajectoryState

GONE = "gone"
"""State of a rollout whose group has left the queue."""


class TimelineTracker:
    """Tracker of a bounded number of rollouts: those in progress and those that ended within the window."""

    def __init__(self, most: int, window_seconds: float) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._live: OrderedDict[str, RolloutSpan] = OrderedDict()
        self._ended: OrderedDict[str, RolloutSpan] = OrderedDict()
        self._time = 0.0
        self._in_flight = 0

    @property
    def followed(self) -> list[str]:
        """Rollouts in progress, whose marks the next poll must read."""
        return list(self._live)

    @property
    def room(self) -> int:
        """Number of further rollouts to follow; a quarter of the capacity is reserved for ended rollouts."""
        return self._most - self._most // 4 - len(self._live)

    def new_ids(self, found: Sequence[str]) -> list[str]:
        """Return the ids that are not followed yet, as many as there is room for."""
        return [i for i in dict.fromkeys(found) if i not in self._live][: max(0, self.room)]

    def update(
        self,
        now: float,
        marks: Mapping[str, TrajectoryMark | None],
        workers: Mapping[str, str],
        in_flight: int,
    ) -> TimelineDelta:
        """Apply one poll: marks of followed and new rollouts; ``workers`` are names by session."""
        self._time, self._in_flight = now, in_flight
        taken = [self._update_one(trajectory_id, mark, workers, now) for trajectory_id, mark in marks.items()]
        removed = self._remove_old(now)
        gone = set(removed)
        return TimelineDelta(
            time=now,
            in_flight=in_flight,
            left_out=self._left_out(),
            changed=[span for span in taken if span is not None and span.id not in gone],
            removed=removed,
        )

    def timeline(self) -> Timeline:
        """Return all known rollouts."""
        return Timeline(
            time=self._time,
            window_seconds=self._window_seconds,
            in_flight=self._in_flight,
            left_out=self._left_out(),
            rollouts=sorted((*self._live.values(), *self._ended.values()), key=lambda span: (span.start, span.id)),
        )

    def _left_out(self) -> int:
        return max(0, self._in_flight - len(self._live))

    def _update_one(
        self, trajectory_id: str, mark: TrajectoryMark | None, workers: Mapping[str, str], now: float
    ) -> RolloutSpan | None:
        """Return the rollout if the poll has changed it."""
        known = self._live.get(trajectory_id)
        leased = mark is not None and mark.state == TrajectoryState.LEASED
        if known is None:
            return self._begin(mark, workers, now) if mark is not None and leased else None
        span = known if mark is None else _grown(known, mark, now)
        if mark is not None and leased:
            self._live[trajectory_id] = span = span.model_copy(
                update={"worker": workers.get(mark.session, known.worker)}
            )
            return span if span != known else None
        del self._live[trajectory_id]
        self._ended[trajectory_id] = span = span.model_copy(
            update={"end": now, "state": GONE if mark is None else mark.state}
        )
        return span

    def _begin(self, mark: TrajectoryMark, workers: Mapping[str, str], now: float) -> RolloutSpan | None:
        if self.room <= 0:
            return None
        before = self._ended.pop(mark.trajectory_id, None)
        if before is not None:  # leased again after a pause
            span = before.model_copy(update={"end": None, "worker": workers.get(mark.session, before.worker)})
        else:
            span = RolloutSpan(
                id=mark.trajectory_id,
                start=now if mark.lease_time is None else min(now, mark.lease_time),
                end=None,
                state=mark.state,
                worker=workers.get(mark.session, ""),
                generator=None,
                birth_version=mark.birth_version or 0,
                tokens=0,
                intervals=[],
            )
        self._live[mark.trajectory_id] = span = _grown(span, mark, now)
        return span

    def _remove_old(self, now: float) -> list[str]:
        removed = []
        while self._ended:
            trajectory_id, span = next(iter(self._ended.items()))
            old = span.end is not None and now - span.end > self._window_seconds
            if not old and len(self._live) + len(self._ended) <= self._most:
                break
            del self._ended[trajectory_id]
            removed.append(trajectory_id)
        return removed


def _grown(span: RolloutSpan, mark: TrajectoryMark, now: float) -> RolloutSpan:
    """Return the rollout with the mark of one poll."""
    new, intervals = mark.token_count - span.tokens, span.intervals
    if new < 0:  # its environment was lost and the rollout restarted
        new, intervals = mark.token_count, []
    if new and mark.newest_version is not None:
        version = mark.newest_version
        *earlier, last = intervals or [
            VersionInterval(policy_version=version, start=span.start, end=span.start, tokens=0)
        ]
        if last.policy_version == version:
            last = last.model_copy(update={"end": now, "tokens": last.tokens + new})
            intervals = [*earlier, last]
        else:
            added = VersionInterval(policy_version=version, start=last.end, end=now, tokens=new)
            intervals = [*intervals, added]
    changes = {"tokens": mark.token_count, "state": mark.state, "generator": mark.generator or None}
    return span.model_copy(update={**changes, "intervals": intervals})
