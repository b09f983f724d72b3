"""The gateway section: the page and the REST API of a run."""

from __future__ import annotations

from typing import Self

from pydantic import Field, SecretStr, model_validator

from rollmesh.config.section import Section


class GatewayConfig(Section):
    """The page and the REST API of a run."""

    enabled: bool = True
    """Whether the launcher starts one; ``rollmesh gateway`` starts one in any case."""
    host: str | None = None
    """Address to bind to; null is network.host, else launcher.host. On another one than loopback everybody who reaches
    it may look (not act): see ``token_for_reads``, and put TLS in front or set security.tls."""
    port: int = Field(default=0, ge=0, le=65_535)
    """Port to bind to; 0 takes a free one, which ``rollmesh status`` prints."""
    token: SecretStr | None = None
    """Bearer token of the actions (pause, pin, roll back, replay, scale); null makes one per run, in the run folder.
    Better from ROLLMESH_GATEWAY__TOKEN."""
    token_for_reads: bool = False
    """Whether looking needs the token, too."""
    allowed_hosts: list[str] = Field(default_factory=list)
    """Host names under which it may be called ("*.example.org" for all below one); empty is every name, or loopback
    names only when it binds to loopback: so no foreign page can reach it by a name of its own."""
    sample_seconds: float = Field(default=1.0, ge=0.2, le=60)
    """Time between two looks at the mesh; what everybody sees is as fresh as that."""
    timeline_rollouts: int = Field(default=1000, ge=16, le=16_384)
    """Most rollouts that are followed one by one; the number of the others is told."""
    most_event_clients: int = Field(default=64, ge=1, le=1024)
    """Most clients that follow the live events at once."""
    max_request_bytes: int = Field(default=8 << 20, ge=1 << 10)
    """Longest body of a request."""

    @model_validator(mode="after")
    def _a_token_is_no_empty_word(self) -> Self:
        if self.token is not None and len(self.token.get_secret_value().strip()) < 8:
            raise ValueError("gateway.token is shorter than 8 characters: set a longer one, or leave the field out")
        return self
