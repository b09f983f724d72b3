"""DARS planner: hard prompts get a second round."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.config.planner_methods import DarsOptions
from rollmesh.curriculum.planner_protocol import Round
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


@dataclass(frozen=True, slots=True)
class DarsPlanner:
    """A first round of the group size, and a second one for groups with less than half of the answers right."""

    options: DarsOptions

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        """Return a round of the group size."""
        return Round(needed=group_size, launched=group_size)

    def next(self, group: GroupOutcome) -> Round | None:
        """Return the second round of a group, or None."""
        scored = len(group.members)
        if group.round > 0 or scored == 0:
            return None
        solved = sum(member.outcome > 0 for member in group.members)
        extra = min(
            more_members(scored, solved, self.options.rule),
            self.options.largest_group - max(scored, group.launched),
        )
        return Round(needed=scored + extra, launched=extra) if extra > 0 else None


def more_members(count: int, solved: int, rule: str) -> int:
    """Return the members of a second round after ``solved`` of ``count`` answers were right.

    ``ceil(n (1 / (4 p (1 - p)) - 1))`` for rule et, ``ceil(n (1 / (2 p) - 1))`` for hw, with ``p = solved / n``, or
    ``0.5 / n`` without a right answer; 0 for p of at least a half. In integers, so that rounding cannot add a member.
    Source: code of DARS.
    """
    twice = max(1, 2 * solved)
    missing = count - twice
    if missing <= 0:
        return 0
    if rule == "hw":
        return -(-count * missing // twice)
    return -(-count * missing * missing // (twice * (2 * count - twice)))
