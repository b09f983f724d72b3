"""Queue operations of the leader on groups whose round has ended: their next round, or their end."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.store.redis_connection import Argument, Connection, Reply
from rollmesh.types import FinishReason
from rollmesh.v1 import trajectory_pb2 as pb

_MEMBERS_PER_READ = 384
"""Members whose records one script reads, unless a single group has more."""


class GroupRounds:
    """Undecided groups: open groups whose round has ended.

    Both writes name the round that they follow. A repeated call, and the call of a leader that was overtaken, find
    another round and change nothing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def undecided(self) -> list[GroupOutcome]:
        """Return the oldest undecided groups, with at most 384 members or one group."""
        trained_step, rows = await self._connection.run("undecided", _MEMBERS_PER_READ)
        return [_outcome(int(trained_step), row) for row in rows]

    async def extend(self, leader: str, group: GroupOutcome, needed: int, launched: int, plan: str) -> bool:
        """Begin the next round of an undecided group; returns False if it was decided before.

        ``needed`` scored members of the whole group end the round, ``launched`` new members are pending, and ``plan``
        (JSON) travels with their leases. Raises Conflict if the group would exceed the most members of the run.
        """
        return bool(
            await self._connection.run("extend_group", leader, group.group_id, group.round, needed, launched, plan)
        )

    async def close(
        self,
        leader: str,
        group: GroupOutcome,
        rewards: Sequence[float] | None = None,
        kept_tokens: Sequence[int] | None = None,
    ) -> bool:
        """Close an undecided group, which is then ready or dropped; returns False if it was decided before.

        ``rewards`` and ``kept_tokens`` are one value per scored member, in order; None leaves all as they are.
        """
        words: list[Argument] = []
        if rewards is not None:
            kept: Sequence[Argument] = [""] * len(group.members) if kept_tokens is None else kept_tokens
            for member, reward, count in zip(group.members, rewards, kept, strict=True):
                words += [member.member_index, repr(float(reward)), count]
        return bool(await self._connection.run("close_group", leader, group.group_id, group.round, *words))


def _outcome(train_step: int, row: Sequence[Reply]) -> GroupOutcome:
    group_id, current, launched, prompt_id, domain, firsts, members = row
    return GroupOutcome(
        group_id=group_id.decode(),
        prompt_id=prompt_id.decode(),
        domain=domain.decode(),
        train_step=train_step,
        round=current,
        launched=launched,
        members=tuple(_member(firsts, member) for member in members),
    )


def _member(firsts: Sequence[int], row: Sequence[Reply]) -> MemberOutcome:
    number, tokens, finish, outcome, reward = row
    return MemberOutcome(
        member_index=number,
        round=sum(1 for _ in takewhile(lambda first: first <= number, firsts)) - 1,
        outcome=pb.RewardOutcome.FromString(outcome).value,
        shaped_reward=float(reward),
        token_count=int(tokens),
        truncated=finish == FinishReason.LENGTH.value.encode(),
    )
