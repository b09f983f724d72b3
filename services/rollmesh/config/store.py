"""Store section: the Redis server that holds the trajectory queue."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from rollmesh.config.redis_url import parse_redis_url, split_password
from rollmesh.config.section import Secret, Section


class StoreTlsConfig(Section):
    """TLS to Redis, for ``rediss://`` and ``rediss+sentinel://`` URLs."""

    ca: str | None = None
    """PEM file: authority that signed the server's certificate; null uses the system's authorities."""
    certificate: str | None = None
    """PEM file: certificate of this client, for servers that require one."""
    key: str | None = None
    """PEM file: private key of the certificate."""
    check_hostname: bool = True
    """Whether the server's certificate must contain the host name of the URL; disable it only with a private ``ca``."""

    @property
    def configured(self) -> bool:
        """True when any field differs from its default."""
        return self != StoreTlsConfig()

    @model_validator(mode="after")
    def _certificate_and_key_belong_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("store.tls.certificate and store.tls.key must be set together or not at all")
        if not self.check_hostname and self.ca is None:
            raise ValueError("store.tls.check_hostname=false requires store.tls.ca: otherwise any server is accepted")
        return self


class StoreConfig(Section):
    """The trajectory queue."""

    url: str | None = None
    """redis://, rediss:// (TLS), unix://, redis+sentinel:// or rediss+sentinel:// URL, with the ACL user before the @
    and the database after the host (unix: ``?db=1``); null starts an embedded server in the run folder. A password in
    the URL is removed and used as ``password``."""
    password: Secret = None
    """Password of the server, preferably from ROLLMESH_STORE__PASSWORD; it takes precedence over one in the URL."""
    sentinel_password: Secret = None
    """Password of the sentinels; null sends none. Preferably from ROLLMESH_STORE__SENTINEL_PASSWORD."""
    tls: StoreTlsConfig = Field(default_factory=StoreTlsConfig)
    """TLS to the server and to its sentinels."""
    appendfsync: Literal["everysec", "always"] = "everysec"
    """Fsync policy of the embedded server's append-only file."""
    maxmemory_bytes: int = Field(default=1 << 30, ge=1 << 24)
    """Memory limit of the embedded server; admission stops at 80% of it."""
    heartbeat_seconds: float = Field(default=5.0, gt=0)
    """Heartbeat interval of sessions and generators."""
    session_ttl_seconds: float = Field(default=30.0, gt=0)
    """Time without a heartbeat after which a session is dead; its partial trajectories are leased again."""

    @model_validator(mode="before")
    @classmethod
    def _a_password_in_the_url_is_a_secret(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("url"), str):
            return data
        url, password = split_password(data["url"])
        if password is None:
            return data
        given = data.get("password")
        return {**data, "url": url, "password": password if given is None else given}

    @model_validator(mode="after")
    def _the_url_can_be_read(self) -> Self:
        # Not a validator of the field: its errors would show the URL, and a password of which the @ is missing.
        if self.url is not None:
            parse_redis_url(self.url)
        return self

    @model_validator(mode="after")
    def _tls_goes_with_a_tls_url(self) -> Self:
        if self.tls.configured and not (self.url or "").startswith("rediss"):
            raise ValueError(f"store.tls is for rediss:// and rediss+sentinel:// URLs, not store.url={self.url}")
        return self

    @model_validator(mode="after")
    def _a_session_outlives_a_late_heartbeat(self) -> Self:
        if self.session_ttl_seconds < 2 * self.heartbeat_seconds:
            raise ValueError(
                f"store.session_ttl_seconds={self.session_ttl_seconds:g} is less than twice "
                f"store.heartbeat_seconds={self.heartbeat_seconds:g}: sessions would expire between two heartbeats"
            )
        return self
