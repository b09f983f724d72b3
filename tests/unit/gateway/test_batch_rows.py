"""Order and pages of the rows of a batch file."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.gateway.archive import BatchRow, batch_page
from rollmesh.gateway.models.items import BatchOrder


def row(name: str, reward: float | None, token_count: int) -> BatchRow:
    return BatchRow(
        trajectory_id=name,
        group_id="e0-0",
        reward=reward,
        token_count=token_count,
        policy_versions=(0,),
        finish_reason="stop",
        shown=(np.arange(2, dtype=np.int32),),
    )


ROWS = [row("a", 0.5, 3), row("unscored", None, 1), row("b", -1.0, 2), row("c", 0.5, 9)]


@pytest.mark.parametrize(
    ("order", "descending", "names"),
    [
        ("batch", True, ["c", "b", "unscored", "a"]),
        ("reward", False, ["b", "a", "c", "unscored"]),
        ("reward", True, ["a", "c", "b", "unscored"]),
        ("tokens", True, ["c", "a", "b", "unscored"]),
    ],
)
def test_rows_without_a_reward_are_last_in_both_directions(
    order: BatchOrder, descending: bool, names: list[str]
) -> None:
    page = batch_page(1, ROWS, order, descending, 0, 10, None)
    assert [item.id for item in page.items] == names


def test_a_page_beyond_the_end_is_empty_and_has_the_total() -> None:
    page = batch_page(1, ROWS, "batch", False, 50, 50, None)
    assert (page.items, page.total) == ([], 4)
