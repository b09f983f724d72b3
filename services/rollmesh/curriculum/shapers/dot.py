"""Dynamic outlier truncation: the longest answers of a group that solves its prompt end early."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from rollmesh.curriculum.shaper_protocol import Closing
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


def dot(
    group: GroupOutcome,
    records: Mapping[str, PromptRecord],
    *,
    alpha: float,
    least_excess: int,
    truncated_reward: float,
) -> Closing:
    """Truncate the outliers of a group whose answers are all right.

    Answers at least ``least_excess`` tokens longer than ``longest_kept`` end there, with ``truncated_reward`` in place
    of their outcome. Source: code of DOT, which verifies a truncated answer again.
    """
    members = group.members
    if len(members) < 2 or not all(member.outcome > 0 for member in members):
        return Closing(shaped_rewards=tuple(member.shaped_reward for member in members))
    limit = longest_kept([member.token_count for member in members], alpha)
    cut = [member.token_count - limit >= least_excess for member in members]
    if not any(cut):
        return Closing(shaped_rewards=tuple(member.shaped_reward for member in members))
    return Closing(
        shaped_rewards=tuple(
            member.shaped_reward + (truncated_reward - member.outcome if is_cut else 0.0)
            for member, is_cut in zip(members, cut, strict=True)
        ),
        kept_tokens=tuple(limit if is_cut else member.token_count for member, is_cut in zip(members, cut, strict=True)),
    )


def longest_kept(lengths: list[int], alpha: float) -> int:
    """Return ``int(mean + alpha * std)`` of at least two lengths, ddof 1, and at least 1."""
    return max(1, int(statistics.fmean(lengths) + alpha * statistics.stdev(lengths)))
