"""Prompt history of the queue model: records of prompts, outcomes that no batch file has, predictions of lengths."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

from rollmesh.prompt_history import LengthPrediction, PromptOutcome, PromptRecord, domain_record
from rollmesh.sim.queue_model.model_records import ModelGroup, ModelMember
from rollmesh.types import TrajectoryState

_MILLIONTHS = 1_000_000
_LARGEST_REWARD = 1_000_000.0
_MOST_PREDICTIONS = 256
_NO_GROUPS = PromptRecord(groups=0, members=0, solved=0, reward_sum=0.0, token_sum=0, longest=0, train_step=0)


class ModelHistory:
    """Facts of the groups that have ended; groups without a prompt id have no history. It has no size limit."""

    def __init__(self) -> None:
        self.records: dict[str, PromptRecord] = {}
        """By prompt id."""
        self.outcomes: dict[str, PromptOutcome] = {}
        """By group, of those that no batch file has."""
        self.predictions: deque[LengthPrediction] = deque(maxlen=_MOST_PREDICTIONS)
        """The newest first."""
        self.changed: set[str] = set()
        """Records that changed since the leader of a simulation last took them."""

    def note(self, group: ModelGroup, train_step: int, *, is_evicted: bool = False) -> None:
        """Record a group whose last member has just ended, at the newest trained step.

        One that is evicted instead counts as drawn, without members.
        """
        if not group.prompt_id:
            return
        scored = [] if is_evicted else [m for m in group.members if m.state is TrajectoryState.SCORED]
        rewards = [m.reward for m in scored if m.reward is not None]
        if scored:
            self.predictions.appendleft(_prediction(group))
        name, number = group.group_id, len(self.outcomes)
        while (group.has_ended and name == group.group_id) or name in self.outcomes:
            name, number = f"{group.group_id}~{number}", number + 1
        outcome = PromptOutcome(
            group_id=name,
            prompt_id=group.prompt_id,
            members=len(scored),
            solved=sum(_verdict(member) > 0 for member in scored),
            reward_millionths=sum(map(_millionths, rewards)),
            token_sum=sum(m.tokens for m in scored),
            longest=max((m.tokens for m in scored), default=0),
            train_step=train_step,
            domain=group.domain,
        )
        self.outcomes[name] = outcome
        for name in (group.prompt_id, *([domain_record(group.domain)] if group.domain else [])):
            self.records[name] = _added(self.records.get(name, _NO_GROUPS), outcome)
            self.changed.add(name)

    def save(self) -> list[PromptOutcome]:
        """Return the outcomes for a batch file, which then has them."""
        outcomes, self.outcomes = sorted(self.outcomes.values()), {}
        return outcomes


def _verdict(member: ModelMember) -> float:
    """Return the reward before the group shaper: the model has no other shaping."""
    return (member.worker_reward if member.worker_reward is not None else member.reward) or 0.0


def _millionths(reward: float) -> int:
    counted = max(-_LARGEST_REWARD, min(_LARGEST_REWARD, reward))
    return math.floor(counted * _MILLIONTHS + 0.5)


def _added(record: PromptRecord, outcome: PromptOutcome) -> PromptRecord:
    rewards = round(record.reward_sum * _MILLIONTHS) + outcome.reward_millionths
    return replace(
        record,
        groups=record.groups + 1,
        members=record.members + outcome.members,
        solved=record.solved + outcome.solved,
        reward_sum=rewards / _MILLIONTHS,
        token_sum=record.token_sum + outcome.token_sum,
        longest=max(record.longest, outcome.longest),
        train_step=max(record.train_step, outcome.train_step),
    )


def _prediction(group: ModelGroup) -> LengthPrediction:
    """Return the expected and the true lengths, in hundredths of a token."""
    member = group.members[0]
    first = member.tokens if member.state is TrajectoryState.SCORED and group.scored > 1 else None
    return LengthPrediction(
        expected=group.expected_tokens,
        mean=round(group.scored_tokens / group.scored, 2),
        first=first,
        rest=None if first is None else round((group.scored_tokens - first) / (group.scored - 1), 2),
    )
