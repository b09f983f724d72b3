"""The Lua scripts: one file per state change, composed with the key names and the shared helpers they use.

A script file starts with ``#!lua`` and its flags. The functions of ``scripts/lib`` need no import: a script gets those
that it names, those that they name, and no other, because the server makes all functions of a text anew at every call.
Scripts without ``allow-oom`` are refused by a server that is out of memory before their first line runs. A script
refuses with ``CODE text``; ``store_error`` turns the code into an exception.
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
"""Callers slice their batches so that no script touches more keys.

Three take all of something in one step, each once in a recovery or a rollback: ``reregister`` what a worker holds
(``rollout.worker_concurrency``), because a lease that its session gets between two slices would be taken for one that
the worker has forgotten; ``roll_back`` and ``reassert_groups`` a cut that gives way, so that no leader sees half of it.
1,024 trajectories took the server 5 ms to keep and 37 ms to give back.

A group of more than 100 members is gone with the first step; its records are deleted in slices (``sweep_dropped``).
"""

_HELPER = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_NOT_CODE = re.compile(r"--.*|'[^'\n]*'")
_NAME = re.compile(r"(?<!\w)(?<!(?<!\.)\.)[A-Za-z_]\w*")
"""A name that is no field: after one dot, not after the two of a concatenation."""
_COMMENT_LINES = re.compile(r"^--.*\n", re.MULTILINE)
_OTHER_TEXT = re.compile(r'"|\[\[')
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
    """Put flags, key names and a script file together with the ``helpers`` (text by name) that it needs."""
    flags, _, rest = body.partition("\n")
    if not flags.startswith("#!lua"):
        raise StoreError(f"{name}.lua: the first line must be #!lua with its flags")
    code = "\n".join([*_needed(rest, helpers), rest])
    text = f"{flags}\n{lua_preamble(code)}{code}"
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def split_helpers(text: str) -> dict[str, str]:
    """The top-level ``local`` statements of a helper file, by every name that they define; without comment lines."""
    text = _COMMENT_LINES.sub("", text)
    starts = [match.start() for match in _HELPER.finditer(text)]
    parts = [text[start:end].rstrip() for start, end in zip(starts, [*starts[1:], None], strict=True)]
    return {name: part for part in parts for name in _defined(part)}


def _needed(code: str, helpers: Mapping[str, str]) -> list[str]:
    """The helpers that a Lua text names, and those that they name before them: a local is known from there on."""
    ordered: dict[str, None] = {}

    def require(part: str, within: tuple[str, ...]) -> None:
        bare = _NOT_CODE.sub("", part)
        if "--[[" in part or _OTHER_TEXT.search(bare):
            raise StoreError(f"a Lua text has to stand in single quotes, and a comment on one line:\n{part}")
        for name in _NAME.findall(bare):
            helper = helpers.get(name)
            if helper is None or helper == part or helper in ordered:
                continue
            if helper in within:
                raise StoreError(f"helper {name} needs itself by way of another one, or a local has its name:\n{part}")
            require(helper, (*within, helper))
            ordered[helper] = None

    require(code, ())
    return list(ordered)


def _defined(part: str) -> list[str]:
    match = _HELPER.match(part)
    return match.group(1).split(", ") if match else []


@functools.cache
def load_scripts() -> Mapping[str, Script]:
    """Every script of the package, by name; read once a process, because the files do not change under it."""
    folder = resources.files("rollmesh.store") / "scripts"
    helpers: dict[str, str] = {}
    for name, text in sorted(_lua_files(folder / "lib").items()):
        found = split_helpers(text)
        if twice := helpers.keys() & found.keys():
            raise StoreError(f"lib/{name}.lua: {', '.join(sorted(twice))} is defined in another helper file too")
        helpers |= found
    bodies = _lua_files(folder)
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
