"""Difficulty-aware length penalty of a group."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.curriculum.shaper_protocol import Closing
from rollmesh.curriculum.shapers.overlong import overlong_penalty
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


def dap(
    group: GroupOutcome,
    records: Mapping[str, PromptRecord],
    *,
    longest_tokens: int,
    buffer_tokens: int,
    gamma: float,
    failure_scale: float,
) -> Closing:
    """Add the overlong penalty, which weighs less for right answers to hard prompts.

    The penalty of ``overlong_penalty`` is multiplied by ``p ** gamma`` for a right answer, p being the share of right
    answers in the group, by ``failure_scale`` for a wrong one, and by 1 for an answer cut off at ``longest_tokens``.
    Source: code of Apriel-Reasoner.
    """
    rate = sum(member.outcome > 0 for member in group.members) / max(1, len(group.members))
    shaped = []
    for member in group.members:
        scale = rate**gamma if member.outcome > 0 else failure_scale
        if member.truncated and member.token_count >= longest_tokens:
            scale = 1.0
        penalty = overlong_penalty(member.token_count, longest_tokens, buffer_tokens)
        shaped.append(member.shaped_reward + scale * penalty)
    return Closing(shaped_rewards=tuple(shaped))
