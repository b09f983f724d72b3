"""Key names of the trajectory queue, for Python and for Lua.

All keys of a run share the hash tag ``{run}``. Python gets the names from a ``Keys`` object, Lua scripts from
``lua_preamble``. No name is written anywhere else.

    single keys                                      keys per identity
    meta         run state: steps, cursor, leader    trajectory   state, session, tokens, reward
    limits       RunLimits of the run                segments     its saved segments, protobuf, in order
    counts       counters by state, totals           chunk        a segment over 64 KB, linked from ``segments``
    dropped      large dropped groups to sweep
    drops        dropped groups, wasted tokens       group        counters of a group
    lengths      histogram of finished lengths       prompt       its prompt, protobuf
    pending      trajectories never leased           upload       a prompt over 64 KB before its admission
    partial      unfinished trajectories at rest     held         trajectories held by a session
    scoring      finished ones without a worker      session      last lease of a session (for retries)
    open, ready  groups by admission index           batch        digest of a cut
    open_steps,  groups by the smallest train_step   batch_groups ordered groups of a cut
    ready_steps  of their tokens                     letter       a dead letter
    cut          group -> train step of its cut      letter_segments, letter_prompt   its payload
    tombstones   trained, dropped groups, by step    evaluation   request, holder and result
    scale        requested replicas by service
    scaler       launcher that applies ``scale``
    generator_*  expiry of generators, and the registry version of their records
    settings     settings by the operator or the launcher, numbered
    replays      replayed dead letters that wait for room
    reports      newest step reports, by train step
"""

from __future__ import annotations

import re

_SINGLE = frozenset(
    {
        "meta",
        "limits",
        "counts",
        "dropped",
        "drops",
        "lengths",
        "desired",
        "pending",
        "partial",
        "scoring",
        "open",
        "ready",
        "open_steps",
        "ready_steps",
        "cut",
        "cuts",
        "tombstones",
        "unswept",
        "ledger",
        "sessions",
        "closing",
        "trainers",
        "policies",
        "versions",
        "generators",
        "generator_expiry",
        "generator_changes",
        "letters",
        "evaluations",
        "evaluation_queue",
        "evaluation_claims",
        "replays",
        "reports",
        "scale",
        "scaler",
        "settings",
    }
)
_PER_IDENTITY = {
    "trajectory": "t",
    "segments": "s",
    "chunk": "c",
    "group": "g",
    "prompt": "p",
    "upload": "u",
    "held": "h",
    "session": "w",
    "batch": "b",
    "batch_groups": "bg",
    "letter": "l",
    "letter_segments": "ls",
    "letter_prompt": "lp",
    "evaluation": "e",
}
_SINGLE_IN_LUA = re.compile(r"\bK\.(\w+)")
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
    """Return definitions of the keys that a Lua text uses: ``K.<single>`` and ``<kind>_key(identity)``.

    KEYS[1] of every script is the run's prefix. Raises KeyError, which names the unknown keys.
    """
    singles = sorted(set(_SINGLE_IN_LUA.findall(body)))
    unknown = [name for name in singles if name not in _SINGLE]
    kinds = sorted(set(_IDENTITY_IN_LUA.findall(body)))
    unknown += [kind for kind in kinds if kind not in _PER_IDENTITY]
    if unknown:
        raise KeyError(f"unknown keys in a Lua script: {', '.join(unknown)}")
    lines = ["local P = KEYS[1]"]
    lines.append("local K = {" + ", ".join(f"{name} = P .. '{name}'" for name in singles) + "}")
    for kind in kinds:
        lines.append(f"local function {kind}_key(id) return P .. '{_PER_IDENTITY[kind]}:' .. id end")
    return "\n".join(lines) + "\n"
