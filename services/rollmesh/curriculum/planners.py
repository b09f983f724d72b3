"""Planners: how many rollouts a group gets, in which rounds; and the decision of the leader at the end of a round."""

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from rollmesh.config import RunConfig
from rollmesh.config.methods import is_own
from rollmesh.config.round_methods import PLANNERS, DarsOptions, PlannerOptions
from rollmesh.curriculum.shapers import Closing, GroupShaper, load_shaper
from rollmesh.errors import ConfigError, DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.user_code import call_target, load_target, own_code


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


def load_planner(name: str, options: Mapping[str, Any]) -> RolloutPlanner:
    """Return a planner; ``module:name`` is a class, or a function that returns a planner, called with the options.

    Raises ConfigError for code that cannot be a planner. A planner of a user's code raises DataError for a round that
    is none.
    """
    field_name = PLANNERS.field
    complete = PLANNERS.complete_options(name, options)
    make = load_target(PLANNERS.target(name), field_name)
    if not is_own(name):
        known: RolloutPlanner = make(PLANNERS[name].options(**complete))
        return known
    built: RolloutPlanner = call_target(make, name, field_name, complete, f"{field_name}_options")
    for method, inputs in (("first", ("seen", "group_size")), ("next", ("group",))):
        try:
            inspect.signature(getattr(built, method)).bind(*inputs)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{field_name}: {name} needs a method {method}({', '.join(inputs)}): {error}") from error
    return OwnPlanner(f"{field_name}={name}", built)


@dataclass(frozen=True, slots=True)
class OwnPlanner:
    """Planner of a user's code: its errors, and rounds that are none, are errors of its field."""

    where: str
    planner: RolloutPlanner

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        """Return the first round. Raises DataError if it is none, or asks for no member."""
        with own_code(self.where):
            found = self.planner.first(seen, group_size)
        return self._checked(found, "first")

    def next(self, group: GroupOutcome) -> Round | None:
        """Return the next round, or None. Raises DataError for something else, or a round without a new member."""
        with own_code(self.where):
            found = self.planner.next(group)
        return None if found is None else self._checked(found, "next")

    def _checked(self, found: object, method: str) -> Round:
        if not isinstance(found, Round):
            raise DataError(f"{self.where}: {method} returned {type(found).__name__} instead of a Round")
        for count in ("needed", "launched"):
            value = getattr(found, count)
            if type(value) is not int or value < 1:
                raise DataError(f"{self.where}: {method} returned {count}={value!r}; expected 1 or more")
        return found


@dataclass(frozen=True, slots=True)
class OneRoundPlanner:
    """One round of the group's size, which all members complete, or with quorum the share ``share`` of them.

    With spare it has ``factor`` times as many members, and ``extra`` beyond.
    """

    options: PlannerOptions

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        return Round(needed=self.options.needed(group_size), launched=self.options.launched(group_size))

    def next(self, group: GroupOutcome) -> Round | None:
        return None


@dataclass(frozen=True, slots=True)
class DarsPlanner:
    """A round of the group's size n, and with a share p < 1/2 of right answers a second one.

    It has ``ceil(n (1 / (4 p (1 - p)) - 1))`` members with rule et and ``ceil(n (1 / (2 p) - 1))`` with hw, up to
    ``most_members`` in all; ``p = 0.5 / n`` without a right answer.
    """

    options: DarsOptions

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        return Round(needed=group_size, launched=group_size)

    def next(self, group: GroupOutcome) -> Round | None:
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
    """Return the members of a second round after ``solved`` of ``count`` answers were right (``DarsPlanner``).

    In integers, so that rounding cannot add a member.
    """
    twice = max(1, 2 * solved)
    missing = count - twice
    if missing <= 0:
        return 0
    if rule == "hw":
        return -(-count * missing // twice)
    return -(-count * missing * missing // (twice * (2 * count - twice)))


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
