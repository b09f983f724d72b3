"""Groups as the leader shows them to planners and group shapers."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.group_outcome import GroupOutcome, MemberOutcome


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
