"""Round that launched a trajectory, for operators."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.store.redis_connection import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRound:
    """Round of one trajectory, in a run with a planner or a group shaper."""

    number: int
    """Round that launched it, from 0."""
    newest: int
    """Newest round of its group."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Plan of its round."""
    is_undecided: bool = False
    """True while its group waits for the decision on the next round."""
    is_closed: bool = False
    """True once its group gets no further round."""

    def sentence(self) -> str:
        """Return the round as one sentence, without the name of the trajectory."""
        plan = f" with the plan {json.dumps(dict(self.plan))}" if self.plan else ""
        if self.is_closed:
            group = f"its group is closed after round {self.newest}"
        elif self.is_undecided:
            group = f"its group waits for the decision after round {self.newest}"
        else:
            group = f"its group is in round {self.newest}"
        return f"launched in round {self.number}{plan}, {group}"


async def read_member_round(connection: Connection, group_id: str, member: int) -> MemberRound | None:
    """Return the round of a member of a queued group; None in a run without rounds."""
    key = connection.keys.of("group", group_id)
    (newest, closed), undecided = await connection.commands(
        [("HMGET", key, "round", "closed"), ("ZSCORE", connection.keys.single("undecided"), group_id)]
    )
    if newest is None:
        return None
    (stored,) = await connection.commands([("HMGET", key, *(f"plan:{number}" for number in range(int(newest) + 1)))])
    # Number of the first member and the plan; the group may have left the queue in between.
    rounds = [plan.decode().split(" ", 1) for plan in stored if plan is not None]
    launched_by = max((number for number, (first, _) in enumerate(rounds) if int(first) <= member), default=None)
    if launched_by is None:
        return None
    return MemberRound(
        number=launched_by,
        newest=int(newest),
        plan=json.loads(rounds[launched_by][1]),
        is_undecided=undecided is not None,
        is_closed=closed is not None,
    )
