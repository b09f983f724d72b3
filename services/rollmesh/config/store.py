"""Store and checkpoints sections: the Redis server of the trajectory queue, and the storage of policies and states."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import unquote

from pydantic import Field, model_validator

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


OBJECT_STORES = ("s3://", "gs://")


class CheckpointConfig(Section):
    """Policies and trainer state."""

    folder: str | None = None
    """Shared folder, or an object store: s3://BUCKET/PREFIX (extra ``s3``) or gs://BUCKET/PREFIX (extra ``gs``), with
    the usual credentials of its clients from the environment; null is ``checkpoints`` in the run folder."""
    cache_folder: str | None = None
    """With an object store: folder of this node into which policies are pulled, once for all its processes; null is
    ``checkpoints`` in the run folder."""
    cache_policies: int = Field(default=3, ge=1)
    """With an object store: pulled policies that a node keeps in addition to those used in the last ten minutes."""
    parallel_transfers: int = Field(default=8, ge=1, le=64)
    """With an object store: files of one policy or state that a process transfers at once."""
    anchor_every_versions: int = Field(default=1, ge=1, le=100)
    """With an object store: upload every so-many-th policy version in full, and the others as the difference to the
    version before, where that is smaller than half of the weights; 1 uploads all in full. For ``model.dtype:
    bfloat16``: float32 weights change in every version."""
    object_store: dict[str, Any] = Field(default_factory=dict)
    """With an object store: options of its fsspec file system, for example {"endpoint_url": "https://minio:9000"}."""
    keep_last: int = Field(default=6, ge=2)
    """Number of published policies to keep; pinned policies, those in use and that of a requested rollback are kept
    too."""
    state_every_steps: int = Field(default=1, ge=1)
    """Train steps between two commits of the trainer state; steps in between are replayed after a crash. Must be 1 with
    trainer.algorithm.old_logprobs=stage_end."""
    secret: Secret = None
    """HMAC key of the manifests; null creates one per run, in the run folder."""

    @property
    def remote(self) -> bool:
        """True when ``folder`` is an object store."""
        return self.folder is not None and "://" in self.folder

    def on_this_node(self, run_folder: Path) -> Path:
        """Return the folder of this node that has checkpoints: the store, or the cache of an object store."""
        own = self.cache_folder if self.remote else self.folder
        return run_folder / "checkpoints" if own is None else Path(own)

    @model_validator(mode="after")
    def _the_folder_is_one_that_is_known(self) -> Self:
        if self.remote and not str(self.folder).startswith(OBJECT_STORES):
            raise ValueError(
                f"checkpoints.folder={self.folder}: expected a folder, or one of {', '.join(OBJECT_STORES)}"
            )
        if self.object_store and not self.remote:
            raise ValueError(
                f"checkpoints.object_store is for object stores only, not for checkpoints.folder={self.folder}"
            )
        if self.anchor_every_versions > 1 and not self.remote:
            raise ValueError(
                f"checkpoints.anchor_every_versions={self.anchor_every_versions} is for object stores: in a shared "
                "folder generators read the weights themselves; set 1, or checkpoints.folder=s3://... or gs://..."
            )
        for name in ("key", "secret", "token", "password"):
            if name in self.object_store:
                raise ValueError(
                    f"checkpoints.object_store.{name}: credentials do not belong in a run file; set them in the "
                    "environment (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...)"
                )
        return self


_SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
_PORT, _SENTINEL_PORT = 6379, 26379
_OPTIONS_WITH_PASSWORD = re.compile(r"[^@?]*\?(?:\w+=[^&]*&)*password=")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^:\[\]]*))(?::(\d{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisUrl:
    """Parts of a Redis URL."""

    tls: bool
    user: str
    hosts: tuple[tuple[str, int], ...] = ()
    """Servers, or sentinels when there is a ``service``; empty for a unix socket."""
    path: str = ""
    """Unix socket."""
    service: str = ""
    """Name of the master at the sentinels."""
    database: int = 0


def split_password(url: str) -> tuple[str, str | None]:
    """Split a Redis URL into the URL without its password and the percent-decoded password; None without one.

    The last @ ends the credentials, so that a password may contain any character, also without its percent-encoding.
    """
    scheme, separator, rest = url.strip().partition("://")
    options_at = rest.find("?") if _OPTIONS_WITH_PASSWORD.match(rest) else -1
    if options_at < 0:
        credentials, at, place = _credentials(scheme, rest)
        place, mark, options = place.partition("?")
    else:
        credentials, at, place = _credentials(scheme, rest[:options_at])
        mark, options = "?", rest[options_at + 1 :]
    user, colon, password = credentials.partition(":")
    pairs = [pair.partition("=") for pair in options.split("&")] if mark else []
    given = [value for name, _, value in pairs if name == "password"] + ([password] if colon else [])
    if not given:
        return url.strip(), None
    kept = "&".join("".join(pair) for pair in pairs if pair[0] != "password")
    shown = f"{scheme}{separator}{user}{at if user else ''}{place}{'?' if kept else ''}{kept}"
    return shown, unquote(given[0])


def parse_redis_url(url: str) -> RedisUrl:
    """Return the parts of a URL without password; raises ValueError, which names what is wrong and what is expected."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in _SCHEMES:
        raise ValueError(f"store.url must begin with one of {', '.join(f'{each}://' for each in _SCHEMES)}")
    user, _, place = _credentials(scheme, rest)
    place, _, options = place.partition("?")
    tls = scheme.startswith("rediss")
    database = _options(options, url)
    if scheme == "unix":
        if not place.startswith("/"):
            raise ValueError("store.url: a socket has an absolute path, for example unix:///run/redis.sock")
        return RedisUrl(tls=tls, user=unquote(user), path=unquote(place), database=_database(database, url))
    hosts, _, path = place.partition("/")
    service, _, path = path.partition("/") if "sentinel" in scheme else ("", "", path)
    if "sentinel" in scheme and not (hosts and service):
        raise ValueError(f"store.url={url}: expected {scheme}://host:port[,host:port]/service[/database]")
    if path.rstrip("/") and database:
        raise ValueError(f"store.url={url}: the database is given twice; leave ?db= out")
    port = _SENTINEL_PORT if service else _PORT
    return RedisUrl(
        tls=tls,
        user=unquote(user),
        hosts=tuple(_host(each, port) for each in (hosts.split(",") if service else (hosts,))),
        service=unquote(service),
        database=_database(database or path.rstrip("/"), url),
    )


