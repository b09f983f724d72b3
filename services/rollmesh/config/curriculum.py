"""Curriculum section: prompts, rounds, group rewards and budgets."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, model_validator

from rollmesh.config.methods import Point
from rollmesh.config.round_methods import BUDGETS, PLANNERS, SHAPERS, planned_members
from rollmesh.config.sampler_methods import SAMPLERS
from rollmesh.config.section import Section

CURRICULUM_POINTS: Mapping[str, Point[Any]] = {
    "sampler": SAMPLERS,
    "planner": PLANNERS,
    "group_shaper": SHAPERS,
    "budget": BUDGETS,
}
"""Points by the name that ``rollmesh config methods`` prints."""
_FIELDS: Mapping[str, Point[Any]] = {
    "sampler": SAMPLERS,
    "planner": PLANNERS,
    "group_shaper": SHAPERS,
    "token_budget": BUDGETS,
    "turn_budget": BUDGETS,
}


class CurriculumConfig(Section):
    """Choice of prompts, rounds of rollouts, rewards within a group, and budgets."""

    sampler: str = Field(default="order", json_schema_extra={"examples": [*SAMPLERS.methods, "module:function"]})
    """Choice of the prompt of each group, or ``module:function`` of your code."""
    sampler_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the sampler; ``rollmesh config methods`` lists them."""
    planner: str = Field(default="single", json_schema_extra={"examples": [*PLANNERS.methods, "module:function"]})
    """Rounds of rollouts of each group, or ``module:function`` of your code."""
    planner_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the planner; ``rollmesh config methods`` lists them."""
    most_members: int | None = Field(default=None, ge=1)
    """Members of a group in all rounds at which it is closed, whatever its planner wants; null is the most that the
    planner launches, and 8 * schedule.group_size for a planner of your code. With ``trainer.algorithm.credit: shared``
    the most trajectories of a group, those of sub-agents included, at least 2 * schedule.group_size."""
    group_shaper: str = Field(default="none", json_schema_extra={"examples": [*SHAPERS.methods, "module:function"]})
    """Shaping of rewards that compares the members of a group, before the zero-variance filter; or ``module:function``
    of your code."""
    group_shaper_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the group shaper; ``rollmesh config methods`` lists them."""
    token_budget: str = Field(default="constant", json_schema_extra={"examples": [*BUDGETS.methods, "module:function"]})
    """Token budget of a trajectory by the train step of its first policy, at most rollout.max_new_tokens; or
    ``module:function`` of your code."""
    token_budget_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the token budget; ``rollmesh config methods`` lists them."""
    turn_budget: str = Field(default="constant", json_schema_extra={"examples": [*BUDGETS.methods, "module:function"]})
    """Turns of a multi-turn trajectory by the train step of its first policy; or ``module:function`` of your code."""
    turn_budget_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the turn budget; ``rollmesh config methods`` lists them."""

    @model_validator(mode="after")
    def _names_and_options_are_known(self) -> Self:
        for field, point in _FIELDS.items():
            name = getattr(self, field)
            try:
                point.check_name(name)
            except ValueError as error:
                raise ValueError(f"{field}={name}: {error}") from None
            point.complete_options(name, getattr(self, f"{field}_options"), f"{field}_options")
        return self

    def largest_group(self, group_size: int) -> int:
        """Return ``most_members``, its default filled in; ``group_size`` is that of the schedule."""
        return self.most_members or planned_members(self.planner, self.planner_options, group_size)[1]

    def first_members(self, group_size: int) -> int:
        """Return the members that the first round of a group launches, without ``schedule.spare_members``."""
        return planned_members(self.planner, self.planner_options, group_size)[0]

    def members_in_all_rounds(self, group_size: int) -> int:
        """Return the most members that the rounds of a group launch, without ``schedule.spare_members``."""
        first = self.first_members(group_size)
        return first if self.planner == "single" else max(first, self.largest_group(group_size))
