"""A batch as flat columns, per token and per trajectory. Built once, before the split into minibatches."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rollmesh.algorithms.advantages import Advantage, TrajectoryColumns
from rollmesh.errors import DataError
from rollmesh.kept_sets import check_sets, choose_sets, join_sets, trajectory_sets
from rollmesh.trainer.learner.teacher_scores import TeacherScores, teacher_scores, units_of
from rollmesh.types import (
    Batch,
    BoolArray,
    FinishReason,
    Float32Array,
    Float64Array,
    Int32Array,
    Int64Array,
    KeptSets,
    SegmentSource,
    Trajectory,
)

_TRAJECTORY_COLUMNS = (
    "group_index", "prompt_lengths", "rewards", "outcome_values", "truncated", "passed",
)  # fmt: skip
_TOKEN_COLUMNS = (
    "unit_index", "token_ids", "policy_mask", "loss_mask", "behavior_logprobs", "versions", "staleness", "pure",
    "temperatures",
)  # fmt: skip

NO_VERSION = -1
"""Version of tokens that no policy wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Concatenated sequences. Token arrays have one entry per token of ``token_ids``."""

    starts: Int64Array  # [sequences + 1], first token of each sequence
    token_ids: Int32Array  # [tokens]
    policy_mask: BoolArray  # [tokens], the policy wrote it, or learns to write it: scored
    temperatures: Float32Array  # [tokens]
    kept_sets: KeptSets | None  # of all tokens, over which log-probabilities are normalised; None without any

    @property
    def lengths(self) -> Int64Array:
        """Number of tokens of each sequence, prompt included, [sequences]."""
        return np.diff(self.starts)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch(TokenBatch):
    """Concatenated trajectories, prompt and response; the policy mask counts in the denominators.

    A unit has one return and one advantage: a trajectory, a turn, or a session (``trainer.algorithm.credit``).
    """

    train_step: int
    trajectory_ids: tuple[str, ...]
    group_index: Int64Array  # [trajectories], index of the trajectory's group in the batch
    group_count: int
    group_domains: tuple[str, ...]  # [groups], domain of the prompt; empty without domains
    prompt_lengths: Int64Array  # [trajectories]
    rewards: Float64Array  # [trajectories], shaped
    outcome_values: Float64Array  # [trajectories], from the verifier; NaN without a value
    returns: Float64Array  # [units], shaped
    advantages: Float64Array  # [units], NaN until they are known
    unit_index: Int64Array  # [tokens], unit of each token
    truncated: BoolArray  # [trajectories], ended by the token budget
    sequence_index: Int64Array  # [tokens]
    loss_mask: BoolArray  # [tokens], in the numerator of the loss
    masked_by: Mapping[str, BoolArray]  # [tokens] by mask, each token under the first one that took it out of the loss
    behavior_logprobs: Float32Array  # [tokens], 0 where no policy wrote
    versions: Int32Array  # [tokens], NO_VERSION where no policy wrote
    staleness: Int32Array  # [tokens], train steps since the train step of the version; 0 where no policy wrote
    pure: BoolArray  # [tokens], one version's weights and cache sampled it
    passed: BoolArray  # [trajectories], in the forward and backward passes
    unscored: Int64Array  # [groups], trajectories dropped because they have neither a verifier's nor an assigned reward
    teacher: TeacherScores | None  # None unless the step reads the columns of teachers

    def subset(self, chosen: BoolArray) -> "TrainBatch":
        """Return the batch of the ``chosen`` trajectories, bool [trajectories]; itself if that is all of them."""
        if chosen.all():
            return self
        rows, inside = np.flatnonzero(chosen), chosen[self.sequence_index]
        lengths = self.lengths[rows]
        parts = {name: getattr(self, name)[rows] for name in _TRAJECTORY_COLUMNS}
        tokens = {name: getattr(self, name)[inside] for name in _TOKEN_COLUMNS}
        units, tokens["unit_index"] = np.unique(tokens["unit_index"], return_inverse=True)
        return replace(
            self,
            trajectory_ids=tuple(self.trajectory_ids[row] for row in rows),
            starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            sequence_index=np.repeat(np.arange(len(rows), dtype=np.int64), lengths),
            masked_by={mask: column[inside] for mask, column in self.masked_by.items()},
            kept_sets=choose_sets(self.kept_sets, inside),
            teacher=self.teacher and self.teacher.choose(inside),
            returns=self.returns[units],
            advantages=self.advantages[units],
            unscored=np.where(np.isin(np.arange(self.group_count), self.group_index[rows]), self.unscored, 0),
            **parts,
            **tokens,
        )

    @property
    def trajectory_count(self) -> int:
        """Number of trajectories that are trained on."""
        return len(self.trajectory_ids)

    @property
    def response_lengths(self) -> Int64Array:
        """Number of tokens after the prompt, [trajectories]."""
        return self.lengths - self.prompt_lengths

    @property
    def token_advantages(self) -> Float64Array:
        """Advantage of each token: that of its unit, and what a teacher adds to it; [tokens]."""
        of_units: Float64Array = self.advantages[self.unit_index]
        return of_units if self.teacher is None else of_units + self.teacher.advantages

    @property
    def passed_mask(self) -> BoolArray:
        """Tokens that a policy wrote in the trajectories of the passes, [tokens]."""
        return self.policy_mask & self.passed[self.sequence_index]

    def loss_staleness(self) -> Int64Array:
        """Return the largest staleness of the tokens in the loss, 0 for a trajectory without any, [trajectories]."""
        worst = np.zeros(self.trajectory_count, np.int64)
        np.maximum.at(worst, self.sequence_index[self.loss_mask], self.staleness[self.loss_mask])
        return worst


def build_train_batch(
    batch: Batch,
    train_step_of_version: Mapping[int, int],
    advantage: Advantage | None,
    *,
    credit: str = "trajectory",
    max_token_staleness: int | None = None,
    with_teacher: bool = False,
) -> TrainBatch:
    """Flatten a batch, compute its advantages and mark the tokens that are trained on.

    ``train_step_of_version`` has the train step of every policy version that wrote tokens. Advantages compare the
    members that have a reward, including ``reward.fixed_value``; members without one are dropped. ``advantage`` None
    leaves the advantages NaN, for those that need a pass of a policy. ``max_token_staleness`` masks older tokens
    (``on_stale: mask_old_segments``). ``with_teacher`` reads the columns of the teachers. Raises DataError for an
    unknown version, a repeated trajectory, a segment without finite logprobs or with T = 0, a kept set without its
    token, an empty prompt, a batch without a reward, and a trajectory without a column.
    """
    members = _scored_members(batch)
    scored = [t for _, t in members]
    columns = [_columns(t, train_step_of_version, batch.train_step - 1) for t in scored]
    flat = {name: np.concatenate([c[name] for c in columns]) for name in columns[0]}
    lengths = np.array([len(c["token_ids"]) for c in columns], np.int64)
    sequence_index = np.repeat(np.arange(len(members), dtype=np.int64), lengths)
    policy_mask, bound = flat["versions"] != NO_VERSION, max_token_staleness
    # docs/architecture.md: The staleness bound
    loss_mask = policy_mask if bound is None else policy_mask & (flat["staleness"] <= bound)
    unit_index, returns = units_of(scored, credit, sequence_index, policy_mask)
    flattened = TrainBatch(
        train_step=batch.train_step,
        trajectory_ids=tuple(t.trajectory_id for t in scored),
        group_index=np.array([g for g, _ in members], np.int64),
        group_count=len(batch.groups),
        group_domains=tuple(group.trajectories[0].prompt.domain for group in batch.groups),
        starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        prompt_lengths=np.array([len(t.prompt.token_ids) for t in scored], np.int64),
        rewards=np.array([t.shaped_reward for t in scored], np.float64),
        # None, which is no verdict, becomes NaN.
        outcome_values=np.array([t.outcome and t.outcome.verdict for t in scored], np.float64),
        returns=returns,
        advantages=np.full(len(returns), np.nan),
        unit_index=unit_index,
        truncated=np.array([t.finish_reason is FinishReason.LENGTH for t in scored]),
        sequence_index=sequence_index,
        policy_mask=policy_mask,
        loss_mask=loss_mask,
        kept_sets=join_sets((count, trajectory_sets(t)) for count, t in zip(lengths, scored, strict=True)),
        masked_by={} if bound is None else {"stale": policy_mask & ~loss_mask},
        passed=np.ones(len(members), np.bool_),
        teacher=teacher_scores(scored) if with_teacher else None,
        unscored=np.array([sum(t.outcome is None for t in group.trajectories) for group in batch.groups], np.int64),
        **flat,
    )
    if advantage is None:
        return flattened
    return replace(flattened, advantages=advantage(trajectory_columns(flattened)).numpy())


def _scored_members(batch: Batch) -> list[tuple[int, Trajectory]]:
    """Return the trajectories with a reward, each with the index of its group; DataError for none, or one twice."""
    # The queue returns only members with a reward; reward.fixed_value does not change the kind of the outcome.
    members = [(g, t) for g, group in enumerate(batch.groups) for t in group.trajectories if t.outcome is not None]
    if not members:
        total = sum(len(group.trajectories) for group in batch.groups)
        raise DataError(f"batch {batch.train_step}: none of its {total} trajectories has a reward")
    if len({t.trajectory_id for _, t in members}) != len(members):
        raise DataError(f"batch {batch.train_step}: a trajectory occurs twice")
    return members


def trajectory_columns(
    batch: TrainBatch, *, policy: Float64Array | None = None, reference: Float64Array | None = None
) -> TrajectoryColumns:
    """Return the input of the advantages, one row per unit; ``policy`` and ``reference`` are logprobs [tokens]."""
    count = len(batch.returns)
    first = batch.sequence_index[np.unique(batch.unit_index, return_index=True)[1]]

    def sums(logprobs: npt.NDArray[Any] | None) -> torch.Tensor | None:
        if logprobs is None:
            return None
        inside = np.where(batch.policy_mask, logprobs, 0.0)
        return torch.from_numpy(np.bincount(batch.unit_index, inside, count))

    behavior = sums(batch.behavior_logprobs)
    assert behavior is not None
    lengths = np.bincount(batch.unit_index[batch.policy_mask], minlength=count)
    return TrajectoryColumns(
        rewards=torch.from_numpy(batch.returns),
        outcome_values=torch.from_numpy(batch.outcome_values[first]),
        group_index=torch.from_numpy(batch.group_index[first]),
        group_count=batch.group_count,
        lengths=torch.from_numpy(lengths),
        truncated=torch.from_numpy(batch.truncated[first]),
        behavior_logprob_sums=behavior,
        policy_logprob_sums=sums(policy),
        reference_logprob_sums=sums(reference),
    )


def split_minibatches(batch: TrainBatch, count: int) -> list[Int64Array]:
    """Split a batch evenly by whole groups, in order: trajectory indices per minibatch. Empty ones are dropped."""
    edges = np.linspace(0, batch.group_count, count + 1).round().astype(np.int64)
    minibatches = [np.flatnonzero((batch.group_index >= a) & (batch.group_index < b)) for a, b in pairwise(edges)]
    return [minibatch for minibatch in minibatches if len(minibatch)]


def _columns(trajectory: Trajectory, train_step_of_version: Mapping[int, int], current: int) -> dict[str, Any]:
    prompt = trajectory.prompt.token_ids
    if len(prompt) == 0:
        raise DataError(f"trajectory {trajectory.trajectory_id}: the prompt is empty")
    count = len(prompt) + trajectory.response_token_count
    columns = {
        "token_ids": np.concatenate([prompt, trajectory.response_ids]).astype(np.int32, copy=False),
        "behavior_logprobs": np.zeros(count, np.float32),
        "versions": np.full(count, NO_VERSION, np.int32),
        "staleness": np.zeros(count, np.int32),
        "pure": np.zeros(count, np.bool_),
        "temperatures": np.ones(count, np.float32),
    }
    start = len(prompt)
    for segment in trajectory.segments:
        span = slice(start, start + len(segment))
        start += len(segment)
        if segment.source is not SegmentSource.POLICY:
            continue
        where = f"trajectory {trajectory.trajectory_id}, policy_version {segment.policy_version}"
        if segment.behavior_logprobs is None or len(segment.behavior_logprobs) != len(segment):
            raise DataError(f"{where}: behavior_logprobs must have one value per token")
        if not np.isfinite(segment.behavior_logprobs).all():
            raise DataError(f"{where}: a behavior_logprob is not finite")
        if segment.policy_version not in train_step_of_version:
            raise DataError(f"{where}: the policy version is unknown")
        if not segment.temperature > 0:
            raise DataError(f"{where}: temperature={segment.temperature} must be positive for training")
        if segment.kept_sets is not None:
            try:
                check_sets(segment.kept_sets, segment.token_ids)
            except DataError as error:
                raise DataError(f"{where}: {error}") from error
        columns["behavior_logprobs"][span] = segment.behavior_logprobs
        columns["versions"][span] = segment.policy_version
        columns["staleness"][span] = current - train_step_of_version[segment.policy_version]
        columns["pure"][span] = segment.pure
        columns["temperatures"][span] = segment.temperature
    return columns
