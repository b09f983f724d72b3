"""The Lua scripts: one file per state change, composed with the key names and the shared helpers they use.

A script file starts with ``#!lua`` and its flags; a line ``-- uses: fence group`` names helper files of
``scripts/lib``. Scripts without ``allow-oom`` are refused by a server that is out of memory before their first line
runs. A script refuses with ``CODE text``; ``store_error`` turns the code into an exception.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from types import MappingProxyType

from redis import exceptions as redis_errors

from rollmesh.errors import Conflict, SessionLost, StoreError, StoreUnavailable
from rollmesh.store.keys import lua_preamble

MAX_KEYS_PER_SCRIPT = 512
"""Callers slice their batches so that no script touches more keys."""

_USES = re.compile(r"^-- uses: (.+)$", re.MULTILINE)
_REFUSAL = re.compile(r"\b(SESSION_LOST|CONFLICT|RECOVERING|UPLOAD_EXPIRED|RUN_UNKNOWN) (.*)", re.DOTALL)
_PASSING = ("MISCONF ", "NOREPLICAS ", "BUSY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ")
"""What a server that will work again says meanwhile: its disk is full, its replicas are away, a failover goes on."""
_WHERE = re.compile(r"\s*script: (\w+, )?on @user_script.*$", re.DOTALL)


class UploadExpired(StoreError):
    """A payload over 64 KB was not linked in time; it has to be uploaded again (the store does so itself)."""


class RunUnknown(StoreUnavailable):
    """Nobody has initialised the run yet, or Redis came back empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One composed script."""

    name: str
    text: str
    sha: str


def compose(name: str, body: str, helpers: Mapping[str, str]) -> Script:
    """Put flags, key names, helpers and the body of a script file together."""
    flags, _, rest = body.partition("\n")
    if not flags.startswith("#!lua"):
        raise StoreError(f"{name}.lua: the first line must be #!lua with its flags")
    uses = _USES.search(rest)
    names = ["core", *(uses.group(1).split() if uses else ())]
    code = "\n".join([*(helpers[helper] for helper in names), rest])
    text = f"{flags}\n{lua_preamble(code)}{code}"
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


@functools.cache
def load_scripts() -> Mapping[str, Script]:
    """Every script of the package, by name; read once a process, because the files do not change under it."""
    folder = resources.files("rollmesh.store") / "scripts"
    helpers, bodies = _lua_files(folder / "lib"), _lua_files(folder)
    return MappingProxyType({name: compose(name, body, helpers) for name, body in sorted(bodies.items())})


def refuses_credentials(error: Exception) -> bool:
    """Whether trying again cannot help, because the password is missing or wrong."""
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthenticationWrongNumberOfArgsError):
        return True
    text = str(error)
    if text.startswith(("WRONGPASS", "NOAUTH", "NOPERM")):
        return True
    what_redis_py_says = ("already authenticated", "username-password pair", "this user has no permissions")
    return any(words in text for words in what_redis_py_says)


def _lua_files(folder: Traversable) -> dict[str, str]:
    return {f.name.removesuffix(".lua"): f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}


def store_error(error: redis_errors.RedisError, what: str) -> StoreError:
    """The exception of ``errors.py`` that says what Redis or a script said."""
    text = str(error)
    refusal = _REFUSAL.search(text)
    if refusal is not None:
        code, reason = refusal.group(1), _WHERE.sub("", refusal.group(2))
        if code == "SESSION_LOST":
            return SessionLost(f"{what}: {reason}")
        if code == "CONFLICT":
            return Conflict(f"{what}: {reason}")
        if code == "UPLOAD_EXPIRED":
            return UploadExpired(f"{what}: {reason}")
        if code == "RUN_UNKNOWN":
            return RunUnknown(f"{what}: {reason}")
        return StoreUnavailable(f"{what}: {reason}; try again later")
    if refuses_credentials(error):
        return StoreUnavailable(
            f"Redis refuses the credentials ({text}): see store.url, ROLLMESH_STORE__PASSWORD and, for "
            "sentinels, ROLLMESH_STORE__SENTINEL_PASSWORD"
        )
    if isinstance(error, redis_errors.OutOfMemoryError) or "used memory > 'maxmemory'" in text:
        return StoreUnavailable(
            f"{what}: Redis has reached maxmemory; nothing was changed. Training frees memory; else raise "
            "store.maxmemory_bytes (embedded) or the server's maxmemory"
        )
    if isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError):
        return StoreUnavailable(f"{what}: Redis cannot be reached: {text or type(error).__name__}")
    if text.startswith(_PASSING):
        return StoreUnavailable(f"{what}: Redis refuses for now: {_WHERE.sub('', text)}")
    return StoreError(f"{what}: Redis says: {text}")
