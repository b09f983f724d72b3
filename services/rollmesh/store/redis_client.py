"""Redis clients: plain, TLS, unix socket, or the master reported by Sentinel."""

from __future__ import annotations

import ssl
from typing import Any, cast
from urllib.parse import unquote, urlsplit

import redis.asyncio as aioredis
from redis.asyncio.connection import ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from rollmesh.config.store import StoreConfig, StoreTlsConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.tls import no_passphrase

_CONNECT_SECONDS = 5.0
_SENTINEL_SECONDS = 2.0
_SENTINEL_PORT = 26379
_SENTINEL_SCHEMES = ("redis+sentinel", "rediss+sentinel")


def create_client(url: str, config: StoreConfig | None = None) -> aioredis.Redis:
    """Create a client for ``redis://``, ``rediss://``, ``unix://`` or Sentinel.

    ``config`` has the passwords and certificates. Sentinel URLs have the form
    ``redis+sentinel://[user[:password]@]host:port[,host:port...]/service[/database]``, with ``rediss`` for TLS; the
    port defaults to 26379. Connections follow the master that the sentinels report. Raises ConfigError for an invalid
    URL or certificate.
    """
    config = config or StoreConfig()
    # With a socket_timeout, redis-py sends through asyncio.wait_for. That creates a task per call, and before Python
    # 3.12 it swallows a cancellation that arrives with the result. Connection limits the time of a call instead.
    options: dict[str, Any] = {
        "socket_timeout": None,
        "protocol": 3,
        "socket_connect_timeout": _CONNECT_SECONDS,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }
    if config.password is not None:
        options["password"] = config.password.get_secret_value()
    tls = _Tls(config.tls) if url.startswith("rediss") else None
    if url.partition("://")[0] in _SENTINEL_SCHEMES:
        return _sentinel_client(url, config, options, tls)
    try:
        pool = ConnectionPool.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"store.url: {error} (got {_without_password(url)})") from error
    if tls is not None:
        pool.connection_class = _TlsConnection
        pool.connection_kwargs["tls"] = tls
    return aioredis.Redis.from_pool(pool)


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
    return f"{address['host']}:{address['port']}: {reason}"


def _sentinel_client(url: str, config: StoreConfig, options: dict[str, Any], tls: _Tls | None) -> aioredis.Redis:
    credentials, _, hosts = urlsplit(url).netloc.rpartition("@")
    path = urlsplit(url).path.strip("/").split("/")
    if not hosts or not path[0]:
        raise ConfigError(
            "store.url: expected redis+sentinel://host:port[,host:port]/service[/database], "
            f"got {_without_password(url)}"
        )
    user, _, password = credentials.partition(":")
    if user:
        options["username"] = unquote(user)
    if password and "password" not in options:
        options["password"] = unquote(password)
    if len(path) > 1:
        if not path[1].isdigit():
            raise ConfigError(f"store.url: database {path[1]!r} is not a number (got {_without_password(url)})")
        options["db"] = int(path[1])
    manager = _Sentinels([])  # type: ignore[no-untyped-call]
    manager.sentinels = [_sentinel(host, url, config, tls) for host in hosts.split(",")]
    if tls is not None:
        options |= {"connection_class": _MasterTlsConnection, "tls": tls}
    return cast("aioredis.Redis", manager.master_for(path[0], **options))


def _sentinel(host: str, url: str, config: StoreConfig, tls: _Tls | None) -> aioredis.Redis:
    """Create a client of one sentinel."""
    name, _, port = host.rpartition(":") if ":" in host else (host, "", str(_SENTINEL_PORT))
    if not port.isdigit():
        raise ConfigError(f"store.url: {host!r} is not host:port (got {_without_password(url)})")
    options: dict[str, Any] = {"socket_timeout": _SENTINEL_SECONDS, "retry": Retry(NoBackoff(), 0)}
    if config.sentinel_password is not None:
        options["password"] = config.sentinel_password.get_secret_value()
    if tls is not None:
        options |= {"connection_class": _TlsConnection, "tls": tls}
    return aioredis.Redis.from_pool(ConnectionPool(host=name, port=int(port), **options))


def _without_password(url: str) -> str:
    head, at, tail = url.rpartition("@")
    return f"{head.split('://')[0]}://***@{tail}" if at else url
