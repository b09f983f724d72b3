"""Group shapers: the rewards of a group once all its members have ended; and the overlong penalty of one answer."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollmesh.config.round_methods import SHAPERS
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.types import LARGEST_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Result of a group shaper; one value per scored member, in the order of ``GroupOutcome.members``."""

    shaped_rewards: tuple[float, ...]
    kept_tokens: tuple[int, ...] | None = None
    """Tokens after the prompt that stay of each trajectory, which then ends there; None keeps all."""


GroupShaper = Callable[[GroupOutcome, Mapping[str, PromptRecord]], Closing]
"""Shaper of a group; the mapping has the records of the group's prompt (by its id) and of its domain
(``domain:<name>``) where the prompt history has them."""


def load_shaper(name: str, options: Mapping[str, Any]) -> GroupShaper:
    """Return a group shaper with its options bound. Raises ConfigError for code that cannot be called as one.

    A user's function takes the group, the records and its options as keywords; a result that does not fit the group
    raises DataError.
    """

    def problem(closing: object, group: GroupOutcome, _: object) -> str:
        return f"{found} for group {group.group_id}" if (found := _problem(closing, group)) else ""

    return SHAPERS.bind(name, options, problem)


def _problem(closing: object, group: GroupOutcome) -> str:
    if not isinstance(closing, Closing):
        return f"{type(closing).__name__} instead of a Closing"
    members, rewards, kept = group.members, closing.shaped_rewards, closing.kept_tokens
    if len(rewards) != len(members) or (kept is not None and len(kept) != len(members)):
        return f"other than {len(members)} values, one per member,"
    if not all(isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD for reward in rewards):
        return f"a reward that is not a finite number of at most {LARGEST_REWARD:g} in size"
    if kept is None:
        return ""
    for member, count in zip(members, kept, strict=True):
        if type(count) is not int or not min(1, member.token_count) <= count <= member.token_count:
            return f"kept_tokens={count!r}, expected 1 to {member.token_count},"
    return ""


def unshaped(group: GroupOutcome, records: Mapping[str, PromptRecord]) -> Closing:
    """Return the rewards as the worker has shaped them."""
    return Closing(shaped_rewards=tuple(member.shaped_reward for member in group.members))


def overlong_penalty(token_count: int, budget: int, buffer: int) -> float:
    """Return the soft penalty on answers close to their token budget, in [-1, 0]; it is added to the reward.

    With budget L and buffer b: 0 up to L - b tokens, then linear ``((L - b) - token_count) / b``, -1 from L on.
    ``buffer`` 0 disables it. Source: the soft overlong punishment of DAPO (arXiv 2503.14476).

    >>> overlong_penalty(15360, 16384, 2048)
    -0.5
    """
    if budget < 1 or buffer < 0 or buffer > budget:
        raise ValueError(f"overlong_penalty: need 0 <= buffer <= budget and budget >= 1, got {buffer=}, {budget=}")
    if buffer == 0:
        return 0.0
    excess = token_count - (budget - buffer)
    return -min(max(excess / buffer, 0.0), 1.0)


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
    of their outcome.
    """
    members = group.members
    if len(members) < 2 or not all(member.outcome > 0 for member in members):
        return unshaped(group, records)
    limit = longest_kept([member.token_count for member in members], alpha)
    cut = [member.token_count - limit >= least_excess for member in members]
    if not any(cut):
        return unshaped(group, records)
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
