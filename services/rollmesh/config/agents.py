"""Agents section: the OpenAI-compatible API of a run."""

from __future__ import annotations

from pydantic import Field

from rollmesh.config.section import Section


class AgentsConfig(Section):
    """OpenAI-compatible API of a run; its token, host names and body limit are those of the gateway section."""

    enabled: bool | None = None
    """Whether the launcher starts the service; null starts it with rollout.program=agent only. ``rollmesh agents``
    starts one in any case."""
    host: str | None = None
    """Address to bind to; null is gateway.host, else network.host, else launcher.host."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to bind to; 0 picks a free one, which ``rollmesh status`` prints. Set one for clients that must find the
    service again after a restart."""
