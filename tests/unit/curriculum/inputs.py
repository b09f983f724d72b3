"""Prompt tables, histories, and groups as the leader shows them to planners and group shapers."""

from collections.abc import Mapping, Sequence

from rollmesh.curriculum.prompt_tables import History, HistoryTable, PromptTable, prompt_table
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
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


def group_of(
    outcomes: Sequence[float],
    lengths: Sequence[int] | None = None,
    *,
    truncated: Sequence[bool] | None = None,
    round: int = 0,
    launched: int | None = None,
    shaping: float = 0.0,
) -> GroupOutcome:
    """One scored member per outcome; the shaped reward is the outcome plus ``shaping``."""
    lengths = [100] * len(outcomes) if lengths is None else lengths
    truncated = [False] * len(outcomes) if truncated is None else truncated
    members = tuple(
        MemberOutcome(
            member_index=i,
            round=round,
            outcome=outcome,
            shaped_reward=outcome + shaping,
            token_count=length,
            truncated=cut,
        )
        for i, (outcome, length, cut) in enumerate(zip(outcomes, lengths, truncated, strict=True))
    )
    return GroupOutcome(
        group_id="e0-0",
        prompt_id="p0",
        domain="",
        train_step=3,
        round=round,
        launched=len(members) if launched is None else launched,
        members=members,
    )
