"""Planners by their name in the run file. ``config/planner_methods.py`` has their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.planner_methods import PLANNER_METHODS
from rollmesh.curriculum.planner_protocol import RolloutPlanner, Round
from rollmesh.curriculum.planners.dars import DarsPlanner
from rollmesh.curriculum.planners.one_round import OneRoundPlanner
from rollmesh.errors import ConfigError, DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.user_code import load_function, own_code

PLANNERS: Mapping[str, Callable[[Any], RolloutPlanner]] = MappingProxyType(
    {"single": OneRoundPlanner, "dars": DarsPlanner, "quorum": OneRoundPlanner, "spare": OneRoundPlanner}
)
"""Planners, each built from its options."""
_FIELD = "curriculum.planner"


def load_planner(name: str, options: Mapping[str, Any]) -> RolloutPlanner:
    """Return a planner; ``module:name`` is a class, or a function that returns a planner, called with the options.

    Raises ConfigError for code that cannot be a planner. A planner of a user's code raises DataError for a round that
    is none.
    """
    options = complete_options(name, options, PLANNER_METHODS, f"{_FIELD}_options")
    if not is_own(name):
        return PLANNERS[name](PLANNER_METHODS[name].options.model_validate(options))
    make = load_function(name, _FIELD, (), options)
    with own_code(f"{_FIELD}={name}", ConfigError):
        planner = make(**options)
    for method, inputs in (("first", ("seen", "group_size")), ("next", ("group",))):
        try:
            inspect.signature(getattr(planner, method)).bind(*inputs)
        except (AttributeError, TypeError, ValueError) as error:
            raise ConfigError(f"{_FIELD}: {name} needs a method {method}({', '.join(inputs)}): {error}") from error
    return OwnPlanner(name, planner)


@dataclass(frozen=True, slots=True)
class OwnPlanner:
    """Planner of a user's code, whose rounds are checked."""

    name: str
    planner: RolloutPlanner

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        """Return the first round. Raises DataError if it is none, or asks for no member."""
        return self._checked(self.planner.first(seen, group_size), "first")

    def next(self, group: GroupOutcome) -> Round | None:
        """Return the next round, or None. Raises DataError for something else, or a round without a new member."""
        found = self.planner.next(group)
        return None if found is None else self._checked(found, "next")

    def _checked(self, found: object, method: str) -> Round:
        if not isinstance(found, Round):
            raise DataError(f"{_FIELD}={self.name}: {method} returned {type(found).__name__} instead of a Round")
        for count in ("needed", "launched"):
            value = getattr(found, count)
            if type(value) is not int or value < 1:
                raise DataError(f"{_FIELD}={self.name}: {method} returned {count}={value!r}; expected 1 or more")
        return found
