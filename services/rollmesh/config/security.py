"""Who may talk to whom: certificates and tokens of the services' ports, TLS to Redis."""

from __future__ import annotations

from typing import Self

from pydantic import Field, SecretStr, model_validator

from rollmesh.config.section import Section


class TlsConfig(Section):
    """Mutual TLS on every port of the services. All three files turn it on; none leaves the ports in the clear."""

    certificate: str | None = None
    """PEM file: the certificate of this process (and what lies between it and the CA), for servers and clients."""
    key: str | None = None
    """PEM file: the private key of the certificate, without a passphrase."""
    ca: str | None = None
    """PEM file: the certificate authority that signs every certificate of the mesh; more than one while it changes."""
    server_name: str = Field(default="rollmesh", min_length=1)
    """DNS name in every certificate of the mesh. Clients check it instead of the address that they dial: services find
    each other by addresses of pods, which no certificate can know."""

    @property
    def enabled(self) -> bool:
        """Whether the ports speak TLS."""
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
    token: SecretStr | None = None
    """Bearer token of the mesh's gRPC and admin ports; better from ROLLMESH_SECURITY__TOKEN or ``token_file``."""
    token_file: str | None = None
    """File with the bearer token, read again when it changes. With more than one line the first is sent and every one
    is accepted, so that a token can be changed while the mesh runs."""

    open_metrics: bool = False
    """Whether /metrics of the admin ports answers without certificate and token. ``rollmesh up`` turns it on for a run
    that it gives a token of its own."""

    @model_validator(mode="after")
    def _one_source_of_the_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("security.token and security.token_file are two sources of one token: set one of them")
        if self.token is not None and not self.token.get_secret_value().strip():
            raise ValueError("security.token is empty: set a token, or leave the field out")
        return self


class StoreTlsConfig(Section):
    """TLS to Redis, for ``rediss://`` and ``rediss+sentinel://`` URLs."""

    ca: str | None = None
    """PEM file: the authority that signed the server's certificate; null takes the system's."""
    certificate: str | None = None
    """PEM file: certificate of this client, where the server asks for one."""
    key: str | None = None
    """PEM file: private key of the certificate."""
    check_hostname: bool = True
    """Whether the server's certificate must name the host of the URL. Turn it off only for a private ``ca``."""

    @property
    def configured(self) -> bool:
        """Whether anything differs from the defaults."""
        return self != StoreTlsConfig()

    @model_validator(mode="after")
    def _certificate_and_key_belong_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("store.tls.certificate and store.tls.key are set together or not at all")
        if not self.check_hostname and self.ca is None:
            raise ValueError("store.tls.check_hostname=false needs store.tls.ca: without either, any server passes")
        return self
