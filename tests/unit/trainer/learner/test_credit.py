"""Credit: a turn, or a session with its sub-agents, has one return and one advantage; numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmesh.algorithms.advantages import Advantage, dr_grpo, grpo, reinforce_pp, rloo
from rollmesh.algorithms.old_logprobs import OldLogprobs
from rollmesh.trainer.learner.train_batch import TrainBatch, build_train_batch
from rollmesh.trainer.learner.train_step import token_columns
from rollmesh.types import OutcomeKind, RewardOutcome, Trajectory, TurnReturn
from rollmesh.worker.turns import returns_of

from ....kit.made_batches import batch_of, environment_segment, policy_segment, random_batch, trajectory
from .conftest import VERSIONS, ModelMaker
from .test_step_inputs import trainer_of


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
