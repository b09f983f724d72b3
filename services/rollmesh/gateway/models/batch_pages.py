"""Trained trajectories of the batch files, listed by train step."""

from __future__ import annotations

from typing import Literal

from rollmesh.gateway.models.api_model import ApiModel

BatchOrder = Literal["batch", "reward", "tokens"]
"""Order of the rows of a batch; ``batch`` is the order of training."""


class BatchTrajectory(ApiModel):
    """One trajectory of a batch file."""

    id: str
    """Trajectory id."""
    group_id: str
    """Id of its group."""
    reward: float | None
    """Shaped reward; null without a score."""
    tokens: int
    """Tokens of the response."""
    policy_versions: list[int]
    """Versions that wrote tokens, ascending."""
    finish_reason: str | None
    """Reason for its end."""
    preview: str
    """Beginning and end of the response as text, shortened; token ids without a tokenizer."""


class BatchPage(ApiModel):
    """Some rows of one batch file."""

    train_step: int
    """Train step of the batch."""
    items: list[BatchTrajectory]
    """Trajectories in the requested order."""
    first: int
    """Position of the first row."""
    total: int
    """Number of trajectories in the batch."""


class BatchList(ApiModel):
    """Train steps whose batch file can be read."""

    train_steps: list[int]
    """Train steps, newest first."""
