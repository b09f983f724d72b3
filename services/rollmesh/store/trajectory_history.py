"""Restarts, rests and the cut-off of one trajectory, for operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHistory:
    """Events of a trajectory that left it without some or all of its tokens, or made it wait."""

    group_restarts: int = 0
    """Restarts of its group, which exceeded the staleness bound."""
    group_set_aside: int = 0
    """Number of times that its group was set aside for a long round."""
    is_aside: bool = False
    """True while its group waits for a long round."""
    worker_restarts: int = 0
    """Restarts by its worker, since its group last began.

    A lower bound in a group of over 100 members that began again: it is reset in several scripts, and its first members
    have an older incarnation than the group.
    """
    rests_since_step: int | None = None
    """Train step of the policy of its newest tokens while it rests; else None."""
    is_surplus: bool = False
    """True if it was cut off."""

    def sentences(self) -> Iterator[str]:
        """Yield one sentence per event, without the name of the trajectory."""
        if self.group_restarts:
            yield f"restarted {_times(self.group_restarts)} with its group, which exceeded the staleness bound"
        if self.group_set_aside:
            now = ": it waits for a long round" if self.is_aside else ""
            yield f"set aside {_times(self.group_set_aside)} with its group, which exceeded the staleness bound{now}"
        if self.worker_restarts:
            yield f"restarted {_times(self.worker_restarts)} by its worker"
        if self.rests_since_step is not None:
            yield (
                f"resting since train step {self.rests_since_step}: it continues under a newer policy, or when nothing "
                "else can run"
            )
        if self.is_surplus:
            yield "surplus: cut off unfinished, because enough other members of its group were scored"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
