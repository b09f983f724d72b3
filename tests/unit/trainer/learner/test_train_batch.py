"""A batch becomes flat columns with units of credit; what cannot be trained on is refused or left out by name."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.algorithms.advantages import Advantage, dr_grpo, grpo, reinforce_pp, rloo
from rollmesh.algorithms.ratios import OldLogprobs
from rollmesh.errors import DataError
from rollmesh.trainer.learner.train_batch import NO_VERSION, TrainBatch, build_train_batch, split_minibatches
from rollmesh.trainer.learner.train_step import token_columns
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, Trajectory, TurnReturn
from rollmesh.worker.turns import returns_of

from ....kit.made_batches import VOCAB, batch_of, environment_segment, policy_segment, random_batch, sets_of, trajectory
from .conftest import VERSIONS, ModelMaker
from .test_step_inputs import trainer_of


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
        (
            {"kept_sets": sets_of([[], [VOCAB]])},
            r"g0\.0, policy_version 0: kept_sets: set 1 has 1 ids, but not that of",
        ),
    ],
)
def test_a_segment_that_cannot_be_trained_on_is_refused_by_name(
    rng: np.random.Generator, segment: dict[str, Any], problem: str
) -> None:
    logprobs = {name: segment.pop(name) for name in ("behavior_logprobs", "kept_sets") if name in segment}
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


def turns(*of: tuple[int, float]) -> RewardOutcome:
    """The outcome of turns with these tokens and rewards, and no reward of the end."""
    ends, returns = np.cumsum([count for count, _ in of]), returns_of([reward for _, reward in of])
    found = tuple(TurnReturn(end=int(end), value=value) for end, value in zip(ends, returns, strict=True))
    return RewardOutcome(kind=OutcomeKind.SCORED, value=returns[0], turns=found)


def two_members(shaping: float = 0.0) -> list[Trajectory]:
    """Turns of 2 and 1 tokens with the rewards 0 and 1, and of 1, 2 and 1 tokens with 0.5, 0 and -1."""
    rng = np.random.default_rng(0)
    first = [policy_segment(rng, 2), environment_segment(rng, 3), policy_segment(rng, 1)]
    # The second turn has two policy versions, and no token of the environment before it.
    second = [policy_segment(rng, 2), policy_segment(rng, 1), environment_segment(rng, 1), policy_segment(rng, 1)]
    return [
        trajectory("g0.0", first, 1.0, prompt=2, outcome=turns((2, 0.0), (1, 1.0))),
        trajectory("g0.1", second, -0.5 + shaping, prompt=1, outcome=turns((1, 0.5), (2, 0.0), (1, -1.0))),
    ]


def by_token(flat: TrainBatch) -> list[list[float]]:
    """Advantages of the tokens that a policy wrote, of each trajectory, as the loss reads them."""
    zeros = torch.zeros(len(flat.token_ids), dtype=torch.float64)
    old = OldLogprobs(values=zeros, from_trainer=zeros.bool(), fell_back={})
    advantages = token_columns(flat, old, zeros, None).advantages.numpy()
    return [
        advantages[flat.policy_mask & (flat.sequence_index == row)].tolist() for row in range(flat.trajectory_count)
    ]


def test_a_return_is_what_comes_from_its_turn_on() -> None:
    assert returns_of([0.5, 0.0, -1.0]) == [-0.5, -1.0, -1.0]
    assert returns_of([0.5, 0.0, -1.0], 2.0) == [1.5, 1.0, 1.0]
    assert returns_of([]) == []


# Returns 1, 1 and -0.5, -1, -1: their mean is -0.1, the sum of the squares around it 4.2, the variance 4.2 / 4.
@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (dr_grpo, [1.1, 1.1, -0.4, -0.9, -0.9]),
        (grpo, [1.0734901, 1.0734901, -0.3903600, -0.8783101, -0.8783101]),
        (reinforce_pp, [1.0734901, 1.0734901, -0.3903600, -0.8783101, -0.8783101]),
        (rloo, [1.375, 1.375, -0.5, -1.125, -1.125]),
    ],
)
def test_the_turns_of_a_group_are_compared_and_each_token_has_the_advantage_of_its_turn(
    advantage: Advantage, expected: list[float]
) -> None:
    flat = build_train_batch(batch_of(two_members()), {0: 0}, advantage, credit="turn")
    assert flat.advantages.tolist() == pytest.approx(expected, abs=2e-6)
    a, b, c, d, e = flat.advantages
    assert by_token(flat) == [[a, a, b], [c, d, d, e]]
    assert flat.rewards.tolist() == [1.0, -0.5], "trajectories keep their rewards"


def test_what_shaping_adds_counts_for_every_turn_of_its_trajectory() -> None:
    flat = build_train_batch(batch_of(two_members(shaping=-0.25)), {0: 0}, dr_grpo, credit="turn")
    # Returns 1, 1, -0.75, -1.25, -1.25 with the mean -0.25.
    assert flat.advantages.tolist() == pytest.approx([1.25, 1.25, -0.5, -1.0, -1.0])


def test_turns_without_a_token_count_in_no_baseline() -> None:
    first, second = two_members()
    empty = turns((1, 0.5), (0, 4.0), (2, 0.0), (1, -1.0))
    # The group shaper may have cut off the last turn, whose reward remains in the returns before it.
    cut = replace(second, segments=second.segments[:2], outcome=empty, shaped_reward=empty.value)
    flat = build_train_batch(batch_of([first, cut]), {0: 0}, dr_grpo, credit="turn")
    # Returns 1, 1 and 3.5, -1 with the mean 1.125.
    assert flat.advantages.tolist() == pytest.approx([-0.125, -0.125, 2.375, -2.125])
    assert [len(of) for of in by_token(flat)] == [3, 3]


def test_a_trajectory_without_rewards_by_turn_is_one_turn() -> None:
    batch = random_batch(3, groups=4, members=3)
    by_turn = build_train_batch(batch, {0: 0}, grpo, credit="turn")
    whole = build_train_batch(batch, {0: 0}, grpo)
    assert by_turn.advantages.tolist() == whole.advantages.tolist() and by_token(by_turn) == by_token(whole)


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [(dr_grpo, [0.5, -0.5, 0.0]), (grpo, [0.999998, -0.999998, 0.0]), (rloo, [0.75, -0.75, 0.0])],
)
def test_a_shared_reward_counts_once_in_its_group(advantage: Advantage, expected: list[float]) -> None:
    rng = np.random.default_rng(0)
    rewards = {"a": 1.0, "b": 0.0, "c": 0.5}
    members = [
        trajectory(
            f"g0.{number}",
            [policy_segment(rng, 1 + number)],
            rewards[session],
            outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=rewards[session], shared_by=session),
        )
        for number, session in enumerate("abaaccc")
    ]
    # By trajectory the mean would be 4.5 / 7; of the three sessions it is 0.5, and the deviation 0.5.
    flat = build_train_batch(batch_of(members), {0: 0}, advantage, credit="shared")
    assert flat.advantages.tolist() == pytest.approx(expected, abs=1e-6)
    a, b, c = flat.advantages
    assert [set(of) for of in by_token(flat)] == [{a}, {b}, {a}, {a}, {c}, {c}, {c}]


def test_a_shared_return_is_the_mean_of_the_shaped_rewards_of_its_trajectories() -> None:
    rng = np.random.default_rng(0)
    shared = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0, shared_by="a")
    alone = RewardOutcome(kind=OutcomeKind.SCORED, value=0.0)
    members = [
        trajectory("g0.0", [policy_segment(rng, 2)], 1.0, outcome=shared),
        trajectory("g0.1", [policy_segment(rng, 2)], 0.5, outcome=shared),
        trajectory("g0.2", [policy_segment(rng, 2)], 0.25, outcome=alone),
    ]
    flat = build_train_batch(batch_of(members), {0: 0}, dr_grpo, credit="shared")
    assert flat.returns.tolist() == [0.75, 0.25] and flat.advantages.tolist() == [0.25, -0.25]


def test_a_part_of_a_batch_keeps_its_advantages_by_turn() -> None:
    flat = build_train_batch(batch_of(two_members()), {0: 0}, dr_grpo, credit="turn")
    part = flat.subset(np.array([False, True]))
    assert part.advantages.tolist() == flat.advantages[2:].tolist() and by_token(part) == by_token(flat)[1:]


def test_a_train_step_reads_the_credit_of_its_settings(make_model: ModelMaker) -> None:
    folder, batch = make_model("qwen2"), batch_of(two_members())
    trainer = trainer_of(folder, advantage="dr_grpo", credit="turn")
    explained = [t.advantage for t in trainer.explain(batch, VERSIONS) if t.policy_version is not None]
    assert explained == pytest.approx([1.1, 1.1, 1.1, -0.4, -0.9, -0.9, -0.9])
    # Returns 1.5 and 0 of each: advantages 0.75 and -0.75 by turn, and 0 by trajectory.
    rng = np.random.default_rng(0)
    equal = batch_of(
        [
            trajectory(
                f"g0.{member}",
                [policy_segment(rng, 3), environment_segment(rng, 1), policy_segment(rng, 2)],
                1.5,
                outcome=turns((3, 1.5), (2, 0.0)),
            )
            for member in range(2)
        ]
    )
    reports = {
        credit: trainer_of(folder, advantage="dr_grpo", skip_zero_advantage=True, credit=credit).train(equal, VERSIONS)
        for credit in ("trajectory", "turn")
    }
    assert reports["trajectory"].grad_norm == 0.0 < reports["turn"].grad_norm
    assert reports["turn"].batch.skipped_trajectories == 0
    assert (reports["trajectory"].batch.advantage_abs_mean, reports["turn"].batch.advantage_abs_mean) == (0.0, 0.75)
