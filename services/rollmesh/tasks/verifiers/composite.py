"""Weighted sum of verifiers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rollmesh.config.secrets import ENV_PREFIX
from rollmesh.errors import ConfigError
from rollmesh.tasks.verifiers.extraction import without_own_thought
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts, Verifier, checked_reward
from rollmesh.tasks.verifiers.verifier_registry import build_verifier, reads_answers


class CompositeVerifier:
    """Sum of weight * value over the parts; an error of one part is an error of the whole.

    Example: ``parts: {answer: {verifier: math, weight: 1.0}, format: {verifier: regex, weight: 0.1, options: {...}}}``.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Build the parts. Raises ConfigError with the invalid part."""
        if not isinstance(parts, Mapping) or not parts:
            raise ConfigError("reward.options.parts: expected a mapping from names to {verifier, weight, options}")
        self._parts: dict[str, tuple[float, Verifier]] = {}
        for name, part in parts.items():
            self._parts[str(name)] = _part(f"reward.options.parts.{name}", part)
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
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise ConfigError(f"{where}.weight: {weight!r} is not a finite number")
    options = part.get("options") or {}
    if isinstance(options, Mapping) and str(options.get("api_key_env")).startswith(ENV_PREFIX):
        raise ConfigError(
            f"{where}.options.api_key_env: {options['api_key_env']}: the processes of a composite verifier get no "
            f"variable that begins with {ENV_PREFIX}, because it may be a secret of the mesh; use another name"
        )
    return float(weight), build_verifier(str(part["verifier"]), options)
