"""Samplers of a run: a built-in function, or a user's, with the options of the run file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.methods import complete_options, is_own
from rollmesh.config.sampler_methods import ORDER, SAMPLER_METHODS
from rollmesh.curriculum.sampler_protocol import Draw, History, PromptTable
from rollmesh.curriculum.samplers.sampler_registry import SAMPLERS
from rollmesh.errors import ConfigError, DataError
from rollmesh.user_code import load_target

_INPUTS = ("draw", "prompts", "history", "train_step")


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundSampler:
    """A sampler with its options; what it returns is checked."""

    name: str
    function: Callable[[Draw, PromptTable, History, int], Any]

    def choose(self, draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
        """Return the row of a draw. Raises DataError if the sampler fails, or names no row of the data."""
        try:
            row = self.function(draw, prompts, history, train_step)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"curriculum.sampler={self.name} raised {type(error).__name__}: {error}") from error
        if hasattr(row, "__index__") and not isinstance(row, bool):
            row = row.__index__()
        if type(row) is not int:
            raise DataError(f"curriculum.sampler={self.name} returned {row!r} instead of the number of a row")
        if not 0 <= row < prompts.row_count:
            raise DataError(
                f"curriculum.sampler={self.name} named row {row}; the data has {prompts.row_count} rows, from 0"
            )
        return row


def bind_sampler(config: CurriculumConfig) -> BoundSampler | None:
    """Return the sampler of a run; None for the order of the source.

    Raises ConfigError if a user's function does not exist, or cannot be called with its options.
    """
    name = config.sampler
    if name == ORDER:
        return None
    options = complete_options(name, config.sampler_options, SAMPLER_METHODS, "curriculum.sampler_options")
    return BoundSampler(name=name, function=partial(_function(name, options), **options))


def _function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    if not is_own(name):
        return SAMPLERS[name]
    function: Any = load_target(name, "curriculum.sampler")
    if not callable(function):
        raise ConfigError(f"curriculum.sampler: {name} must be a function of ({', '.join(_INPUTS)})")
    try:
        inspect.signature(function).bind(*_INPUTS, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"curriculum.sampler: {name} cannot be called as f({', '.join(_INPUTS)}, **curriculum.sampler_options): "
            f"{error}"
        ) from error
    found: Callable[..., Any] = function
    return found
