"""Group shapers by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config.methods import Method

SHAPER_METHODS: Mapping[str, Method] = MappingProxyType(
    {"none": Method(source="rewards stay as the worker has shaped them")}
)
