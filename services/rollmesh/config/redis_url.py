"""URL of the trajectory queue: address, ACL user and database, and nothing else."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

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
