"""Lua scripts: one file per state change, composed with the key names and the shared helpers that they use.

A script file starts with ``#!lua`` and its flags. The functions of ``scripts/lib`` need no import. A script gets the
functions that it references, directly or through another function, and no others: the server creates all functions of
a script again at every call. A server that is out of memory rejects scripts without ``allow-oom`` before their first
line runs. A script fails with ``CODE text``; ``store_error`` converts the code into an exception.
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
"""Maximum number of keys that a script touches; callers slice their arguments accordingly.

Three scripts have no slices. Each runs once per recovery or rollback. ``reregister`` takes all trajectories of a worker
(``rollout.worker_concurrency``): with slices, a lease between two slices would look like one that the worker has
forgotten. ``roll_back`` and ``reassert_groups`` take a whole abandoned cut, so that no leader reads half of it. For
1,024 trajectories the server needs 5 ms to keep them and 37 ms to release them.

A group of more than 100 members leaves the queue in one step; its records are deleted in slices (``sweep_dropped``).
"""

_HELPER = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_NOT_CODE = re.compile(r"--.*|'[^'\n]*'")
_NAME = re.compile(r"(?<!\w)(?<!(?<!\.)\.)[A-Za-z_]\w*")
"""A name that is not a field; a field follows a single dot, while two dots are a concatenation."""
_COMMENT_LINES = re.compile(r"^--.*\n", re.MULTILINE)
_OTHER_TEXT = re.compile(r'"|\[\[')
_REFUSAL = re.compile(r"\b(SESSION_LOST|CONFLICT|RECOVERING|UPLOAD_EXPIRED|RUN_UNKNOWN) (.*)", re.DOTALL)
_TEMPORARY_ERRORS = ("MISCONF ", "NOREPLICAS ", "BUSY ", "MASTERDOWN ", "CLUSTERDOWN ", "TRYAGAIN ")
"""Temporary errors of a server: the disk is full, replicas are unreachable, or a failover is in progress."""
_SCRIPT_LOCATION = re.compile(r"\s*script: (\w+, )?on @user_script.*$", re.DOTALL)


class UploadExpired(StoreError):
    """A payload over 64 KB expired before a script linked it; the store uploads it again."""


class RunUnknown(StoreUnavailable):
    """The run has not been initialised, or Redis came back empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One composed script."""

    name: str
    text: str
    sha: str


def compose(name: str, body: str, helpers: Mapping[str, str]) -> Script:
    """Compose flags, key names, the required ``helpers`` (text by name) and a script file; raises StoreError."""
    flags, _, rest = body.partition("\n")
    if not flags.startswith("#!lua"):
        raise StoreError(f"{name}.lua: the first line must be #!lua with its flags")
    code = "\n".join([*_needed(rest, helpers), rest])
    text = f"{flags}\n{lua_preamble(code)}{code}"
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def split_helpers(text: str) -> dict[str, str]:
    """Split a helper file into its top-level ``local`` statements, by every name they define; drops comment lines."""
    text = _COMMENT_LINES.sub("", text)
    starts = [match.start() for match in _HELPER.finditer(text)]
    parts = [text[start:end].rstrip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return {name: part for part in parts for name in _defined(part)}


def _needed(code: str, helpers: Mapping[str, str]) -> list[str]:
    """Return the helpers that a Lua text uses, each after the helpers that it uses itself."""
    ordered: dict[str, None] = {}

    def require(part: str, within: tuple[str, ...]) -> None:
        bare = _NOT_CODE.sub("", part)
        if "--[[" in part or _OTHER_TEXT.search(bare):
            raise StoreError(f"use single quotes for Lua strings and one-line comments only:\n{part}")
        for name in _NAME.findall(bare):
            helper = helpers.get(name)
            if helper is None or helper == part or helper in ordered:
                continue
            if helper in within:
                raise StoreError(f"helper {name} depends on itself, or a local variable has its name:\n{part}")
            require(helper, (*within, helper))
            ordered[helper] = None

    require(code, ())
    return list(ordered)


def _defined(part: str) -> list[str]:
    match = _HELPER.match(part)
    return match.group(1).split(", ") if match else []


@functools.cache
def load_scripts() -> Mapping[str, Script]:
    """Load every script of the package, by name; cached for the process."""
    folder = resources.files("rollmesh.store") / "scripts"
    helpers: dict[str, str] = {}
    for name, text in sorted(_lua_files(folder / "lib").items()):
        found = split_helpers(text)
        if twice := helpers.keys() & found.keys():
            raise StoreError(f"lib/{name}.lua: {', '.join(sorted(twice))} is also defined in another helper file")
        helpers |= found
    bodies = _lua_files(folder)
    return MappingProxyType({name: compose(name, body, helpers) for name, body in sorted(bodies.items())})


def refuses_credentials(error: Exception) -> bool:
    """Tell whether the password is missing or wrong, so that a retry cannot succeed."""
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthenticationWrongNumberOfArgsError):
        return True
    text = str(error)
    if text.startswith(("WRONGPASS", "NOAUTH", "NOPERM")):
        return True
    redis_py_messages = ("already authenticated", "username-password pair", "this user has no permissions")
    return any(message in text for message in redis_py_messages)


def _lua_files(folder: Traversable) -> dict[str, str]:
    return {f.name.removesuffix(".lua"): f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}


def store_error(error: redis_errors.RedisError, label: str) -> StoreError:
    """Convert an error of Redis or of a script into an exception of ``errors.py``; ``label`` begins its message."""
    text = str(error)
    refusal = _REFUSAL.search(text)
    if refusal is not None:
        code, reason = refusal.group(1), _SCRIPT_LOCATION.sub("", refusal.group(2))
        if code == "SESSION_LOST":
            return SessionLost(f"{label}: {reason}")
        if code == "CONFLICT":
            return Conflict(f"{label}: {reason}")
        if code == "UPLOAD_EXPIRED":
            return UploadExpired(f"{label}: {reason}")
        if code == "RUN_UNKNOWN":
            return RunUnknown(f"{label}: {reason}")
        return StoreUnavailable(f"{label}: {reason}; retry later")
    if refuses_credentials(error):
        return StoreUnavailable(
            f"Redis rejects the credentials ({text}): check store.url, ROLLMESH_STORE__PASSWORD and, for "
            "Sentinel, ROLLMESH_STORE__SENTINEL_PASSWORD"
        )
    if isinstance(error, redis_errors.OutOfMemoryError) or "used memory > 'maxmemory'" in text:
        return StoreUnavailable(
            f"{label}: Redis has reached maxmemory; nothing was changed. Wait until training frees memory, or raise "
            "store.maxmemory_bytes (embedded) or the server's maxmemory"
        )
    if isinstance(error, redis_errors.ConnectionError | redis_errors.TimeoutError):
        return StoreUnavailable(f"{label}: Redis is unreachable: {text or type(error).__name__}")
    if text.startswith(_TEMPORARY_ERRORS):
        return StoreUnavailable(f"{label}: Redis reports a temporary error: {_SCRIPT_LOCATION.sub('', text)}")
    return StoreError(f"{label}: Redis reports: {text}")
