"""The environment that a run file names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.calculator import CalculatorEnvironment
from rollmesh.tasks.environments.environment_protocol import Environment
from rollmesh.tasks.loading import load_target

BUILT_IN: Mapping[str, Callable[..., Environment]] = {"calculator": CalculatorEnvironment}


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """A function that makes one fresh environment per trajectory: a built-in one, or ``module:Class``.

    The options are tried out once, here. Raises ConfigError for an unknown name or wrong options.
    """
    if name in BUILT_IN:
        make = BUILT_IN[name]
    elif ":" in name:
        make = load_target(name, "rollout.environment")
    else:
        raise ConfigError(f"rollout.environment: {name!r} is none of {', '.join(BUILT_IN)}, and not module:Class")
    try:
        made = make(**options)
    except TypeError as error:
        raise ConfigError(f"rollout.environment_options: {name} refuses {dict(options)!r}: {error}") from error
    missing = [m for m in ("reset", "step", "aclose") if not inspect.iscoroutinefunction(getattr(made, m, None))]
    if missing or not isinstance(getattr(made, "replayable", None), bool):
        raise ConfigError(
            f"rollout.environment: {name} needs async {', '.join(missing) or 'methods'} and an attribute replayable"
        )
    return lambda: make(**options)
