"""Decisions of a simulated leader at the end of rounds, as ``rollout/round_decisions.py`` takes them."""

from __future__ import annotations

from rollmesh.curriculum.round_rules import RoundRules
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.scheduling import Schedule
from rollmesh.sim.queue_model import ModelGroup, ModelMember, QueueModel
from rollmesh.types import TrajectoryState

_MOST_GROUPS = 512
"""Groups that one look decides on, the oldest first."""


def decide_rounds(queue: QueueModel, schedule: Schedule, rules: RoundRules) -> bool:
    """Extend or close the undecided groups; returns True if there were any.

    Raises DataError for a planner or a group shaper that fails.
    """
    groups = queue.oldest_undecided(_MOST_GROUPS)
    for group in groups:
        outcome = _outcome(group, queue.trained_step, schedule.longest_trajectory_tokens)
        decision = rules.decide(outcome, queue.history.records)
        if (extension := decision.extension) is not None:
            plan = rules.encode_plan(extension)
            queue.extend_group(group.group_id, outcome.round, extension.needed, extension.launched, plan)
        elif (closing := decision.closing) is not None:
            queue.close_group(group.group_id, outcome.round, closing.shaped_rewards, closing.kept_tokens)
    return bool(groups)


def _outcome(group: ModelGroup, train_step: int, longest: int) -> GroupOutcome:
    scored = [m for m in group.members if m.state is TrajectoryState.SCORED]
    return GroupOutcome(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        domain=group.domain,
        train_step=train_step,
        round=len(group.rounds) - 1,
        launched=len(group.members),
        members=tuple(_member(group, member, longest) for member in scored),
    )


def _member(group: ModelGroup, member: ModelMember, longest: int) -> MemberOutcome:
    reward = member.reward or 0.0
    return MemberOutcome(
        member_index=member.number,
        round=group.round_of(member),
        outcome=reward,
        shaped_reward=reward,
        token_count=member.tokens,
        truncated=member.tokens >= longest,
    )
