"""Budgets: tokens or turns of a trajectory by the train step under whose policy it is born."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollmesh.config.methods import is_own
from rollmesh.config.round_methods import BUDGETS
from rollmesh.errors import ConfigError, DataError

Budget = Callable[[int], int]
"""Budget in tokens, or in turns, of a trajectory that is born under the policy of a train step."""


def load_budget(field: str, name: str, options: Mapping[str, Any], *, most: int, train_steps: int) -> Budget | None:
    """Return the budget of ``curriculum.FIELD``, at most ``most``; None for constant, which is ``most``.

    Raises ConfigError for code that cannot be called as a budget, or that returns no number above 0 at one of the
    ``train_steps`` of the run: all are tried, because an error in the middle of the run would end trajectories.
    """
    field = f"curriculum.{field}"
    if name == "constant":
        BUDGETS.complete_options(name, options, f"{field}_options")
        return None

    def problem(found: object, _: int) -> str:
        return "" if type(found) is int and found > 0 else f"{found!r}; expected an int above 0"

    budget = BUDGETS.bind(name, options, problem, of_field=field)
    for step in range(train_steps if is_own(name) else 0):
        try:
            budget(step)
        except DataError as error:
            raise ConfigError(f"{error} (train step {step})") from error
    return lambda train_step: min(budget(train_step), most)


def cosine(train_step: int, *, shortest: int, longest: int, period: int) -> int:
    """Return ``(L_max + L_min) / 2 + (L_max - L_min) / 2 cos(2 pi t / T)``, rounded."""
    return _wave(2 * math.pi * (train_step % period) / period, shortest, longest)


def stair_cosine(train_step: int, *, shortest: int, longest: int, period: int) -> int:
    """Return a cosine that rests for a quarter of the period at each of its two ends.

    With ``phi = 2 pi (t mod T) / T``: L_max below pi / 4 and from 7 pi / 4 on, L_min from 3 pi / 4 to 5 pi / 4, between
    them half a cosine over the double phase.
    """
    eighth = 8 * (train_step % period) / period
    if eighth < 1 or eighth >= 7:
        return longest
    if 3 <= eighth < 5:
        return shortest
    start = 1 if eighth < 3 else 3
    return _wave(math.pi / 2 * (eighth - start), shortest, longest)


def stair(train_step: int, *, shortest: int, longest: int, period: int, compression: float) -> int:
    """Return L_min for the share ``compression`` of each period, then L_max."""
    # 0.07 * 100 is a little above 7 in floating point.
    return shortest if train_step % period < compression * period - 1e-9 else longest


def _wave(phase: float, shortest: int, longest: int) -> int:
    return round((longest + shortest) / 2 + (longest - shortest) / 2 * math.cos(phase))


def steps(train_step: int, *, stages: Sequence[Sequence[int]]) -> int:
    """Return the budget of the last of the ``(train step, budget)`` stages that has begun."""
    return max((step, budget) for step, budget in stages if step <= train_step)[1]
