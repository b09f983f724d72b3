"""Bounds on the groups that overtake another one, checked while a mesh runs: no group waits without end."""

from collections.abc import Iterator, Sequence

from rollmesh.scheduling import OnStale, Schedule
from rollmesh.scheduling.axes import StartOrder
from rollmesh.sim.queue_model import GroupState, ModelGroup, ModelMember, QueueModel
from rollmesh.types import TrajectoryState


class Overtaking:
    """Observer of one mesh; it counts the batches that passed over each group."""

    def __init__(self, schedule: Schedule, queue: QueueModel) -> None:
        self._schedule = schedule
        self._queue = queue
        self._passed: dict[str, int] = {}
        """Number of batches that passed over a group while it was ready."""

    def after_lease(self, leased: Sequence[ModelMember]) -> None:
        """Check that groups start in admission order; one expected to be long overtakes within a block of B groups."""
        started = max((member.group.index for member in leased if not member.tokens), default=0)
        waiting = min((group.index for group in self._waiting()), default=started)
        ranked = self._schedule.start_order is StartOrder.LONGEST_EXPECTED
        most = self._schedule.groups_per_batch - 1 if ranked else 0
        assert started - waiting <= most, f"group {started} started while group {waiting} waits"

    def _waiting(self) -> Iterator[ModelGroup]:
        for group in self._queue.groups[GroupState.OPEN].values():
            if any(member.state is TrajectoryState.PENDING for member in group.members):
                yield group

    def after_cut(self) -> None:
        """Check that no ready group is passed over by more batches than its deadline or the window allows."""
        schedule = self._schedule
        most = {
            OnStale.PACE: schedule.max_staleness,
            OnStale.MASK_OLD_SEGMENTS: (schedule.window_groups - 1) // schedule.groups_per_batch,
        }.get(schedule.on_stale, schedule.max_staleness + 1)
        ready = self._queue.groups[GroupState.READY]
        self._passed = {group_id: self._passed.get(group_id, 0) + 1 for group_id in ready}
        late = {group_id: passed for group_id, passed in self._passed.items() if passed > most}
        assert not late, f"more than {most} batches passed over ready groups: {late}"

    def after_recall(self, recalled: Sequence[str]) -> None:
        """Check that the groups which were set aside return in admission order."""
        groups = self._queue.groups
        last = max((groups[GroupState.OPEN][group_id].index for group_id in recalled), default=0)
        left = min((group.index for group in groups[GroupState.ASIDE].values()), default=last)
        assert last <= left, f"group {last} was recalled before group {left}"

    def begins_again(self, group_id: str, times: int) -> None:
        """Check that a restarted group begins again at most once per batch of its wave, and is in the last one."""
        self._passed.pop(group_id, None)
        most = self._schedule.wave_batches - 1
        if self._schedule.on_stale is OnStale.RESTART:
            assert times <= most, f"group {group_id} began again {times} times in a wave of {most + 1} batches"
