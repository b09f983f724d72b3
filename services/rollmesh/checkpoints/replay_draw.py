"""Replayed groups of a batch, as its file names them."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class ReplayDraw(BaseModel):
    """Groups that a train step trains on beside the fresh ones of its file, and all that the draw depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float
    by: Literal["uniform", "reward"]
    batches: int
    """Number of earlier batches that the run file allows."""
    seed: int
    max_staleness: int
    first: int
    """First train step that was allowed: of the last ``batches``, those after the last rollback."""
    sources: dict[int, str]
    """Digest of every batch that was drawn from, by train step: of those allowed, the ones that could be read and that
    no rollback has abandoned."""
    groups: list[tuple[int, str]]
    """Train step of the batch file and id of each drawn group."""
