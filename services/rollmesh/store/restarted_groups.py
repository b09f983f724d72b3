"""Queue operations of the leader on groups that begin again: restart, set aside, recall."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.store.limits import Limits
from rollmesh.store.redis_connection import Connection, Reply
from rollmesh.store.trajectories import slices

MEMBERS_PER_SWEEP = 128
"""Members of a large group that one script deletes or resets; at most three keys each."""
_GROUPS_PER_RECALL = 128


class RestartedGroups:
    """Operations of the leader; each takes its token and raises SessionLost when it is not current.

    Only open and ready groups over the staleness bound begin again; other ids are ignored, so a call may be repeated.
    Members without a score stay dead or unscorable.
    """

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits

    async def restart(self, leader: str, group_ids: Sequence[str]) -> int:
        """Drop the tokens of groups (waste reason ``restarted``) and open them again; returns their number."""
        return await self._begin_again("restart_groups", leader, group_ids)

    async def set_aside(self, leader: str, group_ids: Sequence[str]) -> int:
        """Drop the tokens of groups (waste reason ``set_aside``), which then wait for a recall; returns their number.

        Spare members of a group that is set aside are deleted, except those before a dead or unscorable one.
        """
        return await self._begin_again("set_aside", leader, group_ids)

    async def recall(self, leader: str, train_step: int, count: int) -> int:
        """Open the oldest groups that were set aside, until ``count`` of them were recalled for the batch.

        Returns the number of groups that this call opened. Raises Conflict unless the train step is the next one to
        cut.
        """
        total, opened = 0, 0
        while total < count:
            total, new = await self._connection.run("recall", leader, train_step, count, _GROUPS_PER_RECALL)
            opened += new
            if not new:
                break
        return opened

    async def _begin_again(self, script: str, leader: str, group_ids: Sequence[str]) -> int:
        begun = 0
        for part in slices(group_ids, await self._limits.groups_per_call()):
            count, unfinished = await self._connection.run(script, leader, *part)
            begun += int(count)
            await sweep_returning(self._connection, unfinished)
        return begun


async def sweep_returning(connection: Connection, group_ids: Sequence[Reply]) -> None:
    """Complete the reset of large groups, in slices."""
    for group_id in group_ids:
        while await connection.run("sweep_returning", group_id, MEMBERS_PER_SWEEP):
            pass
