"""Key names, and Lua scripts: one file per state change, composed with the names and library files that it uses.

A script file starts with ``#!lua`` and its flags. A script gets the files of ``scripts/lib`` whose names it uses, those
whose names they use, and no others: the server creates all functions of a script again at every call. A server that is
out of memory rejects scripts without ``allow-oom`` before their first line runs. A script fails with ``CODE text``;
``store_error`` converts the code into an exception.
"""

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
from rollmesh.mesh import DropReason, WasteReason
from rollmesh.types import TrajectoryState

MAX_KEYS_PER_SCRIPT = 512
"""Maximum number of keys that a script touches; callers slice their arguments accordingly.

Three scripts have no slices. Each runs once per recovery or rollback. ``reregister`` takes all trajectories of a worker
(``rollout.worker_concurrency``): with slices, a lease between two slices would look like one that the worker has
forgotten. ``roll_back`` and ``reassert_groups`` take a whole abandoned cut, so that no leader reads half of it. For
1,024 trajectories the server needs 5 ms to keep them and 37 ms to release them.

``score`` reads the state of every member of a group whose surplus it cuts off, ``undecided`` and ``close_group`` the
record of every member of one group.

A group of more than 100 members leaves the queue in one step; its records are deleted in slices (``sweep_dropped``).
"""

_REFUSAL = re.compile(r"\b(SESSION_LOST|CONFLICT|RECOVERING|UPLOAD_EXPIRED|RUN_UNKNOWN) (.*)", re.DOTALL)
_TEMPORARY_CODES = ("MISCONF ", "NOREPLICAS ", "BUSY ")
"""Codes of a server that cannot write for now: its disk is full, its replicas are unreachable, or it is busy."""
_NO_MASTER = (
    redis_errors.ReadOnlyError,
    redis_errors.ClusterDownError,  # and MASTERDOWN
    redis_errors.TryAgainError,
    redis_errors.AskError,  # and MOVED
)
"""Errors of a server that is not the master of the run's keys. redis-py strips their codes from the texts."""
_SCRIPT_LOCATION = re.compile(r"\s*script: (\w+, )?on @user_script.*$", re.DOTALL)
_REFUSED = (
    redis_errors.AuthenticationError,  # NOAUTH and WRONGPASS
    redis_errors.AuthenticationWrongNumberOfArgsError,
    redis_errors.NoPermissionError,
)
_REFUSED_TEXTS = ("Authentication required", "already authenticated", "username-password pair")
"""Texts of NOAUTH and WRONGPASS, in the errors in which redis-py or a sentinel wraps them."""
_SINGLE = frozenset(
    {
        "meta",  # run state: steps, cursor, leader, trainer, recovery, pin, content, fixed settings of the schedule
        "limits",  # RunLimits of the run
        "counts",  # counters by state, and totals
        "dropped",  # large dropped groups to sweep
        "drops",  # number of dropped groups and of their tokens, by reason
        "lengths",  # histogram of finished lengths
        "desired",  # desired state by the leader, and the registry version of the generators
        "pending",  # trajectories never leased
        "partial",  # unfinished trajectories without a worker
        "resting",  # unfinished trajectories without a worker that wait for a newer policy, by train step
        "scoring",  # finished trajectories without a worker
        "open",  # open groups by admission index
        "undecided",  # open groups that wait for the next round or for their end, by admission index
        "ready",  # ready groups by admission index
        "open_steps",  # open groups by the smallest train_step of their tokens
        "ready_steps",  # ready groups by the same
        "ready_tokens",  # ready groups by the tokens of their scored members
        "aside",  # groups that were set aside, by admission index
        "returning",  # large groups whose members are being reset, with their progress
        "cut",  # group -> train step of its cut
        "cuts",  # stream of cuts that the trainer waits on
        "tombstones",  # trained and dropped groups, by train step
        "unswept",  # train steps of confirmed batches whose records are not all deleted
        "ledger",  # stream of dropped groups with their reasons
        "sessions",  # open worker sessions by expiry
        "closing",  # closed sessions that still hold trajectories
        "trainers",  # trainer sessions by start time
        "policies",  # stream of announced policies
        "versions",  # policy version -> train step
        "generators",  # generator records
        "generator_expiry",  # expiry of the generators
        "generator_changes",  # registry version of each generator record
        "reloads",  # leases to load a policy, by expiry
        "letters",  # dead letters by time
        "evaluations",  # evaluations in the order of their requests
        "evaluation_queue",  # evaluations without a worker
        "evaluation_claims",  # evaluation -> session that runs it
        "replays",  # replayed dead letters that wait for the leader
        "reports",  # newest step reports, by train step
        "scale",  # requested replicas by service
        "scaler",  # launcher that applies the requested replicas
        "history",  # record of each prompt
        "changes",  # stream of the changed records
        "domains",  # admitted groups by domain
        "outcomes",  # ended groups that no batch file has, for the disaster copy of the history
        "predictions",  # expected and true lengths of the newest groups that ended
        "settings",  # numbered settings by the operator or the launcher
    }
)
_PER_IDENTITY = {
    "trajectory": "t",  # state, session, token count, reward
    "segments": "s",  # its saved segments, protobuf, in order
    "chunk": "c",  # a segment over 64 KB, linked from ``segments``
    "group": "g",  # counters of a group
    "prompt": "p",  # its prompt, protobuf
    "upload": "u",  # a prompt over 64 KB before its admission
    "held": "h",  # trajectories held by a session
    "session": "w",  # worker and last leases of a session
    "agent": "a",  # who has a session of an agent, by its id; its id, by its name
    "batch": "b",  # digest of a cut
    "batch_groups": "bg",  # ordered groups of a cut
    "letter": "l",  # a dead letter
    "letter_segments": "ls",  # its segments
    "letter_prompt": "lp",  # its prompt
    "evaluation": "e",  # request and result
}
_SINGLE_IN_LUA = re.compile(r"\bK\.(\w+)")
_WORDS_IN_LUA = {"S": frozenset(TrajectoryState), "R": frozenset({*DropReason, *WasteReason})}
_IDENTITY_IN_LUA = re.compile(r"\b(\w+)_key\(")
_DEFINED_IN_LUA = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_NOT_CODE = re.compile(r"--.*|'[^'\n]*'")
"""Comments, of one line, and strings, in single quotes: other forms are not read."""
_NAME_IN_LUA = re.compile(r"(?<!\w)(?<!(?<!\.)\.)[A-Za-z_]\w*")
"""A name that is not a field; a field follows a single dot, while two dots are a concatenation."""


