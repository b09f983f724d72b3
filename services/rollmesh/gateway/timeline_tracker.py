"""The timeline: which rollouts are in flight, and which policy version wrote what of them, look by look."""

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
class _Lane:
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
        """Take in what a look shows; returns whether anything is new."""
        changed = (mark.token_count, mark.state, mark.generator) != (self.tokens, self.state, self.generator)
        new = mark.token_count - self.tokens
        if new < 0:  # an environment that was lost: the rollout begins again
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
        """As the API shows it."""
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
    """Follows a bounded number of rollouts, those in flight and those that ended within the window."""

    def __init__(self, most: int, window_seconds: float) -> None:
        self._most = most
        self._window_seconds = window_seconds
        self._live: OrderedDict[str, _Lane] = OrderedDict()
        self._ended: OrderedDict[str, _Lane] = OrderedDict()
        self._time = 0.0
        self._in_flight = 0

    @property
    def followed(self) -> list[str]:
        """Rollouts in flight whose marks the next look has to bring."""
        return list(self._live)

    @property
    def room(self) -> int:
        """How many more rollouts can be followed: a quarter of the places is for those that have ended."""
        return self._most - self._most // 4 - len(self._live)

    def knows(self, trajectory_id: str) -> bool:
        """Whether a rollout is followed already."""
        return trajectory_id in self._live

    def look(
        self,
        now: float,
        marks: Mapping[str, TrajectoryMark | None],
        workers: Mapping[str, str],
        in_flight: int,
    ) -> TimelineDelta:
        """Take in one look: marks of the followed rollouts and of new ones; ``workers`` are names by session."""
        self._time, self._in_flight = now, in_flight
        taken = [self._take(trajectory_id, mark, workers, now) for trajectory_id, mark in marks.items()]
        removed = self._forget(now)
        gone = set(removed)
        return TimelineDelta(
            time=now,
            in_flight=in_flight,
            left_out=self._left_out(),
            changed=[lane.span() for lane in taken if lane is not None and lane.trajectory_id not in gone],
            removed=removed,
        )

    def timeline(self) -> Timeline:
        """Everything that is known."""
        lanes = sorted((*self._live.values(), *self._ended.values()), key=lambda lane: (lane.start, lane.trajectory_id))
        return Timeline(
            time=self._time,
            window_seconds=self._window_seconds,
            in_flight=self._in_flight,
            left_out=self._left_out(),
            rollouts=[lane.span() for lane in lanes],
        )

    def _left_out(self) -> int:
        return max(0, self._in_flight - len(self._live))

    def _take(
        self, trajectory_id: str, mark: TrajectoryMark | None, workers: Mapping[str, str], now: float
    ) -> _Lane | None:
        """The rollout's lane if the look has changed it."""
        lane = self._live.get(trajectory_id)
        leased = mark is not None and mark.state == TrajectoryState.LEASED
        if lane is None:
            return self._begin(mark, workers, now) if mark is not None and leased else None
        changed = lane.grow(mark, now) if mark is not None else True
        if leased and mark is not None:
            worker = workers.get(mark.session, lane.worker)
            changed, lane.worker = changed or worker != lane.worker, worker
            return lane if changed else None
        lane.end = now
        lane.state = GONE if mark is None else mark.state
        self._ended[trajectory_id] = self._live.pop(trajectory_id)
        return lane

    def _begin(self, mark: TrajectoryMark, workers: Mapping[str, str], now: float) -> _Lane | None:
        if self.room <= 0:
            return None
        before = self._ended.pop(mark.trajectory_id, None)
        if before is not None:  # leased again after a rest
            before.end = None
            before.worker = workers.get(mark.session, before.worker)
            before.grow(mark, now)
            lane = before
        else:
            lane = _Lane(
                trajectory_id=mark.trajectory_id,
                start=now if mark.lease_time is None else min(now, mark.lease_time),
                worker=workers.get(mark.session, ""),
                birth_version=mark.birth_version or 0,
                tokens=0,
            )
            lane.grow(mark, now)
        self._live[mark.trajectory_id] = lane
        return lane

    def _forget(self, now: float) -> list[str]:
        removed = []
        while self._ended:
            trajectory_id, lane = next(iter(self._ended.items()))
            old = lane.end is not None and now - lane.end > self._window_seconds
            if not old and len(self._live) + len(self._ended) <= self._most:
                break
            del self._ended[trajectory_id]
            removed.append(trajectory_id)
        return removed


def new_ids(found: Sequence[str], lanes: TimelineTracker) -> list[str]:
    """Those of ``found`` that are not followed, as many as there is room for."""
    return [i for i in dict.fromkeys(found) if not lanes.knows(i)][: max(0, lanes.room)]
