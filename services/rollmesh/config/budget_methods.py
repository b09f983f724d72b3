"""Budgets by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config.methods import Method

BUDGET_METHODS: Mapping[str, Method] = MappingProxyType(
    {"constant": Method(source="rollout.max_new_tokens, or the turns of the environment, at every train step")}
)
