"""Order in which ready groups enter a batch."""

from __future__ import annotations

import math
from collections.abc import Callable

from rollmesh.mesh import GroupView
from rollmesh.scheduling.axes import CutOrder


def cut_key(order: CutOrder) -> Callable[[GroupView], tuple[float, int]]:
    """Return the sort key of ready groups; equal groups leave in admission order."""

    def key(group: GroupView) -> tuple[float, int]:
        first = 0.0
        if order is CutOrder.SHORTEST:
            first = group.token_count
        elif order is CutOrder.OLDEST:
            first = math.inf if group.min_train_step is None else group.min_train_step
        return first, group.admission_index

    return key
