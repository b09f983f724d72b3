"""Group shapers by their name in the run file. ``config/shaper_methods.py`` has their options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.shaper_methods import SHAPER_METHODS
from rollmesh.curriculum.shaper_protocol import Closing, GroupShaper
from rollmesh.curriculum.shapers.dap import dap
from rollmesh.curriculum.shapers.dot import dot
from rollmesh.errors import DataError
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.types import LARGEST_REWARD
from rollmesh.user_code import load_function

_FIELD = "curriculum.group_shaper"


def unshaped(group: GroupOutcome, records: Mapping[str, PromptRecord]) -> Closing:
    """Return the rewards as the worker has shaped them."""
    return Closing(shaped_rewards=tuple(member.shaped_reward for member in group.members))


SHAPERS: Mapping[str, Callable[..., Closing]] = MappingProxyType({"none": unshaped, "dap": dap, "dot": dot})


def load_shaper(name: str, options: Mapping[str, Any]) -> GroupShaper:
    """Return a group shaper with its options bound. Raises ConfigError for code that cannot be called as one.

    A user's function takes the group, the records and its options as keywords; a result that does not fit the group
    raises DataError.
    """
    options = complete_options(name, options, SHAPER_METHODS, f"{_FIELD}_options")
    if not is_own(name):
        return partial(SHAPERS[name], **options)
    function = load_function(name, _FIELD, ("GroupOutcome", "records"), options)

    def shape(group: GroupOutcome, records: Mapping[str, PromptRecord]) -> Closing:
        closing: Closing = function(group, records, **options)
        if problem := _problem(closing, group):
            raise DataError(f"{_FIELD}={name}: returned {problem} for group {group.group_id}")
        return closing

    return shape


def _problem(closing: object, group: GroupOutcome) -> str:
    """Return the reason why a result is no closing of a group; empty if it is one."""
    if not isinstance(closing, Closing):
        return f"{type(closing).__name__} instead of a Closing"
    members, rewards, kept = group.members, closing.shaped_rewards, closing.kept_tokens
    if len(rewards) != len(members) or (kept is not None and len(kept) != len(members)):
        return f"other than {len(members)} values, one per member,"
    if not all(isinstance(reward, int | float) and abs(reward) <= LARGEST_REWARD for reward in rewards):
        return f"a reward that is not a finite number of at most {LARGEST_REWARD:g} in size"
    if kept is None:
        return ""
    for member, count in zip(members, kept, strict=True):
        if type(count) is not int or not min(1, member.token_count) <= count <= member.token_count:
            return f"kept_tokens={count!r}, expected 1 to {member.token_count},"
    return ""
