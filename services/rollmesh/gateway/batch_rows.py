"""Rows of a batch file: order, page and text preview of its trajectories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.gateway.models.batch_pages import BatchOrder, BatchPage, BatchTrajectory
from rollmesh.gateway.token_runs import Pieces
from rollmesh.types import Group, Int32Array, Trajectory

_HEAD_TOKENS = 24
_TAIL_TOKENS = 24
_GAP = " \N{HORIZONTAL ELLIPSIS} "


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRow:
    """A trajectory of a batch file, without most of its tokens."""

    trajectory_id: str
    group_id: str
    reward: float | None
    token_count: int
    policy_versions: tuple[int, ...]
    finish_reason: str | None
    shown: tuple[Int32Array, ...]
    """Tokens of the preview: the whole response, or its beginning and its end."""


def rows_of(group: Group) -> list[BatchRow]:
    """Return the rows of a group, in the order of training."""
    return [
        BatchRow(
            trajectory_id=each.trajectory_id,
            group_id=each.group_id,
            reward=reward_of(each),
            token_count=each.response_token_count,
            policy_versions=each.policy_versions,
            finish_reason=None if each.finish_reason is None else each.finish_reason.value,
            shown=shown_ends(each.response_ids),
        )
        for each in group.trajectories
    ]


def batch_page(
    train_step: int,
    rows: Sequence[BatchRow],
    order: BatchOrder,
    descending: bool,
    first: int,
    limit: int,
    pieces: Pieces | None,
) -> BatchPage:
    """Return the rows ``first`` to ``first + limit`` of a batch in an order; only these are decoded."""
    items = [_item(row, pieces) for row in _ordered(rows, order, descending)[first : first + limit]]
    return BatchPage(train_step=train_step, items=items, first=first, total=len(rows))


def reward_of(trajectory: Trajectory) -> float | None:
    """Return the shaped reward; None without a score."""
    return None if trajectory.outcome is None else trajectory.shaped_reward


def shown_ends(first: Int32Array, last: Int32Array | None = None) -> tuple[Int32Array, ...]:
    """Return the tokens of a preview, from a whole response or from its first and its last part."""
    if last is None and len(first) <= _HEAD_TOKENS + _TAIL_TOKENS:
        return (first,)
    tail = first if last is None else last
    return np.copy(first[:_HEAD_TOKENS]), np.copy(tail[-_TAIL_TOKENS:])  # a view would keep every token in memory


def preview_of(shown: Sequence[Int32Array], pieces: Pieces | None) -> str:
    """Return the text of a preview on one line; token ids without a tokenizer."""
    return _GAP.join(_text(ids, pieces) for ids in shown)


def _ordered(rows: Sequence[BatchRow], order: BatchOrder, descending: bool) -> list[BatchRow]:
    if order == "batch":
        return list(reversed(rows)) if descending else list(rows)
    sign = -1.0 if descending else 1.0
    keys: dict[BatchOrder, Callable[[BatchRow], float]] = {
        "reward": lambda row: math.inf if row.reward is None else sign * row.reward,  # unscored rows are always last
        "tokens": lambda row: sign * row.token_count,
    }
    return sorted(rows, key=keys[order])


def _item(row: BatchRow, pieces: Pieces | None) -> BatchTrajectory:
    return BatchTrajectory(
        id=row.trajectory_id,
        group_id=row.group_id,
        reward=row.reward,
        tokens=row.token_count,
        policy_versions=list(row.policy_versions),
        finish_reason=row.finish_reason,
        preview=preview_of(row.shown, pieces),
    )


def _text(ids: Int32Array, pieces: Pieces | None) -> str:
    words = [str(token) for token in ids.tolist()] if pieces is None else ["".join(pieces(ids))]
    return " ".join(" ".join(words).split())
