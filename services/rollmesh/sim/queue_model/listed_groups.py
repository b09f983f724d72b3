"""Open or ready groups as the scheduler's view lists them, kept in order, so that a view need not sort them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from heapq import nsmallest

from rollmesh.mesh import GroupView
from rollmesh.sim.queue_model.records import GroupState, ModelGroup


class GroupOrder:
    """Views of groups by a number and, for equal numbers, by the name of the group; the smallest first."""

    def __init__(self) -> None:
        self._keys: list[tuple[float, str]] = []
        self._views: list[GroupView] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, number: float, view: GroupView) -> None:
        """Add the view of a group that is not there."""
        key = number, view.group_id
        place = bisect_left(self._keys, key)
        self._keys.insert(place, key)
        self._views.insert(place, view)

    def replace(self, number: float, view: GroupView) -> None:
        """Replace the view of a group that keeps its number; raises KeyError if it is not there under it."""
        self._views[self._place(number, view.group_id)] = view

    def remove(self, number: float, group_id: str) -> None:
        """Remove the view of a group; raises KeyError if it is not there under this number."""
        place = self._place(number, group_id)
        del self._keys[place], self._views[place]

    def _place(self, number: float, group_id: str) -> int:
        key = number, group_id
        place = bisect_left(self._keys, key)
        if place == len(self._keys) or self._keys[place] != key:
            raise KeyError(key)
        return place

    def first(self, count: int | None = None) -> list[GroupView]:
        """Return the first views, at most ``count`` of them; without it all."""
        return self._views[:count]


class ListedGroups:
    """Groups of one state.

    The views have the group's own step, even if the run masks tokens that are older than the bound.
    """

    def __init__(self) -> None:
        self.steps: Counter[int] = Counter()
        """Number of groups by step, without those that have none."""
        self._by_index, self._by_step = GroupOrder(), GroupOrder()

    def enter(self, group: ModelGroup) -> None:
        """List a group; ``token_count`` is set for a ready group only."""
        view = _view(group)
        self._by_index.add(group.index, view)
        self._enter_step(group, view)

    def leave(self, group: ModelGroup) -> None:
        """List a group no longer; raises KeyError if it is not listed."""
        self._by_index.remove(group.index, group.group_id)
        self._leave_step(group)

    def change_step(self, group: ModelGroup, step: int | None) -> None:
        """Change the step of a listed group."""
        self._leave_step(group)
        group.step = step
        view = _view(group)
        self._by_index.replace(group.index, view)
        self._enter_step(group, view)

    def _enter_step(self, group: ModelGroup, view: GroupView) -> None:
        if _has_place_by_step(group):
            self._by_step.add(_step_number(group), view)
        if group.step is not None:
            self.steps[group.step] += 1

    def _leave_step(self, group: ModelGroup) -> None:
        if _has_place_by_step(group):
            self._by_step.remove(_step_number(group), group.group_id)
        if group.step is not None:
            self.steps[group.step] -= 1
            if not self.steps[group.step]:
                del self.steps[group.step]

    def in_order(self, bound: int, *, shortest: bool) -> list[GroupView]:
        """Return the first groups in admission order, then the stalest of the others, then those with least tokens.

        Each of the three has at most ``bound`` groups.
        """
        first = self._by_index.first(bound)
        if not bound or len(self._by_index) <= bound:
            return first
        listed = [*first, *self._by_step.first(bound)]
        if shortest:
            listed += nsmallest(bound, self._by_index.first(), key=_by_tokens)
        return list({view.group_id: view for view in listed}.values())

    def stalest(self, bound: int) -> list[GroupView]:
        """Return the open groups with the smallest step, then those of the first in admission order without tokens."""
        stalest = self._by_step.first(bound)
        if len(stalest) < bound:
            stalest += (view for view in self._by_index.first(bound) if view.min_train_step is None)
        return stalest


def _view(group: ModelGroup) -> GroupView:
    return GroupView(
        group_id=group.group_id,
        admission_index=group.index,
        min_train_step=group.step,
        token_count=group.scored_tokens if group.state is GroupState.READY else 0,
    )


def _has_place_by_step(group: ModelGroup) -> bool:
    """Tell whether a group is in the order by step: an open one without tokens, which no view lists there, is not."""
    return group.step is not None or group.state is GroupState.READY


def _step_number(group: ModelGroup) -> float:
    """Return the number that orders groups by step: those without tokens are last."""
    return math.inf if group.step is None else group.step


def _by_tokens(view: GroupView) -> tuple[int, str]:
    return view.token_count, view.group_id
