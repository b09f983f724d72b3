"""Models common to all responses of the REST API."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class ApiModel(BaseModel):
    """Response model without extra fields; its docstrings become the OpenAPI text."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ErrorBody(ApiModel):
    """Body of every response with a status of 400 or more."""

    error: str
    """Error message."""
    field: str | None = None
    """Invalid parameter or body field."""
    hint: str | None = None
    """Remedy."""


class About(ApiModel):
    """Facts that a client needs before it draws anything."""

    run: str
    """Name of the run."""
    version: str
    """Version of rollmesh."""
    folder: str
    """Run folder, as the gateway's machine names it; ``rollmesh view`` opens it once the run has ended."""
    train_steps: int
    """Train steps of the whole run."""
    group_size: int
    """Trajectories of a group."""
    groups_per_batch: int
    """Groups of a batch."""
    max_staleness: int
    """Bound on staleness, in train steps."""
    text: bool
    """True if token ids come with their text (the gateway can read the model's tokenizer)."""
    token_for_reads: bool
    """True if every call requires the token, not only actions."""
    sample_seconds: float
    """Seconds between two polls of the mesh."""
