"""Factory for the environment that a run file names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.calculator import CalculatorEnvironment
from rollmesh.tasks.environments.environment_protocol import Environment
from rollmesh.user_code import call_target, load_target

BUILT_IN: Mapping[str, Callable[..., Environment]] = {"calculator": CalculatorEnvironment}


def environment_factory(name: str, options: Mapping[str, Any]) -> Callable[[], Environment]:
    """Return a function that creates a new environment for each trajectory: built-in, or ``module:Class``.

    One environment is created here to check the options. Raises ConfigError for an unknown name or wrong options.
    """
    if name in BUILT_IN:
        make = BUILT_IN[name]
    elif ":" in name:
        make = load_target(name, "rollout.environment")
    else:
        raise ConfigError(f"rollout.environment: {name!r} is not one of {', '.join(BUILT_IN)}, and not module:Class")
    environment = call_target(make, name, "rollout.environment", options, "rollout.environment_options")
    missing = [m for m in ("reset", "step", "aclose") if not inspect.iscoroutinefunction(getattr(environment, m, None))]
    if missing or not isinstance(getattr(environment, "replayable", None), bool):
        raise ConfigError(
            f"rollout.environment: {name} needs async {', '.join(missing) or 'methods'} and an attribute replayable"
        )
    return lambda: make(**options)
