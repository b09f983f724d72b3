"""Budgets by their name in the run file. ``config/budget_methods.py`` has their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rollmesh.config.budget_methods import BUDGET_METHODS
from rollmesh.config.methods import complete_options, is_own
from rollmesh.curriculum.budget_protocol import Budget
from rollmesh.curriculum.budgets.siri import cosine, stair, stair_cosine
from rollmesh.curriculum.budgets.steps import steps
from rollmesh.errors import ConfigError
from rollmesh.user_code import load_function, own_code

BUDGETS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"cosine": cosine, "stair_cosine": stair_cosine, "stair": stair, "steps": steps}
)


def load_budget(field: str, name: str, options: Mapping[str, Any], *, most: int, train_steps: int) -> Budget | None:
    """Return the budget of ``curriculum.FIELD``, at most ``most``; None for constant, which is ``most``.

    Raises ConfigError for code that cannot be called as a budget, or that returns no number above 0 at one of the
    ``train_steps`` of the run: all are tried, because an error in the middle of the run would end trajectories.
    """
    field = f"curriculum.{field}"
    options = complete_options(name, options, BUDGET_METHODS, f"{field}_options")
    if name == "constant":
        return None
    function = load_function(name, field, ("train_step",), options) if is_own(name) else BUDGETS[name]
    bound = partial(function, **options)
    for step in range(train_steps if is_own(name) else 0):
        with own_code(f"{field}={name}: train step {step}", ConfigError):
            found = bound(step)
        if type(found) is not int or found < 1:
            raise ConfigError(f"{field}={name}: returned {found!r} for train step {step}; expected an int above 0")
    return lambda train_step: min(bound(train_step), most)
