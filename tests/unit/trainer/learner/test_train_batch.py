"""A batch becomes flat columns; what cannot be trained on is refused or left out by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from rollmesh.algorithms.advantages import grpo
from rollmesh.errors import DataError
from rollmesh.trainer.learner.train_batch import NO_VERSION, build_train_batch, split_minibatches
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome

from ....kit.made_batches import batch_of, environment_segment, policy_segment, random_batch, trajectory


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_columns_follow_the_segments(rng: np.random.Generator) -> None:
    old, tool = policy_segment(rng, 3, version=2, temperature=0.7), environment_segment(rng, 2)
    new = policy_segment(rng, 4, version=5, kv_min_version=2)
    member = trajectory("g0.0", [old, tool, new], 1.0, prompt=2, finish=FinishReason.LENGTH)
    other = trajectory("g0.1", [policy_segment(rng, 1, version=5)], 0.0, prompt=3)
    flat = build_train_batch(batch_of([member, other], train_step=5), {2: 2, 5: 4}, grpo)
    first = slice(0, 11)
    assert flat.token_ids[first].tolist() == [*member.prompt.token_ids, *member.response_ids]
    assert flat.policy_mask[first].tolist() == [False] * 2 + [True] * 3 + [False] * 2 + [True] * 4
    assert flat.versions[first].tolist() == [NO_VERSION] * 2 + [2] * 3 + [NO_VERSION] * 2 + [5] * 4
    assert flat.staleness[first].tolist() == [0] * 2 + [2] * 3 + [0] * 6
    assert flat.pure[first].tolist() == [False] * 2 + [True] * 3 + [False] * 6
    np.testing.assert_array_equal(flat.behavior_logprobs[2:5], old.behavior_logprobs)
    np.testing.assert_array_equal(flat.temperatures[first], np.float32([1, 1, 0.7, 0.7, 0.7, 1, 1, 1, 1, 1, 1]))
    assert flat.starts.tolist() == [0, 11, 15] and flat.response_lengths.tolist() == [9, 1]
    assert flat.truncated.tolist() == [True, False]
    assert flat.loss_staleness().tolist() == [2, 0]
    assert flat.advantages.tolist() == pytest.approx([0.70710578, -0.70710578], abs=1e-6)


def test_old_segments_leave_the_loss_and_stay_in_the_denominator(rng: np.random.Generator) -> None:
    member = trajectory("g0.0", [policy_segment(rng, count, version=v) for count, v in ((3, 1), (1, 2), (2, 3))])
    flat = build_train_batch(batch_of([member], train_step=4), {v: v for v in (1, 2, 3)}, grpo, max_token_staleness=1)
    assert flat.policy_mask.sum() == 6 and flat.loss_mask.sum() == 3 and flat.masked_by["stale"].sum() == 3
    assert flat.loss_staleness().tolist() == [1]


def test_advantages_compare_the_members_that_have_a_reward_only(rng: np.random.Generator) -> None:
    members = [trajectory(f"g0.{i}", [policy_segment(rng, 2)], reward) for i, reward in enumerate((1.0, 0.0, 1.0))]
    members[1] = dataclasses.replace(members[1], outcome=None)
    flat = build_train_batch(batch_of(members), {0: 0}, grpo)
    assert flat.trajectory_ids == ("g0.0", "g0.2") and flat.unscored.sum() == 1
    assert flat.advantages.tolist() == [0.0, 0.0]


def test_dropped_members_are_counted_with_their_own_group(rng: np.random.Generator) -> None:
    members = [trajectory(f"g{i // 2}.{i % 2}", [policy_segment(rng, 2)], 1.0) for i in range(4)]
    members[1] = dataclasses.replace(members[1], outcome=None)
    flat = build_train_batch(batch_of(members[:2], members[2:]), {0: 0}, grpo)
    second = flat.group_index == 1
    assert (flat.subset(~second).unscored.sum(), flat.subset(second).unscored.sum()) == (1, 0)


def test_a_value_that_the_run_assigns_to_a_time_out_counts_as_any_reward(rng: np.random.Generator) -> None:
    late = RewardOutcome(kind=OutcomeKind.TIMED_OUT)
    members = [
        trajectory("g0.0", [policy_segment(rng, 2)], 1.0),
        trajectory("g0.1", [policy_segment(rng, 2)], -1.0, outcome=late),
    ]
    flat = build_train_batch(batch_of(members), {0: 0}, grpo)
    assert flat.rewards.tolist() == [1.0, -1.0] and flat.unscored.sum() == 0
    assert flat.advantages.tolist() == pytest.approx([0.70710578, -0.70710578], abs=1e-6)
    assert flat.outcome_values[0] == 1.0 and np.isnan(flat.outcome_values[1]), "no verifier gave the second one"


@pytest.mark.parametrize(
    ("segment", "problem"),
    [
        ({"version": 9}, r"g0\.0, policy_version 9: the policy version is unknown"),
        ({"temperature": 0.0}, r"g0\.0.*temperature=0\.0 must be positive"),
        ({"behavior_logprobs": None}, r"g0\.0.*behavior_logprobs must have one value per token"),
        ({"behavior_logprobs": np.float32([-1, np.nan])}, r"g0\.0.*not finite"),
    ],
)
def test_a_segment_that_cannot_be_trained_on_is_refused_by_name(
    rng: np.random.Generator, segment: dict[str, Any], problem: str
) -> None:
    logprobs = {name: segment.pop(name) for name in ("behavior_logprobs",) if name in segment}
    made = dataclasses.replace(policy_segment(rng, 2, **segment), **logprobs)
    with pytest.raises(DataError, match=f"trajectory {problem}"):
        build_train_batch(batch_of([trajectory("g0.0", [made])]), {0: 0}, grpo)


def test_an_empty_prompt_a_repeated_trajectory_and_a_batch_without_a_reward_are_refused(
    rng: np.random.Generator,
) -> None:
    member = trajectory("g0.0", [policy_segment(rng, 2)])
    unscored = dataclasses.replace(member, outcome=None)
    for batch, problem in (
        (batch_of([trajectory("g0.0", [policy_segment(rng, 2)], prompt=0)]), r"g0\.0: the prompt is empty"),
        (batch_of([member], [member]), "occurs twice"),
        (batch_of([unscored]), "none of its 1 trajectories has a reward"),
    ):
        with pytest.raises(DataError, match=problem):
            build_train_batch(batch, {0: 0}, grpo)


def test_minibatches_split_whole_groups_in_order() -> None:
    flat = build_train_batch(random_batch(0, groups=4, members=3), {0: 0}, grpo)
    parts = split_minibatches(flat, 2)
    assert [p.tolist() for p in parts] == [list(range(6)), list(range(6, 12))]
    assert len(split_minibatches(flat, 9)) == 4
