"""Security section: certificates and tokens of the services' ports."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from rollmesh.config.section import Secret, Section


class TlsConfig(Section):
    """Mutual TLS on every port of the services; enabled by all three files, disabled without them."""

    certificate: str | None = None
    """PEM file: certificate of this process with its intermediate certificates, for servers and clients."""
    key: str | None = None
    """PEM file: private key of the certificate, without a passphrase."""
    ca: str | None = None
    """PEM file: authority that signs every certificate of the mesh; several while the authority is replaced."""
    server_name: str = Field(default="rollmesh", min_length=1)
    """DNS name in every certificate of the mesh. Clients check it instead of the address, because services connect to
    addresses of pods, which are unknown when a certificate is signed."""

    @property
    def enabled(self) -> bool:
        """True when the ports use TLS."""
        return self.certificate is not None

    @model_validator(mode="after")
    def _all_files_or_none(self) -> Self:
        missing = [name for name in ("certificate", "key", "ca") if getattr(self, name) is None]
        if missing and len(missing) < 3:
            raise ValueError(f"security.tls needs certificate, key and ca together; missing: {', '.join(missing)}")
        return self


class SecurityConfig(Section):
    """Access to the ports of the services."""

    tls: TlsConfig = Field(default_factory=TlsConfig)
    """Mutual TLS."""
    token: Secret = None
    """Bearer token of the mesh's gRPC and admin ports; preferably from ROLLMESH_SECURITY__TOKEN or ``token_file``."""
    token_file: str | None = None
    """File with the bearer token, read again after a change. With several lines, clients send the first token and
    servers accept all of them, so that the token can be changed while the mesh runs."""

    open_metrics: bool = False
    """Whether /metrics of the admin ports is open without certificate and token. ``rollmesh up`` enables it for a run
    whose token it generates."""

    @model_validator(mode="after")
    def _one_source_of_the_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("security.token and security.token_file are both set: set only one of them")
        if self.token is not None and not self.token.get_secret_value().strip():
            raise ValueError("security.token is empty: set a token, or leave the field out")
        return self
