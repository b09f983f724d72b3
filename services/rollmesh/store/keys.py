"""Key names of the trajectory queue, for Python and for Lua, and the names of states and reasons for Lua.

All keys of a run share the hash tag ``{run}``. Python gets the names from a ``Keys`` object, Lua scripts from
``lua_preamble``. No name is written anywhere else.
"""

from __future__ import annotations

import re

from rollmesh.mesh import DropReason, WasteReason
from rollmesh.types import TrajectoryState

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


class Keys:
    """Key names of one run."""

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
