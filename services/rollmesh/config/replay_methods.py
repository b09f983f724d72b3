"""Replay section: groups of earlier batches that a train step trains on again."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field

from rollmesh.config.methods import Method
from rollmesh.config.section import Section

MOST_BATCHES = 64


class ReplayConfig(Section):
    """Groups drawn from the last batch files, beside the groups of the cut."""

    share: float = Field(default=0.5, gt=0, le=0.9)
    """Share of replayed groups in a batch. The cut stays at schedule.groups_per_batch fresh groups, and the draw adds
    share / (1 - share) times as many, or all that the staleness bound allows: 0.5 doubles the batch."""
    batches: int = Field(default=4, ge=1, le=MOST_BATCHES)
    """K: the draw is among the fresh groups of the last K batches, which stay in the memory of the trainer."""
    by: Literal["uniform", "reward"] = "uniform"
    """Weight of a group in the draw, which is without replacement: uniform, or exp of the mean shaped reward of its
    answers (reward)."""


def replayed_count(fresh: int, share: float) -> int:
    """Return the number of groups to draw beside ``fresh`` ones, so that they are ``share`` of the batch."""
    return round(fresh * share / (1 - share))


REPLAY_METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "uniform": Method(
            source="Rollout Replay, with DOTS",
            deviation="from the last batches instead of a buffer of prompts, and within max_staleness",
        ),
        "reward": Method(
            source="TBA, arXiv 2503.18929",
            deviation="whole groups by their mean reward; no share for the newest policy",
        ),
    }
)
"""Draws by their name in ``trainer.replay.by``; ``curriculum/replay.py`` has the function."""