class UploadExpired(StoreError):
    """A payload over 64 KB expired before a script linked it; the store uploads it again."""


class RunUnknown(StoreUnavailable):
    """The run has not been initialised, or Redis came back empty."""


_REFUSALS: Mapping[str, type[StoreError]] = MappingProxyType(
    {"SESSION_LOST": SessionLost, "CONFLICT": Conflict, "UPLOAD_EXPIRED": UploadExpired, "RUN_UNKNOWN": RunUnknown}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One composed script."""

    name: str
    text: str
    sha: str


class Libraries:
    """Library files, and which of them a text needs."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        """Read the files, by name. Raises StoreError if two of them define the same name."""
        self._texts = texts
        self._owners: dict[str, str] = {}
        for library, text in texts.items():
            for name in (name for names in _DEFINED_IN_LUA.findall(text) for name in names.split(", ")):
                if self._owners.setdefault(name, library) != library:
                    raise StoreError(f"{name} is defined in lib/{library}.lua and in lib/{self._owners[name]}.lua")
        self._needs = {library: self._named(text) - {library} for library, text in texts.items()}

    def _named(self, text: str) -> set[str]:
        return {self._owners[word] for word in _NAME_IN_LUA.findall(_NOT_CODE.sub("", text)) if word in self._owners}

    def linked(self, text: str) -> list[str]:
        """Return the texts of the files that a text needs, each after those that it needs itself."""
        found: dict[str, str] = {}

        def link(names: set[str]) -> None:
            for library in sorted(names - found.keys()):
                link(self._needs[library] - found.keys())
                found[library] = self._texts[library]

        link(self._named(text))
        return list(found.values())


def compose(name: str, text: str, libraries: Libraries) -> Script:
    """Compose flags, key names, the library files that a script uses and its text; raises StoreError."""
    flags, _, rest = text.partition("\n")
    if not flags.startswith("#!lua"):
        raise StoreError(f"{name}.lua: the first line must be #!lua with its flags")
    code = "\n".join([*libraries.linked(rest), rest])
    composed = f"{flags}\n{lua_preamble(code)}{code}"
    return Script(name=name, text=composed, sha=hashlib.sha1(composed.encode(), usedforsecurity=False).hexdigest())


@functools.cache
def load_scripts() -> Mapping[str, Script]:
    """Load every script of the package, by name; cached for the process."""
    folder = resources.files("rollmesh.store") / "scripts"
    libraries = Libraries(_lua_files(folder / "lib"))
    scripts = _lua_files(folder)
    return MappingProxyType({name: compose(name, text, libraries) for name, text in sorted(scripts.items())})


def _lua_files(folder: Traversable) -> dict[str, str]:
    return {f.name.removesuffix(".lua"): f.read_text() for f in folder.iterdir() if f.name.endswith(".lua")}


def refuses_credentials(error: Exception) -> bool:
    """Tell whether the password is missing or wrong, or the user may not do this, so that a retry cannot succeed."""
    return isinstance(error, _REFUSED) or any(text in str(error) for text in _REFUSED_TEXTS)


def is_no_master(error: Exception) -> bool:
    """Tell whether the server is not the master of the run's keys ; its address may lead elsewhere now."""
    return isinstance(error, _NO_MASTER) or str(error).startswith("UNBLOCKED ")


def cannot_write(error: Exception) -> bool:
    """Tell whether the server is the master, but cannot write for now."""
    return str(error).startswith(_TEMPORARY_CODES)


def store_error(error: redis_errors.RedisError, label: str) -> StoreError:
    """Convert an error of Redis or of a script into an exception of ``errors.py``; ``label`` begins its message."""
    text = str(error)
    refusal = _REFUSAL.search(text)
    if refusal is not None:
        code, reason = refusal.group(1), _SCRIPT_LOCATION.sub("", refusal.group(2))
        if code == "RECOVERING":
            return StoreUnavailable(f"{reason}; retry later")
        # Operators read conflicts, which do not need the name of the script; the others are for the log.
        return Conflict(reason) if code == "CONFLICT" else _REFUSALS[code](f"{label}: {reason}")
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
    if is_no_master(error):
        return StoreUnavailable(
            f"{label}: the server is not the master of the run's keys ({type(error).__name__}: "
            f"{_SCRIPT_LOCATION.sub('', text)}): store.url must lead to the master, not to a replica or "
            "another node of a Redis Cluster"
        )
    if cannot_write(error):
        return StoreUnavailable(f"{label}: Redis reports a temporary error: {_SCRIPT_LOCATION.sub('', text)}")
    return StoreError(f"{label}: Redis reports: {text}")


class Keys:
    """Key names of one run, which share the hash tag ``{run}``; no name is written anywhere else."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.prefix = f"{{{run}}}:"

    def single(self, name: str) -> str:
        """Return the name of a single key; raises KeyError for an unknown name."""
        if name not in _SINGLE:
            raise KeyError(name)
        return self.prefix + name

    def of(self, kind: str, identity: str) -> str:
        """Return the name of a key per identity; raises KeyError for an unknown kind."""
        return f"{self.prefix}{_PER_IDENTITY[kind]}:{identity}"


def lua_preamble(body: str) -> str:
    """Return definitions of the names that a Lua text uses.

    They are ``K.<key>``, ``<kind>_key(identity)``, ``S.<state>`` and ``R.<reason>``. KEYS[1] of every script is the
    run's prefix. Raises KeyError, which names the unknown keys, states and reasons.
    """
    singles = sorted(set(_SINGLE_IN_LUA.findall(body)))
    unknown = [name for name in singles if name not in _SINGLE]
    kinds = sorted(set(_IDENTITY_IN_LUA.findall(body)))
    unknown += [kind for kind in kinds if kind not in _PER_IDENTITY]
    words = {table: sorted(set(re.findall(rf"\b{table}\.(\w+)", body))) for table in _WORDS_IN_LUA}
    unknown += [word for table, used in words.items() for word in used if word not in _WORDS_IN_LUA[table]]
    if unknown:
        raise KeyError(f"unknown keys, states or reasons in a Lua script: {', '.join(unknown)}")
    lines = ["local P = KEYS[1]"]
    lines.append("local K = {" + ", ".join(f"{name} = P .. '{name}'" for name in singles) + "}")
    for table, used in words.items():
        if used:
            lines.append(f"local {table} = {{" + ", ".join(f"{word} = '{word}'" for word in used) + "}")
    for kind in kinds:
        lines.append(f"local function {kind}_key(id) return P .. '{_PER_IDENTITY[kind]}:' .. id end")
    return "\n".join(lines) + "\n"
