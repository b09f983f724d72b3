"""Protocol of planners: how many rollouts a group gets, in which rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of a group."""

    needed: int
    """Scored members of the whole group, those of earlier rounds included, that end the round."""
    launched: int
    """Members that the round launches."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """JSON values handed to the program with each lease of the round."""


class RolloutPlanner(Protocol):
    """Plan of the rounds of a group; a pure function of its arguments."""

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        """Return the first round of a group; ``seen`` is None for a prompt without history."""
        ...

    def next(self, group: GroupOutcome) -> Round | None:
        """Return the next round of a group, or None to close it."""
        ...
