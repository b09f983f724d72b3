"""What every answer of the REST API shares."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Closed answers whose docstrings become the OpenAPI text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorBody(ApiModel):
    """Every answer with a status of 400 or more."""

    error: str
    """What is wrong, in words."""
    field: str | None = None
    """Parameter or body field that is wrong."""
    hint: str | None = None
    """What to do about it."""


class About(ApiModel):
    """What a client needs to know before it draws anything."""

    run: str
    """Name of the run."""
    version: str
    """Version of rollmesh."""
    train_steps: int
    """Train steps of the whole run."""
    group_size: int
    """Trajectories of a group."""
    groups_per_batch: int
    """Groups of a batch."""
    max_staleness: int
    """Bound on staleness, in train steps."""
    text: bool
    """Whether token ids come with their text (the model's tokenizer can be read here)."""
    token_for_reads: bool
    """Whether every call needs the token, not only actions."""
    sample_seconds: float
    """Time between two looks at the mesh."""
