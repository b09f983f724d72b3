"""Rollout planners by their name in the run file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.methods import Method
from rollmesh.config.section import Section

_OWN_MOST_PER_MEMBER = 8


class PlannerOptions(Section):
    """Options of a planner of one round with ``schedule.group_size`` members."""

    def launched(self, group_size: int) -> int:
        """Return the most members that the planner launches in a group."""
        return group_size

    def first_launched(self, group_size: int) -> int:
        """Return the members that the planner launches in the first round of a group."""
        return group_size


class DarsOptions(PlannerOptions):
    """Options of dars."""

    rule: Literal["et", "hw"] = "et"
    """et: equal treatment, the sum of a group's absolute advantages does not depend on p; hw: hardness-weighted, hard
    prompts get more."""
    most_members: int | None = Field(default=None, ge=2)
    """N_max: most members of a group; null is 32 with et and 64 with hw."""

    @property
    def largest_group(self) -> int:
        """N_max, the default of the rule filled in."""
        return self.most_members or {"et": 32, "hw": 64}[self.rule]

    def launched(self, group_size: int) -> int:
        return max(group_size, self.largest_group)


class QuorumOptions(PlannerOptions):
    """Options of quorum."""

    share: float = Field(default=0.95, gt=0, le=1)
    """Share of schedule.group_size, rounded up, that completes a group."""

    def needed(self, group_size: int) -> int:
        """Return the number of scored members that complete a group."""
        # 0.95 * 20 is a little above 19 in floating point.
        return math.ceil(self.share * group_size - 1e-9)


class SpareOptions(PlannerOptions):
    """Options of spare."""

    factor: int = Field(default=1, ge=1)
    """Members launched per member of schedule.group_size; 2 in Shuffle-R1."""
    extra: int = Field(default=1, ge=0)
    """Members launched beyond them; 1 in MC-GRPO."""

    @model_validator(mode="after")
    def _launches_more(self) -> Self:
        if self.factor == 1 and self.extra == 0:
            raise ValueError("factor=1 and extra=0 launch nothing more; raise one, or set planner=single")
        return self

    def launched(self, group_size: int) -> int:
        return self.factor * group_size + self.extra

    def first_launched(self, group_size: int) -> int:
        return self.launched(group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerMethod(Method):
    """One planner."""

    options: type[PlannerOptions] = PlannerOptions
    adaptive: bool = False
    """The number of members of a group depends on its rewards."""


PLANNER_METHODS: Mapping[str, PlannerMethod] = MappingProxyType(
    {
        "single": PlannerMethod(source="one round of schedule.group_size rollouts and schedule.spare_members"),
        "dars": PlannerMethod(
            source="DARS (code)",
            options=DarsOptions,
            adaptive=True,
            deviation="a right answer is one with a positive outcome; its advantage is dr_grpo",
        ),
        "quorum": PlannerMethod(
            source="BroRL (descriptions)",
            options=QuorumOptions,
            deviation="the source gives 512 rollouts and no quorum; set schedule.group_size=512",
        ),
        "spare": PlannerMethod(source="MC-GRPO (code): n + 1; Shuffle-R1 (fork): 2 n", options=SpareOptions),
    }
)


def planner_method(name: str) -> PlannerMethod:
    """Return a named planner; that of ``module:name`` may launch by reward."""
    return PLANNER_METHODS.get(name, PlannerMethod(source="your code", adaptive=True))


def most_planned_members(name: str, options: Mapping[str, Any], group_size: int) -> int:
    """Return the most members that a planner launches in a group, 8 per member of ``group_size`` for a user's code."""
    if (method := PLANNER_METHODS.get(name)) is None:
        return _OWN_MOST_PER_MEMBER * group_size
    return method.options.model_validate(dict(options)).launched(group_size)


def first_planned_members(name: str, options: Mapping[str, Any], group_size: int) -> int:
    """Return the members of a group's first round; ``group_size`` for a user's code, which only the leader calls."""
    if (method := PLANNER_METHODS.get(name)) is None:
        return group_size
    return method.options.model_validate(dict(options)).first_launched(group_size)
