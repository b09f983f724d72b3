"""Gateway section: the page and the REST API of a run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmesh.config.section import Secret, Section


class GatewayConfig(Section):
    """Page and REST API of a run."""

    enabled: bool = True
    """Whether the launcher starts a gateway; ``rollmesh gateway`` starts one in any case."""
    host: str | None = None
    """Address to bind to; null is network.host, else launcher.host. On a non-loopback address every client can read
    (not act): see ``token_for_reads``, and use a TLS proxy or set security.tls."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to bind to; 0 picks a free one, which ``rollmesh status`` prints."""
    token: Secret = None
    """Bearer token of the actions (pause, pin, roll back, replay, scale), the run file and the logs of the processes on
    the page, and every call of the agents service; null creates one per run, in the run folder. Preferably from
    ROLLMESH_GATEWAY__TOKEN."""
    token_for_reads: bool = False
    """Require the token for reads too."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Accepted host names of requests ("*.example.org" for all subdomains). Empty accepts every name, or only loopback
    names when bound to loopback, which protects against DNS rebinding by other web pages."""
    sample_seconds: float = Field(default=1.0, ge=0.2, le=60)
    """Interval between two reads of the mesh, which is the maximum age of the displayed values."""
    timeline_rollouts: int = Field(default=1000, ge=16, le=16_384)
    """Maximum number of rollouts that are tracked individually; the rest are only counted."""
    most_event_clients: int = Field(default=64, ge=1, le=1024)
    """Maximum number of clients that follow the live events at once."""
    max_request_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Maximum size of a request body, for the gateway and the agents service."""

    @model_validator(mode="after")
    def _a_token_is_no_empty_word(self) -> Self:
        if self.token is not None and len(self.token.get_secret_value().strip()) < 8:
            raise ValueError("gateway.token is shorter than 8 characters: set a longer one, or leave the field out")
        return self
