"""Redis clients: plain, TLS, unix socket, or the master reported by Sentinel."""

import ssl
from typing import Any, cast

import redis.asyncio as aioredis
from redis.asyncio.connection import Connection as AsyncConnection
from redis.asyncio.connection import ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from rollmesh.config.store import StoreConfig, StoreTlsConfig, parse_redis_url, split_password
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import host_port
from rollmesh.runtime.tls import no_passphrase

_CONNECT_SECONDS = 5.0
_SENTINEL_SECONDS = 2.0


def create_client(url: str, config: StoreConfig | None = None) -> aioredis.Redis:
    """Create a client for a URL of ``store.url``; ``config`` has the passwords and certificates.

    Connections to a sentinel's service follow the master that the sentinels report. Raises ConfigError for an invalid
    URL or certificate.
    """
    config = config or StoreConfig()
    address, password = split_password(url)
    try:
        parts = parse_redis_url(address)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    # With a socket_timeout, redis-py sends through asyncio.wait_for. That creates a task per call, and before Python
    # 3.12 it swallows a cancellation that arrives with the result. Connection limits the time of a call instead.
    options: dict[str, Any] = {
        "socket_timeout": None,
        "protocol": 3,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
        "db": parts.database,
        "username": parts.user or None,
        "password": config.password.get_secret_value() if config.password is not None else password,
    }
    tls: dict[str, Any] = {"tls": _Tls(config.tls)} if parts.tls else {}
    if parts.service:
        watchers: dict[str, Any] = {"socket_timeout": _SENTINEL_SECONDS, "retry": Retry(NoBackoff(), 0), **tls}
        if config.sentinel_password is not None:
            watchers["password"] = config.sentinel_password.get_secret_value()
        if tls:
            watchers["connection_class"] = _TlsConnection
        manager = _Sentinels([])  # type: ignore[no-untyped-call]
        manager.sentinels = [
            aioredis.Redis.from_pool(ConnectionPool(host=host, port=port, **watchers)) for host, port in parts.hosts
        ]
        options |= {"connection_class": _MasterTlsConnection} if tls else {}
        return cast("aioredis.Redis", manager.master_for(parts.service, **options, **tls))
    if parts.path:
        options |= {"connection_class": UnixDomainSocketConnection, "path": parts.path}
    else:
        (host, port), *_ = parts.hosts
        options |= {"host": host, "port": port, "connection_class": _TlsConnection if tls else AsyncConnection}
    return aioredis.Redis.from_pool(ConnectionPool(**options, **tls))


def tls_failure(error: BaseException) -> str | None:
    """Describe a TLS handshake that failed because of certificates, with the remedy; None for other errors.

    A retry cannot succeed after such a failure.
    """
    text = str(error)
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return (
            f"the certificate of Redis is not trusted ({text}): set store.tls.ca to the authority that signed it, and "
            "use a host name of the certificate in store.url"
        )
    refused = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_CERTIFICATE_EXPIRED", "ALERT_BAD_CERTIFICATE")
    if any(alert in text for alert in refused):
        return f"Redis rejects the client certificate ({text}): set store.tls.certificate and store.tls.key"
    return None


class _Tls:
    """Factory of TLS contexts; reads the files for each new connection, so that they can be rotated.

    The context of redis-py trusts the system's authorities in addition to ``store.tls.ca``. This one trusts only
    ``store.tls.ca`` when it is set.
    """

    def __init__(self, config: StoreTlsConfig) -> None:
        self._config = config
        self.check_hostname = config.check_hostname
        try:
            self.get()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            files = f"ca={config.ca}, certificate={config.certificate}, key={config.key}"
            raise ConfigError(f"store.tls: {error} ({files})") from error

    def get(self) -> ssl.SSLContext:
        """Return a context for one connection; redis-py calls this method."""
        config = self._config
        context = ssl.create_default_context(cafile=config.ca)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = config.check_hostname
        if config.certificate is not None:
            context.load_cert_chain(config.certificate, config.key, password=no_passphrase)
        return context


class _TlsConnection(SSLConnection):
    def __init__(self, *, tls: _Tls, **options: Any) -> None:
        super().__init__(**options)
        self.ssl_context = tls  # type: ignore[assignment]


class _MasterTlsConnection(SentinelManagedSSLConnection):
    def __init__(self, *, tls: _Tls, **options: Any) -> None:
        super().__init__(**options)  # type: ignore[no-untyped-call]
        self.ssl_context = tls  # type: ignore[assignment]


class _Sentinels(Sentinel):
    """Sentinel discovery whose error states the reason of every sentinel: certificates, password, unreachable."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            return cast("tuple[str, int]", await super().discover_master(service_name))
        except MasterNotFoundError as error:
            reasons = [await _failure_reason(sentinel) for sentinel in self.sentinels]
            raise RedisConnectionError(
                f"no sentinel reports a master of {service_name!r}: {'; '.join(reasons)}"
            ) from error


async def _failure_reason(sentinel: aioredis.Redis) -> str:
    address = sentinel.connection_pool.connection_kwargs
    try:
        known = ", ".join(str(name) for name in await sentinel.sentinel_masters())
        reason = f"monitors {known or 'no master'}, but reports no running master of that name"
    except (RedisError, OSError) as error:
        reason = str(error) or type(error).__name__
    return f"{host_port(address['host'], address['port'])}: {reason}"
