"""Registry of verifiers. Modules are imported when a verifier is built, so sympy is loaded only for its users."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rollmesh.errors import ConfigError
from rollmesh.tasks.verifiers.function import build_custom_verifier
from rollmesh.tasks.verifiers.verifier_protocol import Verifier

_PACKAGE = "rollmesh.tasks.verifiers"

BUILT_IN: Mapping[str, str] = {
    "exact": "exact:ExactVerifier",
    "numeric": "numeric:NumericVerifier",
    "choice": "choice:ChoiceVerifier",
    "regex": "pattern:RegexVerifier",
    "math": "mathematics:MathVerifier",
    "countdown": "countdown_verifier:CountdownVerifier",
    "reasoning_gym": "reasoning_gym_verifier:ReasoningGymVerifier",
    "python_code": "python_code:PythonCodeVerifier",
    "http_judge": "http_judge:HttpJudgeVerifier",
    "composite": "composite:CompositeVerifier",
}
"""Verifiers by their name in the run file, as module:Class below this package."""
_READ_ALL = frozenset({"regex", "composite"})


def build_verifier(name: str, options: Mapping[str, Any]) -> Verifier:
    """Build the verifier called ``name`` (one of BUILT_IN, or a user's ``module:function``).

    Raises ConfigError for an unknown name, a wrong option or a missing extra.
    """
    if name not in BUILT_IN:
        if ":" in name:
            return build_custom_verifier(name, options)
        raise ConfigError(f"reward.verifier: {name!r} is not one of {', '.join(BUILT_IN)}, and not module:function")
    verifier_class = built_in_class(name)
    signature = inspect.signature(verifier_class, eval_str=True)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(str(p) for p in signature.parameters.values()) or "none"
        raise ConfigError(f"reward.options: {name} {error}; allowed: {allowed}") from error
    verifier: Verifier = verifier_class(
        **{
            option: _converted(option, value, signature.parameters[option].annotation)
            for option, value in options.items()
        }
    )
    return verifier


def _converted(option: str, value: Any, annotation: Any) -> Any:
    """Return an option as its parameter's type: YAML and Helm may write a number as text, and 512 as 5.12e+02."""
    try:
        return TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, (option, *problem["loc"])))
        raise ConfigError(f"reward.options.{where}: {problem['msg']} (got {problem['input']!r})") from error


def reads_answers(name: str) -> bool:
    """Tell whether a verifier judges the answer alone; others, your own too, may judge the form of a whole response."""
    return name in BUILT_IN and name not in _READ_ALL


def built_in_class(name: str) -> type[Any]:
    """Return the class for a name in BUILT_IN."""
    module_name, _, class_name = BUILT_IN[name].partition(":")
    found: type[Any] = getattr(importlib.import_module(f"{_PACKAGE}.{module_name}"), class_name)
    return found
