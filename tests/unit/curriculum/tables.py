"""Prompt tables and histories for tests of samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rollmesh.curriculum.prompt_tables import History, HistoryTable, PromptTable, prompt_table
from rollmesh.prompt_history import PromptRecord


def record(solved: int = 0, members: int = 0, *, groups: int = 1, rewards: float | None = None) -> PromptRecord:
    total = float(solved) if rewards is None else rewards
    return PromptRecord(
        groups=groups,
        members=members,
        solved=solved,
        reward_sum=total,
        token_sum=10 * members,
        longest=10,
        train_step=0,
    )


def tables(
    records: Sequence[PromptRecord | None],
    *,
    domains: Sequence[str] = (),
    totals: Mapping[str, int] | None = None,
    weights: Mapping[str, float] | None = None,
    in_progress: Sequence[int] = (),
    endless: Sequence[bool] = (),
) -> tuple[PromptTable, History]:
    """Return the table of as many rows as records, with the history; None for an unseen row."""
    count = len(records)
    names = [str(row) for row in range(count)]
    table = prompt_table(names, domains or [""] * count, endless or [False] * count, weights or {})
    history = HistoryTable(table)
    history.update({name: found for name, found in zip(names, records, strict=True) if found is not None})
    history.update({f"domain:{name}": record(0, members) for name, members in (totals or {}).items()})
    history.set_in_progress([str(row) for row in in_progress])
    return table, history.columns
