"""Prompt history of the queue model, and the measured times of its groups and of the trainer."""

import math
from collections import deque
from dataclasses import replace

from rollmesh.prompt_history import LengthPrediction, PromptOutcome, PromptRecord, domain_record
from rollmesh.sim.queue_model.records import ModelGroup, ModelMember
from rollmesh.types import TrajectoryState

_MILLIONTHS = 1_000_000
_LARGEST_REWARD = 1_000_000.0
_MOST_PREDICTIONS = 256
_NO_GROUPS = PromptRecord(groups=0, members=0, solved=0, reward_sum=0.0, token_sum=0, longest=0, train_step=0)
_UPDATE_WEIGHT = 0.25
_MOST_UPDATES = 1000


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
            reward_millionths=sum(
                math.floor(max(-_LARGEST_REWARD, min(_LARGEST_REWARD, reward)) * _MILLIONTHS + 0.5)
                for reward in rewards
            ),
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


class ModelTimes:
    """Time of groups until they are ready, and time of the trainer for an update, in seconds."""

    def __init__(self, groups_per_batch: int) -> None:
        self._ready_weight = 1 / (2 * groups_per_batch)
        self._spent: float | None = None
        self._cut_at: float | None = None
        self._began: float | None = None
        self._announced_at = 0.0
        self.resumed_at = 0.0
        """Time at which the last pause ended; the driver sets it."""
        self.ready_seconds: float | None = None
        self.ready_updates: float | None = None
        self.update_seconds: float | None = None

    def ended(self, now: float, admitted_at: float | None) -> None:
        """Add the time of a group that ends; a group that began again has none."""
        if admitted_at is not None:
            self._spent = (self._spent or 0.0) + now - max(admitted_at, self.resumed_at)

    def ready(self) -> None:
        """Count the time since the last ready group for the group that becomes ready."""
        if self._spent is not None:
            self.ready_seconds = _average(self.ready_seconds, self._spent, self._ready_weight)
            if self.update_seconds:
                updates = min(self._spent // self.update_seconds, _MOST_UPDATES)
                self.ready_updates = _average(self.ready_updates, updates, self._ready_weight)
        self._spent = None

    def cut(self, now: float) -> None:
        """Note the time of a cut."""
        self._cut_at = now

    def trained(self) -> None:
        """Note the report of a trained batch; its update began after its cut and the announcement before it."""
        if self._cut_at is not None:
            self._began = max(self._cut_at, self._announced_at)

    def announced(self, now: float) -> None:
        """Note the announcement of a policy, which ends an update; that of a rollback has none to end."""
        if self._began is not None:
            self.update_seconds = _average(self.update_seconds, now - self._began, _UPDATE_WEIGHT)
        self._began, self._announced_at = None, now


def _average(before: float | None, sample: float, weight: float) -> float:
    return sample if before is None else before + weight * (sample - before)