def _credentials(scheme: str, rest: str) -> tuple[str, str, str]:
    """Split user and password from what follows the @; the path of a socket may contain one."""
    if scheme == "unix" and rest.startswith("/"):
        return "", "", rest
    if scheme == "unix":
        credentials, at, path = rest.partition("@/")
        if at:
            return credentials, "@", f"/{path}"
    return rest.rpartition("@")


def _options(options: str, url: str) -> str:
    """Return the option ``db``; raises ValueError for another one, which would override the fields of ``store``."""
    database = ""
    for pair in filter(None, options.split("&")):
        name, _, value = pair.partition("=")
        if name != "db":
            remedy = "set store.tls (ca, certificate, key, check_hostname)" if name.startswith("ssl") else "remove it"
            raise ValueError(f"store.url={url.partition('?')[0]}: the URL cannot set the option {name!r}; {remedy}")
        database = unquote(value)
    return database


def _database(text: str, url: str) -> int:
    if text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"store.url={url}: database {text!r} is not a number")
    return int(text or 0)


def _host(text: str, default_port: int) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    if found is None or not 0 < int(found[3] or default_port) < 65_536:
        raise ValueError(
            f"store.url: {text.partition(':')[0] + ':***'!r} is not host:port with a port from 1 to 65535; an IPv6 "
            "address is in brackets, and a password is followed by an @"
        )
    return unquote(found[1] or found[2] or "localhost"), int(found[3] or default_port)
