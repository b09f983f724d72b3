"""Rollout planners by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rollmesh.config.methods import Method

PLANNER_METHODS: Mapping[str, Method] = MappingProxyType(
    {"single": Method(source="one round of schedule.group_size rollouts and schedule.spare_members")}
)
