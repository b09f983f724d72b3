"""Open or ready groups as the scheduler's view lists them, kept in order, so that a view need not sort them."""

import math
from bisect import bisect_left, insort
from collections import Counter
from heapq import nsmallest

from rollmesh.mesh import GroupView
from rollmesh.sim.queue_model.records import GroupState, ModelGroup


class ListedGroups:
    """Groups of one state: in admission order, and by step with those that have none last, equal ones by name.

    The views have the group's own step, even if the run masks tokens that are older than the bound. An open group
    without tokens is not in the order by step: no view lists it there.
    """

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()
        """Number of groups by step, without those that have none."""
        self._by_index: list[GroupView] = []
        self._by_step: list[GroupView] = []

    def enter(self, group: ModelGroup) -> None:
        """List a group; ``token_count`` is set for a ready group only."""
        is_ready = group.state is GroupState.READY
        view = GroupView(
            group_id=group.group_id,
            admission_index=group.index,
            min_train_step=group.step,
            token_count=group.scored_tokens if is_ready else 0,
        )
        insort(self._by_index, view, key=_index)
        if is_ready or group.step is not None:
            insort(self._by_step, view, key=_step)
        if group.step is not None:
            self.steps[group.step] += 1

    def leave(self, group: ModelGroup) -> None:
        """List a group no longer."""
        view = self._by_index.pop(bisect_left(self._by_index, group.index, key=_index))
        if group.state is GroupState.READY or group.step is not None:
            del self._by_step[bisect_left(self._by_step, _step(view), key=_step)]
        if group.step is not None:
            self.steps[group.step] -= 1
            if not self.steps[group.step]:
                del self.steps[group.step]

    def change_step(self, group: ModelGroup, step: int | None) -> None:
        """Change the step of a listed group."""
        self.leave(group)
        group.step = step
        self.enter(group)

    def in_order(self, bound: int, *, shortest: bool) -> list[GroupView]:
        """Return the first groups in admission order, then the stalest of the others, then those with least tokens.

        Each of the three has at most ``bound`` groups.
        """
        first = self._by_index[:bound]
        if not bound or len(self._by_index) <= bound:
            return first
        listed = [*first, *self._by_step[:bound]]
        if shortest:
            listed += nsmallest(bound, self._by_index, key=lambda view: (view.token_count, view.group_id))
        return list({view.group_id: view for view in listed}.values())

    def stalest(self, bound: int) -> list[GroupView]:
        """Return the open groups with the smallest step, then those of the first in admission order without tokens."""
        stalest = self._by_step[:bound]
        if len(stalest) < bound:
            stalest += (view for view in self._by_index[:bound] if view.min_train_step is None)
        return stalest


def _index(view: GroupView) -> int:
    return view.admission_index


def _step(view: GroupView) -> tuple[float, str]:
    return math.inf if view.min_train_step is None else view.min_train_step, view.group_id
