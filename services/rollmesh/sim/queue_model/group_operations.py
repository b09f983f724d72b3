"""Operations of the leader on groups: further rounds, and groups that begin again."""

from collections.abc import Sequence
from heapq import nsmallest

from rollmesh.errors import Conflict
from rollmesh.mesh import WasteReason
from rollmesh.sim.queue_model.records import (
    ENDED_WITHOUT_SCORE,
    GroupState,
    ModelGroup,
    ModelMember,
    ModelRound,
)
from rollmesh.sim.queue_model.state import QueueState
from rollmesh.types import TrajectoryState


class RestartOperations(QueueState):
    """Operations of the leader on groups over the staleness bound."""

    def begin_again(self, group_ids: Sequence[str], *, aside: bool) -> list[str]:
        """Reset the open and ready ones among these groups that exceed the staleness bound at the next cut.

        A group with rounds begins again with its first one.

        They open again, without their forks, or wait ``aside`` for a recall. Returns these groups.
        """
        oldest, incarnation, begun = self.cut_step - self.limits.max_staleness, self._next_incarnation(), list[str]()
        for group in map(self.find_group, group_ids):
            if group is None or group.state not in (GroupState.OPEN, GroupState.READY):
                continue
            if group.step is not None and group.step < oldest:
                self._begin_group_again(group, incarnation, aside)
                begun.append(group.group_id)
        self.totals["groups_set_aside_total" if aside else "groups_restarted_total"] += len(begun)
        return begun

    def recall(self, train_step: int, count: int) -> int:
        """Open the oldest groups that are aside, until ``count`` were recalled for the batch of a train step.

        Returns the number of groups that this call opened. Raises Conflict unless the step is the next one to cut.
        """
        if train_step != self.cut_step + 1:
            raise Conflict(f"recall for {train_step}: cut_step is {self.cut_step}")
        if self.recalled_for != train_step:
            self.recalled_for, self.recalled = train_step, 0
        before = self.recalled
        while opened := [g for g in self.oldest_aside(count - self.recalled) if not self.is_gone(g)]:
            for group in opened:
                self.move_group(group, GroupState.OPEN)
                self._begin_fresh(group)
            self.recalled += len(opened)
        self.totals["groups_recalled_total"] += self.recalled - before
        return self.recalled - before

    def oldest_aside(self, most: int) -> list[ModelGroup]:
        """Return the oldest groups that were set aside."""
        return nsmallest(most, self.groups[GroupState.ASIDE].values(), key=lambda group: group.index)

    def _next_incarnation(self) -> int:
        return self.totals["restarts_total"] + self.totals["begun_again_total"] + 1

    def _begin_group_again(self, group: ModelGroup, incarnation: int, aside: bool) -> None:
        self.set_step(group, None)
        group.admitted_at = None
        group.has_ended = group.has_ended or group.state is GroupState.READY
        self.move_group(group, GroupState.ASIDE if aside else GroupState.OPEN)
        group.spare = 0 if aside else group.spare
        group.rounds, group.is_closed = group.rounds[:1], False
        group.needed = group.rounds[0].needed if group.rounds else group.needed
        fresh = group.rounds[0].launched if group.rounds else group.needed + group.spare
        reason = WasteReason.SET_ASIDE if aside else WasteReason.RESTARTED
        for member in group.members:
            self.leave_queues(member)
        self._reset(group, reason, group.needed if aside else fresh, incarnation)

    def _reset(self, group: ModelGroup, reason: WasteReason, fresh: int, incarnation: int) -> None:
        """Reset the members of a group, and forget the last ones beyond the ``fresh`` ones."""
        longest = self._reset_members(group, reason, slice(0, len(group.members)), incarnation)
        self._forget_last_members(group, fresh, len(group.members))
        self._end_reset(group, reason, longest)

    def _reset_members(self, group: ModelGroup, reason: WasteReason, part: slice, incarnation: int) -> int:
        """Reset members but those that ended without a score; return the most tokens of one."""
        longest = 0
        for member in group.members[part]:
            if member.state in ENDED_WITHOUT_SCORE:
                continue
            self.dropped_tokens[reason] += member.tokens - member.wasted_tokens
            longest = max(longest, member.tokens)
            self.forget_member(member)
            fresh = ModelMember(group, member.trajectory_id, member.number, incarnation=incarnation)
            group.members[member.number] = self.members[member.trajectory_id] = fresh
        group.incarnation = incarnation
        self.totals["begun_again_total"] += 1
        return longest

    def _forget_last_members(self, group: ModelGroup, fresh: int, most: int) -> int:
        """Forget the last members beyond the fresh ones, up to one that is lost; returns their number."""
        lost, forgotten = _lost(group), 0
        while len(group.members) - lost > fresh and forgotten < most:
            if group.members[-1].state in ENDED_WITHOUT_SCORE:
                break
            del self.members[group.members.pop().trajectory_id]
            forgotten += 1
        return forgotten

    def _end_reset(self, group: ModelGroup, reason: WasteReason, longest: int) -> None:
        self.begun_again_deciles[f"{reason}:{self.length_decile(longest)}"] += 1
        if group.rounds and group.state is GroupState.OPEN:  # it may have more members than its first round had
            group.spare = max(0, len(group.members) - _lost(group) - group.needed)
        self._begin_fresh(group)

    def _begin_fresh(self, group: ModelGroup) -> None:
        group.scored = group.scored_tokens = group.cut_tokens = 0
        group.terminal = _lost(group)
        if group.state is GroupState.OPEN:
            for member in group.members:
                if member.state not in ENDED_WITHOUT_SCORE:
                    self.wait(member)


def _lost(group: ModelGroup) -> int:
    return sum(m.state in ENDED_WITHOUT_SCORE for m in group.members)


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
                if reward != member.reward:
                    member.reward, member.worker_reward = reward, member.reward
                if count < member.tokens:
                    member.kept_tokens = count
                    group.cut_tokens += member.tokens - count
                    self.dropped_tokens[WasteReason.SHORTENED] += member.tokens - count
                    self.totals["shortened_total"] += 1
        del self.undecided[group_id]
        group.is_closed = True
        self.totals["groups_closed_total"] += 1
        self.end_group(group)
        return True

    def _undecided_in(self, group_id: str, after: int) -> ModelGroup | None:
        group = self.undecided.get(group_id)
        return group if group is not None and len(group.rounds) == after + 1 else None
