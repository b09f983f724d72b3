"""Budgets by their name in the run file."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from rollmesh.config.methods import Method
from rollmesh.config.section import Section


class PeriodOptions(Section):
    """Options of cosine and stair_cosine."""

    shortest: int = Field(ge=1)
    """L_min: smallest budget."""
    longest: int = Field(ge=1)
    """L_max: largest budget."""
    period: int = Field(default=640, ge=2)
    """T: train steps from one largest budget to the next."""

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.shortest > self.longest:
            raise ValueError(f"shortest={self.shortest} is above longest={self.longest}; swap them")
        return self


class StairOptions(PeriodOptions):
    """Options of stair."""

    compression: float = Field(default=0.5, gt=0, lt=1)
    """Share of the period with the smallest budget, which comes first."""


def _rising(stages: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    steps = [step for step, _ in stages]
    if steps[:1] != [0] or steps != sorted(set(steps)):
        raise ValueError("expected [[train step, budget], ...] with rising train steps, the first of them 0")
    if min(budget for _, budget in stages) < 1:
        raise ValueError("expected budgets of at least 1")
    return stages


class StepsOptions(Section):
    """Options of steps."""

    stages: Annotated[tuple[tuple[int, int], ...], AfterValidator(_rising)]
    """[train step, budget] of each stage, which lasts until the next one."""


BUDGET_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "constant": Method(source="rollout.max_new_tokens or rollout.max_turns at every train step"),
        "cosine": Method(source="SIRI, arXiv 2509.25176", options=PeriodOptions),
        "stair_cosine": Method(source="SIRI, arXiv 2509.25176", options=PeriodOptions),
        "stair": Method(
            source="SIRI, arXiv 2509.25176",
            options=StairOptions,
            deviation="the share of each half is ours",
        ),
        "steps": Method(
            source="TTI (code), for turns",
            options=StepsOptions,
            deviation="by train step instead of iteration; no multiplicative form",
        ),
    }
)


def largest_budget(name: str, options: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return the option with the largest budget of a method and its value; None if it has none."""
    if name not in BUDGET_METHODS:
        return None
    known = BUDGET_METHODS[name].options.model_validate(dict(options))
    if isinstance(known, PeriodOptions):
        return "longest", known.longest
    if isinstance(known, StepsOptions):
        return "stages", max(budget for _, budget in known.stages)
    return None
