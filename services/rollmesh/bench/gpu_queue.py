"""In-memory trajectory queue of one arm of ``bench gpu``.

It replaces Redis and gives the scheduler the same ``MeshView``, so that the real ``decide`` is used. Leases, sessions
and crashes are left out: there is a single worker, and it does not crash.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmesh.bench.gpu_workload import Workload
from rollmesh.mesh import GroupView, MeshView
from rollmesh.scheduling import Schedule
from rollmesh.types import (
    Batch,
    Chunk,
    FinishReason,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    Trajectory,
    TrajectoryState,
)


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One trajectory in the queue."""

    group: int
    index: int
    prompt: Prompt
    length: int
    """Final number of response tokens."""
    reward: float
    state: TrajectoryState = TrajectoryState.PENDING
    segments: list[Segment] = field(default_factory=list)

    @property
    def trajectory_id(self) -> str:
        """Id of the trajectory, equal in every arm, so that the sampling noise is equal too."""
        return f"{self.group}.{self.index}"

    @property
    def token_count(self) -> int:
        """Number of response tokens so far."""
        return sum(len(segment) for segment in self.segments)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Append the chunks of one call, as one segment per policy version."""
        written = [c for c in chunks if len(c.token_ids)]
        for version, cache in sorted({(c.policy_version, c.kv_min_version) for c in written}):
            selected = [c for c in written if (c.policy_version, c.kv_min_version) == (version, cache)]
            self.segments.append(
                Segment(
                    token_ids=np.concatenate([c.token_ids for c in selected]),
                    behavior_logprobs=np.concatenate([c.behavior_logprobs for c in selected]),
                    policy_version=version,
                    kv_min_version=cache,
                )
            )

    def trajectory(self) -> Trajectory:
        """Return the trajectory in the form that the trainer receives."""
        return Trajectory(
            trajectory_id=self.trajectory_id,
            group_id=str(self.group),
            member_index=self.index,
            prompt=self.prompt,
            segments=tuple(self.segments),
            finish_reason=FinishReason.LENGTH if self.state is TrajectoryState.SCORED else None,
            outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=self.reward),
            shaped_reward=self.reward,
        )


class MemoryQueue:
    """Groups from admission to training; policy version and train step are equal here."""

    def __init__(self, schedule: Schedule, workload: Workload) -> None:
        self.trained_step = 0
        self.cut_step = 0
        self._schedule = schedule
        self._workload = workload
        self._groups: dict[int, list[Member]] = {}
        self._admitted = 0

    def members(self) -> Iterator[Member]:
        """Yield every admitted trajectory that is not in a cut batch."""
        for group in self._groups.values():
            yield from group

    def unfinished(self) -> list[Member]:
        """Return the trajectories that have begun and not finished."""
        return [m for m in self.members() if m.state is not TrajectoryState.SCORED and m.segments]

    def view(self) -> MeshView:
        """Return the scheduler's view of the queue."""
        ready: list[GroupView] = []
        open_groups: list[GroupView] = []
        for number, group in self._groups.items():
            steps = [m.segments[0].policy_version for m in group if m.segments]
            view = GroupView(group_id=str(number), admission_index=number, min_train_step=min(steps, default=None))
            (ready if all(m.state is TrajectoryState.SCORED for m in group) else open_groups).append(view)
        open_groups.sort(key=lambda g: (g.min_train_step is None, g.min_train_step or 0, g.admission_index))
        by_step = Counter(g.min_train_step for g in (*ready, *open_groups) if g.min_train_step is not None)
        states = Counter(m.state for m in self.members())
        cut = self._schedule.groups_per_batch * (self.cut_step - self.trained_step)
        return MeshView(
            now=0.0,  # stragglers never time out
            trained_step=self.trained_step,
            cut_step=self.cut_step,
            policy_version=self.trained_step,
            policy_train_step=self.trained_step,
            admitted_unconsumed=len(self._groups) + cut,
            open_groups=len(open_groups),
            ready_groups=len(ready),
            ready=tuple(ready),
            stalest_open=tuple(open_groups),
            unclaimed_by_step=tuple(sorted(by_step.items())),
            pending=states[TrajectoryState.PENDING],
            partial=states[TrajectoryState.PARTIAL],
            leased=states[TrajectoryState.LEASED],
            finished=0,
            memory_ratio=0.0,
            filtered_in_a_row=0,
            blocked_since=None,
            registered_generators=1,
            recovering=False,
            user_paused=False,
            is_complete=False,
        )

    def admit(self, count: int) -> None:
        """Open the next ``count`` groups of the stream."""
        for number in range(self._admitted, self._admitted + count):
            prompt = self._workload.prompt(number)
            self._groups[number] = [
                Member(
                    group=number,
                    index=index,
                    prompt=prompt,
                    length=self._workload.length(number, index),
                    reward=self._workload.reward(number, index),
                )
                for index in range(self._schedule.group_size)
            ]
        self._admitted += count

    def lease(self, pool_size: int) -> list[Member]:
        """Fill the pool: partials of the oldest groups first, then pending ones in admission order."""
        leased = sum(m.state is TrajectoryState.LEASED for m in self.members())
        waiting = [m for m in self.members() if m.state is TrajectoryState.PARTIAL]
        waiting += [m for m in self.members() if m.state is TrajectoryState.PENDING]
        chosen = waiting[: max(0, pool_size - leased)]
        for member in chosen:
            member.state = TrajectoryState.LEASED
        return chosen

    def release(self, member: Member) -> None:
        """End the lease of a trajectory: it is finished, or a partial trajectory for the next stage."""
        if member.token_count >= member.length:
            member.state = TrajectoryState.SCORED
        else:
            member.state = TrajectoryState.PARTIAL if member.segments else TrajectoryState.PENDING

    def cut(self, group_ids: Sequence[str]) -> Batch:
        """Remove these groups and return them as the next batch."""
        groups = []
        for group_id in group_ids:
            members = self._groups.pop(int(group_id))
            trajectories = tuple(m.trajectory() for m in members)
            groups.append(Group(group_id=group_id, admission_index=int(group_id), trajectories=trajectories))
        self.cut_step += 1
        return Batch(train_step=self.cut_step, groups=tuple(groups))

    def announce(self) -> None:
        """Record that the cut batch is trained and its policy is the newest."""
        self.trained_step = self.cut_step
