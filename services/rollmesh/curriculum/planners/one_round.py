"""Planners of one round: the size of the group, a quorum of it, or more than it."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.config.planner_methods import PlannerOptions, QuorumOptions
from rollmesh.curriculum.planner_protocol import Round
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


@dataclass(frozen=True, slots=True)
class OneRoundPlanner:
    """One round for every group; with the options of quorum a share of its members completes it."""

    options: PlannerOptions

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        """Return the only round."""
        launched = self.options.launched(group_size)
        needed = self.options.needed(group_size) if isinstance(self.options, QuorumOptions) else launched
        return Round(needed=needed, launched=launched)

    def next(self, group: GroupOutcome) -> Round | None:
        """Close the group."""
        return None
