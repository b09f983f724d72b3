"""Micro-batches hold every sequence once, within the budget, about equally full."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.algorithms.advantages import TrajectoryColumns
from rollmesh.trainer.learner.packing import balanced_bins, pack
from rollmesh.trainer.learner.train_batch import build_train_batch

from ....kit.made_batches import VOCAB, random_batch


def no_advantage(data: TrajectoryColumns) -> torch.Tensor:
    return data.rewards


@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 400), st.integers(1, 4))
def test_bins_hold_every_sequence_once_within_the_budget(lengths: list[int], budget: int, multiple: int) -> None:
    bins = balanced_bins(lengths, budget, multiple)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) % multiple == 0
    assert sum(not b for b in bins) < multiple
    for b in bins:
        assert len(b) <= 1 or sum(lengths[i] for i in b) <= budget


def test_bins_are_no_more_than_half_again_the_fewest_possible_and_balanced() -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(np.log(99), 0.9, 150), 16, 520).astype(int).tolist()
    bins = balanced_bins(lengths, 2048)
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert len(bins) <= -(-sum(lengths) // 2048) + 1
    assert max(loads) - min(loads) < 0.1 * 2048


def test_more_ranks_than_sequences_leave_empty_bins() -> None:
    assert balanced_bins([5], 16, 3) == [[0], [], []]


def test_sequences_longer_than_the_budget_make_no_empty_bins() -> None:
    assert balanced_bins([16, 9], 4) == [[0], [1]]
    assert balanced_bins([40, 1, 1, 1], 4) == [[0], [1, 2, 3]]
    assert len(balanced_bins([16_384] * 64, 4096, 8)) == 64


def test_packed_rows_predict_the_tokens_that_a_policy_wrote() -> None:
    batch = build_train_batch(random_batch(1), {0: 0}, no_advantage)
    order = list(range(batch.trajectory_count))[::-1]
    micro = pack(batch, order, torch.device("cpu"))
    assert sorted(micro.token_index.tolist()) == np.flatnonzero(batch.policy_mask).tolist()
    for row, target, place, owner in zip(
        micro.rows, micro.targets, micro.token_index, micro.sequence_index, strict=True
    ):
        assert target == batch.token_ids[place]
        assert micro.input_ids[0, row] == batch.token_ids[place - 1]
        sequence = batch.sequence_index[place]
        assert order[int(owner)] == sequence
        assert micro.position_ids[0, row] == place - 1 - batch.starts[sequence]


def test_a_dummy_micro_batch_scores_nothing() -> None:
    batch = build_train_batch(random_batch(1), {0: 0}, no_advantage)
    micro = pack(batch, [], torch.device("cpu"))
    assert micro.token_count == 1 and len(micro.rows) == 0 and len(micro.token_index) == 0 and VOCAB > 0
