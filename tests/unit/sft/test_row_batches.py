"""The order of the rows, and their columns."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.sft.row_batches import EpochOrder, rows_digest, token_batch
from rollmesh.sft.training_rows import SftRow


def row(*ids: int, targets: tuple[int, ...]) -> SftRow:
    mask = np.zeros(len(ids), np.bool_)
    mask[list(targets)] = True
    return SftRow(token_ids=np.array(ids, np.int32), loss_mask=mask)


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_epoch_has_every_row_once_and_its_last_batch_the_rest(shuffle: bool) -> None:
    order = EpochOrder(10, 4, 7, shuffle)
    assert order.epoch_steps == 3
    epochs = [[order.rows(3 * epoch + step).tolist() for step in (1, 2, 3)] for epoch in range(2)]
    assert [[len(batch) for batch in epoch] for epoch in epochs] == [[4, 4, 2]] * 2
    first, second = ([row for batch in epoch for row in batch] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(10))
    assert (first != second) is shuffle
    assert (first == list(range(10))) is not shuffle


def test_a_step_has_the_same_rows_whatever_was_asked_before_and_a_seed_changes_them() -> None:
    order = EpochOrder(64, 8, 1, True)
    forwards = [order.rows(step).tolist() for step in range(1, 25)]
    assert [EpochOrder(64, 8, 1, True).rows(step).tolist() for step in range(24, 0, -1)][::-1] == forwards
    assert EpochOrder(64, 8, 2, True).rows(1).tolist() != forwards[0]


def test_rows_are_concatenated_and_no_first_token_is_a_target() -> None:
    batch = token_batch([row(5, 6, 7, targets=(1, 2)), row(8, 9, targets=(0, 1))])
    assert batch.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.starts.tolist() == [0, 3, 5]
    assert batch.policy_mask.tolist() == [False, True, True, False, True]


def test_the_digest_of_rows_tells_tokens_targets_order_and_their_ends() -> None:
    rows = [row(1, 2, 3, targets=(2,)), row(4, 5, targets=(1,))]
    others = [
        [row(1, 2, 9, targets=(2,)), rows[1]],
        [row(1, 2, 3, targets=(1,)), rows[1]],
        rows[::-1],
        [row(1, 2, 3, 4, targets=(2,)), row(5, targets=())],
    ]
    assert rows_digest(rows) == rows_digest([row(1, 2, 3, targets=(2,)), row(4, 5, targets=(1,))])
    assert len({rows_digest(each) for each in [rows, *others]}) == 5
