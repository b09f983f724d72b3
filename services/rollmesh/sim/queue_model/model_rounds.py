"""Rounds of the queue model: groups whose round has ended get another one, or end."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from rollmesh.errors import Conflict
from rollmesh.mesh import WasteReason
from rollmesh.sim.queue_model.model_records import ModelGroup, ModelMember, ModelRound
from rollmesh.sim.queue_model.model_state import QueueState
from rollmesh.types import TrajectoryState


class RoundOperations(QueueState):
    """Operations of the leader on undecided groups; each names the round that it follows."""

    def oldest_undecided(self, most: int) -> list[ModelGroup]:
        """Return the oldest groups that wait for a decision."""
        return nsmallest(most, self.undecided.values(), key=lambda group: group.index)

    def extend_group(self, group_id: str, after: int, needed: int, launched: int, plan: str = "{}") -> bool:
        """Begin the round that follows round ``after``; returns False if the group is not undecided in that round.

        Raises Conflict if the group would exceed its most members.
        """
        group = self._undecided_in(group_id, after)
        if group is None:
            return False
        first = len(group.members)
        if first + launched > (most := self.most_members(needed)):
            raise Conflict(f"group {group_id} has {first} members; {launched} more exceed the limit of {most}")
        del self.undecided[group_id]
        group.rounds.append(ModelRound(first, needed, launched, plan))
        group.needed, group.spare = needed, max(0, group.scored + launched - needed)
        for _ in range(launched):
            self.add_member(group)
        self.totals["groups_extended_total"] += 1
        self.totals["round_members_total"] += launched
        return True

    def close_group(
        self,
        group_id: str,
        after: int,
        rewards: Sequence[float] | None = None,
        kept_tokens: Sequence[int] | None = None,
    ) -> bool:
        """End a group after round ``after``; returns False if it is not undecided in that round.

        ``rewards`` and ``kept_tokens`` have one value per scored member. Raises Conflict for another number of values.
        """
        group = self._undecided_in(group_id, after)
        if group is None:
            return False
        if rewards is not None:
            if len(rewards) != group.scored:
                raise Conflict(f"group {group_id} has {group.scored} scored members, not {len(rewards)}")
            scored = [m for m in group.members if m.state is TrajectoryState.SCORED]
            kept = [m.tokens for m in scored] if kept_tokens is None else kept_tokens
            for member, reward, count in zip(scored, rewards, kept, strict=True):
                self._reshape(member, reward, count)
        del self.undecided[group_id]
        group.is_closed = True
        self.totals["groups_closed_total"] += 1
        self.end_group(group)
        return True

    def _reshape(self, member: ModelMember, reward: float, kept: int) -> None:
        if reward != member.reward:
            member.reward, member.worker_reward = reward, member.reward
        if kept < member.tokens:
            member.kept_tokens = kept
            member.group.cut_tokens += member.tokens - kept
            self.dropped_tokens[WasteReason.SHORTENED] += member.tokens - kept
            self.totals["shortened_total"] += 1

    def _undecided_in(self, group_id: str, after: int) -> ModelGroup | None:
        group = self.undecided.get(group_id)
        return group if group is not None and len(group.rounds) == after + 1 else None
