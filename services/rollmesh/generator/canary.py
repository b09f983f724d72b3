"""How far an engine may be from the trainer on the canary before its generator leaves the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config import RunConfig

THRESHOLDS: Mapping[str, float] = MappingProxyType({"float32": 5e-3, "bfloat16": 0.5})
"""Nats, by ``model.dtype``. The trainer's values are of its own float32 weights: rounded to bfloat16 and served in it,
the countdown model differs by up to 0.26 on the canary's least likely tokens, and by 2e-5 in float32."""


def canary_threshold(config: RunConfig) -> float:
    """The run's ``generator.canary_threshold``, or what fits its dtype."""
    given = config.generator.canary_threshold
    return THRESHOLDS[config.model.dtype] if given is None else given
