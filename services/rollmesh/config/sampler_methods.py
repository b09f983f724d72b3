"""Prompt samplers by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config.methods import Method

SAMPLER_METHODS: Mapping[str, Method] = MappingProxyType(
    {"order": Method(source="every prompt once an epoch, in the order of the source")}
)
