"""A planner of your own: one more answer per round until one is right, in at most ``most`` rounds.

curriculum:
  planner: own_planner:UntilSolved
  planner_options: {most: 4}
trainer:
  algorithm: {advantage: dr_grpo}
"""

from dataclasses import dataclass

from rollmesh.curriculum.planners import Round
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord


@dataclass(frozen=True)
class UntilSolved:
    most: int = 4

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        return Round(needed=group_size, launched=group_size)

    def next(self, group: GroupOutcome) -> Round | None:
        if any(member.outcome > 0 for member in group.members) or group.round + 1 >= self.most:
            return None
        return Round(needed=len(group.members) + 1, launched=1)
