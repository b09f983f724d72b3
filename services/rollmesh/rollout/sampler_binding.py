"""Samplers of a run: a built-in function, or a user's, with the options of the run file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.sampler_methods import ORDER, SAMPLER_METHODS
from rollmesh.curriculum.sampler_protocol import Draw, History, PromptTable
from rollmesh.curriculum.samplers.sampler_registry import SAMPLERS
from rollmesh.errors import DataError
from rollmesh.user_code import load_function, own_code

_INPUTS = ("draw", "prompts", "history", "train_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSampler:
    """A sampler with its options; what it returns is checked."""

    name: str
    function: Callable[[Draw, PromptTable, History, int], Any]

    def choose(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the row of a draw. Raises DataError if the sampler fails, or names no row of the data."""
        row = self.number(draw, prompts, history, train_step)
        if not 0 <= row < prompts.row_count:
            raise DataError(
                f"curriculum.sampler={self.name} named row {row}; the data has {prompts.row_count} rows, from 0"
            )
        return row

    def number(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the number that the sampler chooses, which may be outside the table."""
        with own_code(f"curriculum.sampler={self.name}"):
            row = self.function(draw, prompts, history, train_step)
        if hasattr(row, "__index__") and not isinstance(row, bool):
            row = row.__index__()
        if type(row) is not int:
            raise DataError(f"curriculum.sampler={self.name} returned {row!r} instead of the number of a row")
        return row


def bind_sampler(config: CurriculumConfig) -> BoundSampler | None:
    """Return the sampler of a run; None for the order of the source.

    Raises ConfigError if a user's function does not exist, or cannot be called with its options.
    """
    name = config.sampler
    if name == ORDER:
        return None
    options = complete_options(name, config.sampler_options, SAMPLER_METHODS, "curriculum.sampler_options")
    own = is_own(name)
    function = load_function(name, "curriculum.sampler", _INPUTS, options) if own else SAMPLERS[name]
    return BoundSampler(name=name, function=partial(function, **options))
