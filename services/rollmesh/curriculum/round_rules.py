"""Decision at the end of a group's round: another round, or the end with the rewards of the group shaper."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from rollmesh.config import RunConfig
from rollmesh.curriculum.planners import RolloutPlanner, Round, load_planner
from rollmesh.curriculum.shapers import Closing, GroupShaper, load_shaper
from rollmesh.errors import DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord

Records = Mapping[str, PromptRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDecision:
    """Next round of a group, or its end: exactly one of both is set."""

    extension: Round | None = None
    closing: Closing | None = None
    is_bounded: bool = False
    """True if the planner wanted more members than the group may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRules:
    """Planner and group shaper of a run; their results are checked, and errors of a user's code are DataErrors."""

    planner: RolloutPlanner | None
    """None for one round of all members."""
    shaper: GroupShaper
    planner_name: str
    group_size: int
    spare_members: int
    most_members: int
    """Members of a group at which it is closed, whatever its planner wants."""

    @classmethod
    def from_config(cls, config: RunConfig, *, group_size: int, spare_members: int) -> Self | None:
        """Return the rules of a run; None if its groups end without a decision of the leader.

        Raises ConfigError for a user's code that cannot be loaded or called.
        """
        section = config.curriculum
        is_single = section.planner == "single"
        if is_single and section.group_shaper == "none":
            return None
        return cls(
            planner=None if is_single else load_planner(section.planner, section.planner_options),
            shaper=load_shaper(section.group_shaper, section.group_shaper_options),
            planner_name=section.planner,
            group_size=group_size,
            spare_members=spare_members,
            most_members=section.largest_group(group_size),
        )

    def first(self, seen: PromptRecord | None) -> Round:
        """Return the first round of a group. Raises DataError, which names the planner, for a round that cannot be."""
        if self.planner is None:
            return Round(needed=self.group_size, launched=self.group_size + self.spare_members)
        found = self.planner.first(seen, self.group_size)
        # Advantages within a group need two scores; a group of one is compared with its batch.
        least = min(2, self.group_size)
        if not least <= found.needed <= found.launched <= self.most_members:
            raise DataError(
                f"curriculum.planner={self.planner_name}: its first round is needed={found.needed}, launched="
                f"{found.launched}; expected {least} <= needed <= launched <= {self.most_members} "
                "(curriculum.most_members)"
            )
        return found

    def decide(self, group: GroupOutcome, records: Records) -> RoundDecision:
        """Return the next round of a group, or its end. Raises DataError, which names the planner or the shaper.

        A round that would exceed the most members of a group is cut down to them; with no member left, the group ends.
        """
        wanted = None if self.planner is None else self.planner.next(group)
        if wanted is None:
            return RoundDecision(closing=self.shaper(group, records))
        scored, room = len(group.members), self.most_members - group.launched
        if wanted.launched < 1 or wanted.needed <= scored:
            raise DataError(
                f"curriculum.planner={self.planner_name}: after round {group.round} of group {group.group_id} it asked "
                f"for needed={wanted.needed}, launched={wanted.launched}; expected needed above the {scored} scored "
                "members and launched of at least 1, or None to close the group"
            )
        if room < 1:
            return RoundDecision(closing=self.shaper(group, records), is_bounded=True)
        launched = min(room, wanted.launched)
        # Members that never got a score may leave fewer than the planner counted on.
        needed = min(wanted.needed, scored + launched)
        extension = replace(wanted, needed=needed, launched=launched)
        return RoundDecision(extension=extension, is_bounded=launched < wanted.launched)

    def encode_plan(self, planned: Round) -> str:
        """Encode the plan of a round as JSON; raises DataError, which names the planner, for values that JSON lacks."""
        try:
            return json.dumps(dict(planned.plan), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"curriculum.planner={self.planner_name}: the plan {planned.plan!r} of a round is not JSON: {error}"
            ) from error
