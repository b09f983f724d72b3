"""Planners: how many rollouts a group gets, in which rounds."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from rollmesh.config.methods import is_own
from rollmesh.config.round_methods import PLANNERS, DarsOptions, PlannerOptions, QuorumOptions, SpareOptions
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
    built: RolloutPlanner = call_target(make, name, field_name, complete, f"{field_name}_options")
    if not is_own(name):
        return built
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


def single() -> RolloutPlanner:
    """Plan one round of the group's size."""
    return OneRoundPlanner(PlannerOptions())


def quorum(*, share: float) -> RolloutPlanner:
    """Plan one round of the group's size, which the share ``share`` of its members completes."""
    return OneRoundPlanner(QuorumOptions(share=share))


def spare(*, factor: int, extra: int) -> RolloutPlanner:
    """Plan one round of ``factor`` times the group's size, and ``extra`` members beyond."""
    return OneRoundPlanner(SpareOptions(factor=factor, extra=extra))


@dataclass(frozen=True, slots=True)
class OneRoundPlanner:
    """One round for every group."""

    options: PlannerOptions

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        launched = self.options.launched(group_size)
        needed = self.options.needed(group_size) if isinstance(self.options, QuorumOptions) else launched
        return Round(needed=needed, launched=launched)

    def next(self, group: GroupOutcome) -> Round | None:
        return None


def dars(*, rule: Literal["et", "hw"], most_members: int | None) -> RolloutPlanner:
    """Plan a round of the group's size n, and with a share p < 1/2 of right answers a second one.

    It has ``ceil(n (1 / (4 p (1 - p)) - 1))`` members with rule et and ``ceil(n (1 / (2 p) - 1))`` with hw, up to
    ``most_members`` in all; ``p = 0.5 / n`` without a right answer.
    """
    return DarsPlanner(DarsOptions(rule=rule, most_members=most_members))


@dataclass(frozen=True, slots=True)
class DarsPlanner:
    """A first round of the group size, and a second one for groups with less than half of the answers right."""

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
    """Return the members of a second round after ``solved`` of ``count`` answers were right, as ``dars`` says.

    In integers, so that rounding cannot add a member.
    """
    twice = max(1, 2 * solved)
    missing = count - twice
    if missing <= 0:
        return 0
    if rule == "hw":
        return -(-count * missing // twice)
    return -(-count * missing * missing // (twice * (2 * count - twice)))
