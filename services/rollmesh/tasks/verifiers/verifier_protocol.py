"""Protocols of verifiers and their rewards, the verifiers that a run file may name, and how one is built."""

import importlib
import inspect
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
from pydantic import TypeAdapter, ValidationError

from rollmesh.characters import half_character
from rollmesh.config.load import ENV_PREFIX
from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import without_own_thought
from rollmesh.types import LARGEST_REWARD
from rollmesh.user_code import call_target, load_function, load_target


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Reward with its named parts; the parts are for display, the value is trained on."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scorer of one response. It is stateless and may be slow: it runs in a process pool that kills at a time-out.

    An optional attribute ``needs_prompt = True`` adds the prompt's text to the metadata as ``prompt``.
    """

    timeout_means_wrong: bool
    """True if an answer that cannot be checked in time is wrong (value 0); False if the run's policy decides."""

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Return the reward of a response.

        Raises VerifierError if the metadata lacks a field; the run treats any other exception as a VerifierError too.
        Raises TimeoutError after the verifier's own time limit.
        """


@runtime_checkable
class AsyncVerifier(Verifier, Protocol):
    """Verifier that waits more than it computes, for example for an HTTP reply.

    Many of its calls run at once in the service's event loop, outside the process pool, so it must not block the loop.
    """

    concurrency: int
    """Maximum number of concurrent ``verify_async`` calls."""

    async def verify_async(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Return the reward of a response, like ``verify``; every call comes from one event loop."""

    async def aclose(self) -> None:
        """Close the connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierRow:
    """Facts of one verifier that are known before its module is imported."""

    target: str
    """``module:Class`` below ``rollmesh.tasks``; only the users of ``math`` load sympy."""
    reads_answer: bool = True
    """True if it judges the answer alone, which follows the thought of a model; False if the form of the response."""
    needs_options: bool = False
    """True if it has an option without a default, so that no row of a data set can name it."""
    is_judge: bool = False
    """True for an AsyncVerifier."""
    packages: str = ""
    """Extra of the distribution with the packages that its module imports."""


BUILT_IN: Mapping[str, VerifierRow] = {
    "exact": VerifierRow(target="verifiers.text_verifiers:ExactVerifier"),
    "numeric": VerifierRow(target="verifiers.text_verifiers:NumericVerifier"),
    "choice": VerifierRow(target="verifiers.text_verifiers:ChoiceVerifier"),
    "regex": VerifierRow(target="verifiers.text_verifiers:RegexVerifier", reads_answer=False, needs_options=True),
    "math": VerifierRow(target="verifiers.mathematics:MathVerifier", packages="reward"),
    "countdown": VerifierRow(target="countdown:CountdownVerifier"),
    "reasoning_gym": VerifierRow(target="reasoning_gym:ReasoningGymVerifier"),
    "python_code": VerifierRow(target="verifiers.python_code:PythonCodeVerifier"),
    "http_judge": VerifierRow(target="verifiers.http_judge:HttpJudgeVerifier", needs_options=True, is_judge=True),
    "composite": VerifierRow(
        target="verifiers.verifier_protocol:CompositeVerifier", reads_answer=False, needs_options=True
    ),
}
"""Verifiers by their name in the run file."""


def build_verifier(name: str, options: Mapping[str, Any]) -> Verifier:
    """Build the verifier called ``name`` (one of BUILT_IN, or a user's ``module:function`` or ``module:Class``).

    Raises ConfigError for an unknown name, a wrong option or a missing extra.
    """
    if name not in BUILT_IN:
        if ":" in name:
            return _build_users(name, options)
        raise ConfigError(f"reward.verifier: {name!r} is not one of {', '.join(BUILT_IN)}, and not module:function")
    verifier_class = built_in_class(name)
    signature = inspect.signature(verifier_class, eval_str=True)
    try:
        signature.bind(**options)
    except TypeError as error:
        allowed = ", ".join(str(p) for p in signature.parameters.values()) or "none"
        raise ConfigError(f"reward.options: {name} {error}; allowed: {allowed}") from error
    converted = {}
    for option, value in options.items():
        # YAML and Helm may write a number as text, and 512 as 5.12e+02.
        try:
            converted[option] = TypeAdapter(signature.parameters[option].annotation).validate_python(value)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, (option, *problem["loc"])))
            raise ConfigError(f"reward.options.{where}: {problem['msg']} (got {problem['input']!r})") from error
    verifier: Verifier = verifier_class(**converted)
    return verifier


def built_in_class(name: str) -> type[Any]:
    """Return the class for a name in BUILT_IN. Raises ConfigError without the packages of its extra."""
    row = BUILT_IN[name]
    module_name, _, class_name = row.target.partition(":")
    try:
        found: type[Any] = getattr(importlib.import_module(f"rollmesh.tasks.{module_name}"), class_name)
    except ImportError as error:
        if not row.packages:
            raise
        remedy = f"pip install 'rollmesh[{row.packages}]'"
        raise ConfigError(f"verifier {name} needs its packages: {remedy}") from error
    return found


def reads_answers(name: str) -> bool:
    """Tell whether a verifier judges the answer alone; others, your own too, may judge the form of a whole response."""
    return name in BUILT_IN and BUILT_IN[name].reads_answer


class FunctionVerifier:
    """Verifier that calls a user's ``function(response, metadata, **options)``.

    The function can declare that a time-out means a wrong answer: ``function.timeout_means_wrong = True``.
    """

    def __init__(self, function: Callable[..., float | RewardParts], options: Mapping[str, Any]) -> None:
        self.timeout_means_wrong = bool(getattr(function, "timeout_means_wrong", False))
        self.needs_prompt = bool(getattr(function, "needs_prompt", False))
        self._function = partial(function, **options)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Return what the function returns."""
        return self._function(response, prompt_metadata)


def _build_users(target: str, options: Mapping[str, Any]) -> Verifier:
    """Build the verifier at ``module:name``; ``options`` go to the class, or to every call of the function."""
    found = load_target(target, "reward.verifier")
    if inspect.isclass(found):
        instance: Verifier = call_target(found, target, "reward.verifier", options, "reward.options")
        declares = isinstance(getattr(instance, "timeout_means_wrong", None), bool)
        if not callable(getattr(instance, "verify", None)) or not declares:
            raise ConfigError(
                f"reward.verifier: {target} needs a method verify(response, prompt_metadata) and an attribute "
                "timeout_means_wrong (true or false)"
            )
        return instance
    inputs = ("response", "prompt_metadata")
    return FunctionVerifier(load_function(target, "reward.verifier", inputs, options, "reward.options"), options)


class CompositeVerifier:
    """Sum of weight * value over the parts; an error of one part is an error of the whole.

    Example: ``parts: {answer: {verifier: math, weight: 1.0}, format: {verifier: regex, weight: 0.1, options: {...}}}``.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Build the parts. Raises ConfigError with the invalid part."""
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError("reward.options.parts: expected a mapping from names to {verifier, weight, options}")
        self._parts = {str(name): _part(f"reward.options.parts.{name}", part) for name, part in parts.items()}
        self._reads_answers = {str(name) for name, part in parts.items() if reads_answers(str(part["verifier"]))}
        verifiers = [verifier for _, verifier in self._parts.values()]
        self.timeout_means_wrong = all(verifier.timeout_means_wrong for verifier in verifiers)
        self.needs_prompt = any(getattr(verifier, "needs_prompt", False) for verifier in verifiers)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response; the parts are reported without their weights, nested parts as ``name.part``."""
        value = 0.0
        parts: dict[str, float] = {}
        for name, (weight, verifier) in self._parts.items():
            text = without_own_thought(response) if name in self._reads_answers else response
            reward = checked_reward(verifier.verify(text, prompt_metadata), name)
            value += weight * reward.value
            parts[name] = reward.value
            parts.update({f"{name}.{inner}": part for inner, part in reward.parts.items()})
        return RewardParts(value=value, parts=parts)


def _part(where: str, part: Mapping[str, Any]) -> tuple[float, Verifier]:
    if not isinstance(part, Mapping) or "verifier" not in part or not set(part) <= {"verifier", "weight", "options"}:
        raise ConfigError(f"{where}: expected verifier, and optionally weight and options, got {part!r}")
    weight = part.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST_REWARD:
        raise ConfigError(f"{where}.weight: {short_repr(weight)} is not a number of at most {LARGEST_REWARD:g} in size")
    options = part.get("options") or {}
    if isinstance(options, Mapping) and str(options.get("api_key_env")).startswith(ENV_PREFIX):
        raise ConfigError(
            f"{where}.options.api_key_env: {options['api_key_env']}: the processes of a composite verifier get no "
            f"variable that begins with {ENV_PREFIX}, because it may be a secret of the mesh; use another name"
        )
    return float(weight), build_verifier(str(part["verifier"]), options)


def checked_reward(result: object, verifier: str) -> RewardParts:
    """Return the result of a verifier as floats within ``LARGEST_REWARD``. Raises VerifierError for any other."""
    if not isinstance(result, RewardParts):
        return RewardParts(value=_finite(result, verifier))
    parts = {str(name): _finite(value, f"{verifier}: part {name!r}") for name, value in result.parts.items()}
    for name in parts:
        if problem := half_character(name):
            raise VerifierError(f"{verifier}: part {name!r}: in its name {problem}")
    return RewardParts(value=_finite(result.value, verifier), parts=parts)


def _finite(value: object, where: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise VerifierError(f"{where}: returned {short_repr(value)} ({type(value).__name__}), expected a finite number")
    try:
        number = float(value)
    except OverflowError as error:
        raise VerifierError(f"{where}: returned a number too large for a float") from error
    if not abs(number) <= LARGEST_REWARD:
        raise VerifierError(
            f"{where}: returned {number}, expected a finite number of at most {LARGEST_REWARD:g} in size; scale it"
        )
    return number


def short_repr(value: object) -> str:
    """Return the repr of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
