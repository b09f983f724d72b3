"""Protocol of group shapers: the rewards of a group once all its members have ended."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Result of a group shaper; one value per scored member, in the order of ``GroupOutcome.members``."""

    shaped_rewards: tuple[float, ...]
    kept_tokens: tuple[int, ...] | None = None
    """Tokens after the prompt that stay of each trajectory, which then ends there; None keeps all."""


GroupShaper = Callable[[GroupOutcome, Mapping[str, PromptRecord]], Closing]
"""Shaper of a group; the mapping has the records of the group's prompt (by its id) and of its domain
(``domain:<name>``) where the prompt history has them."""
