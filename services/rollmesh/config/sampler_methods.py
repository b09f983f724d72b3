"""Prompt samplers that a run file names."""

import math
from typing import Self

from pydantic import Field, model_validator

from rollmesh.config.methods import Method, Point
from rollmesh.config.section import Section


class DomainMixOptions(Section):
    """Options of domain_mix."""

    targets: dict[str, float] = Field(default_factory=dict)
    """Share of every domain among the completed trajectories; empty for the weights of the mixture."""
    least_completed: int = Field(default=50, ge=0)
    """Completed trajectories before which the domains are drawn by their targets alone."""

    @model_validator(mode="after")
    def _targets_are_shares(self) -> Self:
        if any(not 0 < share <= 1 for share in self.targets.values()):
            raise ValueError("targets: every share must be above 0 and at most 1")
        if self.targets and abs((total := math.fsum(self.targets.values())) - 1) > 1e-6:
            raise ValueError(f"targets: the shares sum to {total:g}; they must sum to 1")
        return self


class UnseenOptions(Section):
    """Options of samplers that read the history of each prompt."""

    unseen: float = Field(default=0.5, ge=0, le=1)
    """Share of the draws that unseen prompts get while there are any."""


class DifficultyOptions(UnseenOptions):
    """Options of difficulty."""

    target: float = Field(default=0.5, ge=0, le=1)
    """Solve rate of the prompts that come most often."""
    temperature: float = Field(default=0.1, gt=0)
    """tau: distance from the target at which the weight falls to 1/e."""


class FrontierOptions(UnseenOptions):
    """Options of frontier."""

    low_share: float = Field(default=0.5, gt=0, lt=1)
    """Share of the prompts below the boundary."""
    candidates: int = Field(default=64, ge=1)
    """Prompts next to the boundary that one is drawn from."""
    unseen: float = Field(default=1.0, ge=0, le=1)
    """Share of the draws that unseen prompts get while there are any."""


class BandOptions(UnseenOptions):
    """Options of band."""

    low: float = Field(default=0.25, ge=0, le=1)
    """Lower quantile of the mean rewards."""
    high: float = Field(default=0.75, ge=0, le=1)
    """Upper quantile of the mean rewards."""

    @model_validator(mode="after")
    def _the_band_is_not_empty(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low:g} must be below high={self.high:g}")
        return self


ORDER = "order"
"""Sampler that needs no history."""
_PUZZLES = {"data.source": {"type": "countdown", "min_numbers": 5, "max_numbers": 8, "puzzles": 256}}

SAMPLERS: Point[Method] = Point(
    field="curriculum.sampler",
    module="rollmesh.curriculum.samplers",
    inputs=("draw", "prompts", "history", "train_step"),
    methods={
        ORDER: Method("every prompt once an epoch, in the order of the source", function=None),
        "domain_mix": Method(
            "Apriel-Reasoner, code of PipelineRL",
            options=DomainMixOptions,
            deviation="of the prompts of a domain, those drawn least often come first",
            example={
                "data.source": {
                    "type": "mixture",
                    "parts": [
                        {
                            "name": name,
                            "weight": 0.5,
                            "source": {"type": "countdown", "min_numbers": least, "max_numbers": least + 1},
                        }
                        for name, least in (("short", 5), ("long", 7))
                    ],
                }
            },
        ),
        "difficulty": Method(
            "DOTS, code of data-efficient-llm-rl",
            options=DifficultyOptions,
            deviation="solve rates of the history instead of a trained predictor; temperature 0.1 instead of "
            "0.001, which is greedy; a prompt has one unfinished group at a time",
            example=_PUZZLES,
        ),
        "frontier": Method(
            "HeaPA, code",
            options=FrontierOptions,
            deviation="no augmentation, so no tree of variants; sorted mean rewards instead of two heaps",
            example=_PUZZLES,
        ),
        "band": Method(
            "ADS of TACO, from reviews",
            options=BandOptions,
            deviation="quantiles of all seen prompts at every draw instead of once an epoch; p25 and p75 are ours",
            example=_PUZZLES,
        ),
        "unsolved": Method(
            "prioritized sampling of Kimi k1.5, arXiv 2501.12599",
            options=UnseenOptions,
            deviation="solve rates over the whole run",
            example=_PUZZLES,
        ),
    },
)
