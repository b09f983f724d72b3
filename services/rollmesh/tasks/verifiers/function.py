"""User-defined verifiers: ``module:function`` or ``module:Class``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts, Verifier
from rollmesh.user_code import call_target, load_target


class FunctionVerifier:
    """Verifier that calls ``function(response, metadata)``.

    The function can declare that a time-out means a wrong answer: ``function.timeout_means_wrong = True``.
    """

    def __init__(self, function: Callable[..., float | RewardParts], options: Mapping[str, Any]) -> None:
        """Wrap a function; ``options`` are keyword arguments of every call."""
        self.timeout_means_wrong = bool(getattr(function, "timeout_means_wrong", False))
        self.needs_prompt = bool(getattr(function, "needs_prompt", False))
        self._function = partial(function, **options)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        return self._function(response, prompt_metadata)


def build_custom_verifier(target: str, options: Mapping[str, Any]) -> Verifier:
    """Build the verifier at ``module:name``; ``options`` go to the class, or to every call of the function.

    Raises ConfigError if the target does not exist or cannot be called as a verifier.
    """
    found = load_target(target, "reward.verifier")
    if inspect.isclass(found):
        instance = call_target(found, target, "reward.verifier", options, "reward.options")
        if not callable(getattr(instance, "verify", None)) or not isinstance(
            getattr(instance, "timeout_means_wrong", None), bool
        ):
            raise ConfigError(
                f"reward.verifier: {target} needs a method verify(response, prompt_metadata) and an attribute "
                "timeout_means_wrong (true or false)"
            )
        verifier: Verifier = instance
        return verifier
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"reward.verifier: {target} must be a plain function or a class with verify()")
    try:
        inspect.signature(found).bind("", {}, **options)
    except TypeError as error:
        raise ConfigError(
            f"reward.verifier: {target} cannot be called as f(response, prompt_metadata, **reward.options): {error}"
        ) from error
    except ValueError:
        pass  # a function of a compiled library has no signature
    return FunctionVerifier(found, options)
