"""Timeline of rollouts: the tokens of each policy version, poll by poll."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rollmesh.gateway.models import RolloutSpan, Timeline, TimelineDelta, VersionInterval
from rollmesh.store.inspection import TrajectoryMark
from rollmesh.types import TrajectoryState

GONE = "gone"
"""State of a rollout whose group has left the queue."""


@dataclass(slots=True)
class _Interval:
    policy_version: int
    start: float
    end: float
    tokens: int


@dataclass(slots=True)
class _Rollout:
    trajectory_id: str
    start: float
    worker: str
    birth_version: int
    tokens: int
    generator: str = ""
    state: str = TrajectoryState.LEASED.value
    end: float | None = None
    intervals: list[_Interval] = field(default_factory=list)

    def grow(self, mark: TrajectoryMark, now: float) -> bool:
        """Apply the mark of one poll; return True if it changed the rollout."""
        changed = (mark.token_count, mark.state, mark.generator) != (self.tokens, self.state, self.generator)
        new = mark.token_count - self.tokens
        if new < 0:  # its environment was lost and the rollout restarted
            self.intervals, new = [], mark.token_count
        if new and mark.newest_version is not None:
            self._add(mark.newest_version, new, now)
        self.tokens, self.state, self.generator = mark.token_count, mark.state, mark.generator
        return changed

    def _add(self, version: int, tokens: int, now: float) -> None:
        last = self.intervals[-1] if self.intervals else None
        if last is not None and last.policy_version == version:
            last.end = now
            last.tokens += tokens
        else:
            start = last.end if last is not None else self.start
            self.intervals.append(_Interval(policy_version=version, start=start, end=now, tokens=tokens))

    def span(self) -> RolloutSpan:
        """Return the rollout as the API shows it."""
        intervals = [
            VersionInterval(policy_version=i.policy_version, start=i.start, end=i.end, tokens=i.tokens)
            for i in self.intervals
        ]
        return RolloutSpan(
            id=self.trajectory_id,
            start=self.start,
            end=self.end,
            state=self.state,
            worker=self.worker,
            generator=self.generator or None,
            birth_version=self.birth_version,
            tokens=self.tokens,
            intervals=intervals,
        )


class TimelineTracker:
    """Tracker of a bounded number of rollouts: those in progress and those that ended within the window."""

    def __init__(self, most: int, window_seconds: float) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._live: OrderedDict[str, _Rollout] = OrderedDict()
        self._ended: OrderedDict[str, _Rollout] = OrderedDict()
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

    def is_followed(self, trajectory_id: str) -> bool:
        """Tell whether a rollout is already followed."""
        return trajectory_id in self._live

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
            changed=[rollout.span() for rollout in taken if rollout is not None and rollout.trajectory_id not in gone],
            removed=removed,
        )

    def timeline(self) -> Timeline:
        """Return all known rollouts."""
        rollouts = sorted(
            (*self._live.values(), *self._ended.values()), key=lambda rollout: (rollout.start, rollout.trajectory_id)
        )
        return Timeline(
            time=self._time,
            window_seconds=self._window_seconds,
            in_flight=self._in_flight,
            left_out=self._left_out(),
            rollouts=[rollout.span() for rollout in rollouts],
        )

    def _left_out(self) -> int:
        return max(0, self._in_flight - len(self._live))

    def _update_one(
        self, trajectory_id: str, mark: TrajectoryMark | None, workers: Mapping[str, str], now: float
    ) -> _Rollout | None:
        """Return the rollout if the poll has changed it."""
        rollout = self._live.get(trajectory_id)
        leased = mark is not None and mark.state == TrajectoryState.LEASED
        if rollout is None:
            return self._begin(mark, workers, now) if mark is not None and leased else None
        changed = rollout.grow(mark, now) if mark is not None else True
        if leased and mark is not None:
            worker = workers.get(mark.session, rollout.worker)
            changed, rollout.worker = changed or worker != rollout.worker, worker
            return rollout if changed else None
        rollout.end = now
        rollout.state = GONE if mark is None else mark.state
        self._ended[trajectory_id] = self._live.pop(trajectory_id)
        return rollout

    def _begin(self, mark: TrajectoryMark, workers: Mapping[str, str], now: float) -> _Rollout | None:
        if self.room <= 0:
            return None
        before = self._ended.pop(mark.trajectory_id, None)
        if before is not None:  # leased again after a pause
            before.end = None
            before.worker = workers.get(mark.session, before.worker)
            before.grow(mark, now)
            rollout = before
        else:
            rollout = _Rollout(
                trajectory_id=mark.trajectory_id,
                start=now if mark.lease_time is None else min(now, mark.lease_time),
                worker=workers.get(mark.session, ""),
                birth_version=mark.birth_version or 0,
                tokens=0,
            )
            rollout.grow(mark, now)
        self._live[mark.trajectory_id] = rollout
        return rollout

    def _remove_old(self, now: float) -> list[str]:
        removed = []
        while self._ended:
            trajectory_id, rollout = next(iter(self._ended.items()))
            old = rollout.end is not None and now - rollout.end > self._window_seconds
            if not old and len(self._live) + len(self._ended) <= self._most:
                break
            del self._ended[trajectory_id]
            removed.append(trajectory_id)
        return removed


def new_ids(found: Sequence[str], rollouts: TimelineTracker) -> list[str]:
    """Return the ids of ``found`` that are not followed, limited by the room."""
    return [i for i in dict.fromkeys(found) if not rollouts.is_followed(i)][: max(0, rollouts.room)]
