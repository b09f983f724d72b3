"""Prefixes of contexts whose keys and values exist: in the rows of running calls, and kept from calls that have ended.

A session's next turn, a resumed trajectory and the members of a group begin with tokens that the engine has computed
under the same policy version. They are found by their ids, at any length from a block on, and copied.
"""

from dataclasses import dataclass
from itertools import islice

import numpy as np
from torch import Tensor

from rollmesh.types import Int32Array

_BLOCK = 16
_COMPARED = 8
"""Prefixes with the same blocks that a look-up compares."""


@dataclass(slots=True, eq=False, kw_only=True)
class Prefix:
    """Tokens whose keys and values can be copied: the beginning of a slot's row, or tensors of their own."""

    policy_version: int
    token_ids: Int32Array
    slot: int = -1
    kept: tuple[Tensor, Tensor] | None = None
    """Keys [layers, kv_heads, d, tokens] and values [layers, kv_heads, tokens, d] of a call that has ended."""


class Prefixes:
    """Index of prefixes. It has each under the ids up to the end of every block, and under all of its ids."""

    def __init__(self) -> None:
        self.kept_tokens = 0
        """Tokens of the prefixes that are in no row."""
        self._kept: dict[Prefix, None] = {}
        """In the order in which their calls ended."""
        self._found: dict[int, dict[Prefix, None]] = {}

    def add(self, prefix: Prefix) -> None:
        for key in _keys(prefix.policy_version, prefix.token_ids):
            self._found.setdefault(key, {})[prefix] = None
        if prefix.kept is not None:
            self._kept[prefix] = None
            self.kept_tokens += len(prefix.token_ids)

    def remove(self, prefix: Prefix) -> None:
        for key in _keys(prefix.policy_version, prefix.token_ids):
            del self._found[key][prefix]
            if not self._found[key]:
                del self._found[key]
        if prefix.kept is not None:
            del self._kept[prefix]
            self.kept_tokens -= len(prefix.token_ids)

    def evict(self, most_tokens: int) -> None:
        """Remove kept prefixes until they have at most this many tokens: those of the calls that ended first."""
        while self._kept and self.kept_tokens > most_tokens:
            self.remove(next(iter(self._kept)))

    def clear(self) -> None:
        self.kept_tokens = 0
        self._kept.clear()
        self._found.clear()

    def longest(self, policy_version: int, ids: Int32Array) -> tuple[Prefix | None, int]:
        """Return the prefix that agrees with the most of the first ``ids``, and with how many.

        Thousands may agree with the same blocks. Of these it is one that ``ids`` continues, else the best of the
        newest: others agree with a part of a block more at most.
        """
        keys = _keys(policy_version, ids)
        for end, key in reversed([(_BLOCK * number, key) for number, key in enumerate(keys, 1) if key in self._found]):
            rest = ids[end : end + _BLOCK - 1]
            ends = (_next_key(key, rest[:count]) for count in range(len(rest), 0, -1))
            found = self._found[next((end_key for end_key in ends if end_key in self._found), key)]
            newest = list(islice(reversed(found), _COMPARED))
            common, at = max((_common(prefix.token_ids, ids), -at) for at, prefix in enumerate(newest))
            return newest[-at], common
        return None, 0


def _keys(policy_version: int, ids: Int32Array) -> list[int]:
    key, keys = hash(policy_version), []
    for start in range(0, len(ids), _BLOCK):
        key = _next_key(key, ids[start : start + _BLOCK])
        keys.append(key)
    return keys


def _next_key(key: int, ids: Int32Array) -> int:
    return hash((key, ids.tobytes()))


def _common(one: Int32Array, other: Int32Array) -> int:
    """Return the number of leading ids in which two sequences agree."""
    shorter = min(len(one), len(other))
    differing = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differing[0]) if len(differing) else shorter
