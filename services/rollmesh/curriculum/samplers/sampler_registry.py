"""Prompt samplers by their name in the run file; ``config/sampler_methods.py`` has their options and sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rollmesh.curriculum.samplers.band import band
from rollmesh.curriculum.samplers.difficulty import difficulty
from rollmesh.curriculum.samplers.domain_mix import domain_mix
from rollmesh.curriculum.samplers.frontier import frontier
from rollmesh.curriculum.samplers.unsolved import unsolved

SAMPLERS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"domain_mix": domain_mix, "difficulty": difficulty, "frontier": frontier, "band": band, "unsolved": unsolved}
)
"""Functions of (draw, prompts, history, train_step, **options) that return a row; ``order`` needs none."""
