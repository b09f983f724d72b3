"""The draw of replayed groups: its weights, its bound, and that nothing but its inputs decides it."""

import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Literal

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.config.old_logprob_methods import replayed_count
from rollmesh.curriculum.replay import ReplayCandidate, draw_replay, replay_candidates
from rollmesh.types import Batch, Group, OutcomeKind, Prompt, RewardOutcome, Trajectory

from ...kit.answers import answer, written

Weights = Literal["uniform", "reward"]


def candidate(index: int, *, train_step: int = 1, oldest: int = 0, reward: float = 0.0) -> ReplayCandidate:
    return ReplayCandidate(train_step=train_step, group_id=f"e0-{index}", oldest=oldest, reward=reward)


candidates = st.lists(
    st.builds(
        candidate,
        st.integers(0, 200),
        train_step=st.integers(1, 6),
        oldest=st.integers(0, 5),
        reward=st.floats(-2000, 2000),
    ),
    unique_by=lambda c: c.group_id,
    max_size=40,
)


@given(candidates, st.integers(0, 50), st.sampled_from(["uniform", "reward"]), st.integers(0, 8), st.randoms())
def test_a_draw_has_distinct_groups_within_the_bound_and_depends_on_no_order(
    found: list[ReplayCandidate], count: int, by: Weights, bound: int, random: Random
) -> None:
    shuffled = random.sample(found, len(found))
    first, again = (
        draw_replay(group, count, by=by, seed=3, train_step=7, max_staleness=bound) for group in (found, shuffled)
    )
    within = [c for c in found if 6 - c.oldest <= bound]
    assert first == again
    assert len({c.group_id for c in first}) == len(first) == min(count, len(within))
    assert all(c in within for c in first)
    assert first == sorted(first, key=lambda c: (c.train_step, c.group_id))


def test_every_group_is_drawn_equally_often_without_weights() -> None:
    counts = _counts([candidate(i, reward=float(i)) for i in range(10)], 3, by="uniform")
    # 4,000 draws of 3 of 10: 1,200 each, with a standard deviation of 29.
    assert all(abs(counts[f"e0-{i}"] - 1200) < 150 for i in range(10))


def test_the_first_group_is_drawn_with_the_softmax_of_the_rewards() -> None:
    rewards = [0.0, 0.5, 1.0]
    counts = _counts([candidate(i, reward=r) for i, r in enumerate(rewards)], 1, by="reward")
    total = sum(map(math.exp, rewards))
    for index, reward in enumerate(rewards):
        expected = math.exp(reward) / total
        assert abs(counts[f"e0-{index}"] / 4000 - expected) < 0.04


def test_seed_and_step_choose_other_groups() -> None:
    found = [candidate(i) for i in range(40)]
    drawn = {
        tuple(c.group_id for c in draw_replay(found, 5, by="uniform", seed=seed, train_step=step, max_staleness=9))
        for seed in (0, 1)
        for step in (2, 3)
    }
    assert len(drawn) == 4


def test_a_share_of_one_half_doubles_the_batch() -> None:
    assert [replayed_count(16, share) for share in (0.5, 0.25, 0.2, 0.75, 0.01)] == [16, 5, 4, 48, 0]


def test_a_candidate_has_the_oldest_policy_and_the_mean_reward_of_its_scored_answers() -> None:
    scored = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0)
    groups = (
        _group("e0-0", _trajectory((4, 2), 1.0, scored), _trajectory((3,), 0.5, scored)),
        _group("e0-1", _trajectory((9,), 1.0, scored)),
        _group("e0-2", _trajectory((3,), 0.0, None)),
        _group("e0-3", _trajectory((1,), 0.0, None), _trajectory((4,), 1.0, scored)),
    )
    found = replay_candidates(Batch(train_step=5, groups=groups), {1: 0, 2: 1, 3: 2, 4: 3})
    facts = [(c.train_step, c.group_id, c.oldest, c.reward) for c in found]
    assert facts == [(5, "e0-0", 1, 0.75), (5, "e0-3", 3, 1.0)]


def _counts(found: list[ReplayCandidate], count: int, *, by: Weights) -> Counter[str]:
    return Counter(
        c.group_id
        for step in range(4000)
        for c in draw_replay(found, count, by=by, seed=0, train_step=step, max_staleness=5000)
    )


def _group(group_id: str, *members: Trajectory) -> Group:
    return Group(group_id=group_id, admission_index=0, trajectories=members)


def _trajectory(versions: tuple[int, ...], reward: float, outcome: RewardOutcome | None) -> Trajectory:
    prompt = Prompt(prompt_id="p", token_ids=np.zeros(1, np.int32), verifier="exact")
    segments = (written(np.zeros(2, np.int32), version) for version in versions)
    return replace(answer(prompt, *segments), outcome=outcome, shaped_reward=reward)


def test_the_mean_of_finite_rewards_is_finite_although_their_sum_is_not() -> None:
    scored = RewardOutcome(kind=OutcomeKind.SCORED, value=1e308)
    members = (_trajectory((1,), 1e308, scored) for _ in range(3))
    (found,) = replay_candidates(Batch(train_step=2, groups=(_group("e0-0", *members),)), {1: 0})
    assert math.isclose(found.reward, 1e308, rel_tol=1e-12)
