"""Drafts from history: the newest responses to each prompt, and the one that continues as a call's last tokens do.

All responses are in one ring of token ids, behind each other. One of ``PATTERN`` or more tokens is found by a hash of
its prompt and its last ``PATTERN`` tokens: ``heads`` has the newest place behind tokens of this hash, ``links`` the
place before it. A response is indexed when a draft is looked for, together with all that ended meanwhile.

The ring is full of the newest responses: whoever uses the history of a prompt adds a response to it, so what is
overwritten belongs to the prompts that were not used for longest. Links into overwritten places lead astray, and two
prompts may have one hash: a draft is compared with the last tokens before it is used, and verified in any case.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.types import Int32Array

PATTERN = 4
"""Fewest tokens that a call and an earlier response must have in common."""
COMPARED = 32
"""Most tokens that are compared to find the longest match."""
_CANDIDATES, _LINKS = 5, 32
"""Newest places behind the call's last token that a look-up compares, and places of its hash that it looks at."""
_FIRST_TOKENS, _GROWTH = 1 << 16, 4
_UNINDEXED = 1 << 16
"""Most tokens that one look-up indexes, beside one response."""
_KEY_BITS = (1 << 31) - 1
_FACTOR = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Match(NamedTuple):
    """Place in the ring at which a draft begins."""

    start: int
    length: int
    """Tokens before it that equal the last tokens of the call, at most ``COMPARED``."""


class Drafts:
    """Newest responses to every prompt, at most ``most_tokens`` tokens with four of each prompt and a mark."""

    def __init__(self, most_tokens: int) -> None:
        self._most = most_tokens
        self._end = COMPARED  # so that as many tokens can be read before any place
        """Place behind the newest response."""
        self._indexed = COMPARED
        """Place behind the newest response that look-ups find."""
        self._ring = np.full(0, -1, np.int32)
        self._allocate(min(_FIRST_TOKENS, most_tokens))

    @property
    def bytes_used(self) -> int:
        return self._ring.nbytes + self._links.nbytes + self._heads.nbytes

    def add(self, prompt_key: int, prompt_ids: Int32Array, response_ids: Int32Array) -> None:
        """Add a response; it replaces the oldest ones. One that is longer than the ring is left out."""
        tail = prompt_ids[-PATTERN:]
        count = 1 + len(tail) + len(response_ids)
        if COMPARED + count >= self._most:
            return
        while self._end + count > self._size and self._size < self._most:
            self._allocate(min(_GROWTH * self._size, self._most))
        if self._end + count > self._size:
            self._index()
            self._end = self._indexed = COMPARED
        start = self._end
        self._ring[start] = -1 - (prompt_key & _KEY_BITS)
        self._ring[start + 1 : start + 1 + len(tail)] = tail
        self._end = start + count
        self._ring[start + 1 + len(tail) : self._end] = response_ids
        self._ring[self._end] = -1  # a draft ends here, whatever older response follows
        if self._end - self._indexed > _UNINDEXED:
            self._index()

    def clear(self) -> None:
        self._end = COMPARED
        self._allocate(min(_FIRST_TOKENS, self._most))

    def find(self, prompt_key: int, recent: bytes) -> Match | None:
        """Return the longest match of the last tokens of a call, the newest of equal ones; None without one.

        ``recent`` has the last ``COMPARED`` tokens, int32.
        """
        if self._indexed < self._end:
            self._index()
        code = prompt_key & _KEY_BITS
        token = 0
        for token in memoryview(recent)[-4 * PATTERN :].cast("i"):
            code = (code * _FACTOR + token) & _WORD
        wanted, best, length = int.from_bytes(recent, "little"), 0, 0
        least = 1 << 32 * (COMPARED - PATTERN)  # the more of the last tokens agree, the smaller is the difference
        place = self._heads_view[(code * _FACTOR & _WORD) >> self._shift]
        compared, last = 0, token
        for _ in range(_LINKS):
            if not place or compared == _CANDIDATES:
                break
            if self._ring_view[place - 1] == last and self._ring_view[place] >= 0:
                compared += 1
                differing = wanted ^ int.from_bytes(self._bytes[4 * (place - COMPARED) : 4 * place], "little")
                if differing < least:
                    best, length = place, COMPARED - (differing.bit_length() + 31) // 32
                    if not differing:
                        break
                    least = 1 << 32 * (COMPARED - length - 1)
            place = self._links_view[place]
        return Match(best, length) if best else None

    def tokens(self, start: int, count: int) -> Int32Array:
        """Return ``count`` tokens of the ring, at most ``COMPARED``; a negative one is the end of the response."""
        return self._ring[start : start + count]

    def _allocate(self, tokens: int) -> None:
        """Make a ring of ``tokens`` places with the responses in use, and an index of at least as many hashes.

        Behind it there are places so that as many tokens can be read behind any.
        """
        bits, ring = int(tokens - 1).bit_length(), np.full(tokens + COMPARED, -1, np.int32)
        if self._end > COMPARED:
            ring[: self._end] = self._ring[: self._end]
        self._ring, self._size = ring, tokens
        self._links = np.zeros(tokens + 1, np.int32)
        self._heads = np.zeros(1 << bits, np.int32)
        self._shift = 64 - bits
        # Views of memory read single numbers several times as fast as arrays do.
        self._ring_view, self._links_view = self._ring.data, self._links.data
        self._heads_view, self._bytes = self._heads.data, self._ring.data.cast("B")
        self._indexed = COMPARED

    def _index(self) -> None:
        """Link every place of the new responses behind ``PATTERN`` tokens."""
        start, stop, self._indexed = self._indexed, self._end, self._end
        ids = self._ring[start:stop]
        marks = np.flatnonzero(ids < 0)
        lengths = np.diff(marks, append=len(ids))
        code = np.repeat(-1 - ids[marks].astype(np.int64), lengths).astype(np.uint64)[PATTERN:]
        since_mark = (np.arange(len(ids)) - np.repeat(marks, lengths))[PATTERN:]
        words = ids.astype(np.uint64)
        for at in range(PATTERN):
            code *= np.uint64(_FACTOR)
            code += words[at : len(ids) - PATTERN + at]
        inside = np.flatnonzero(since_mark > PATTERN)
        hashes = (code[inside] * np.uint64(_FACTOR)) >> np.uint64(self._shift)
        self._link(hashes.astype(np.int64), start + PATTERN + inside)

    def _link(self, hashes: Int64Array, places: Int64Array) -> None:
        order: npt.NDArray[np.intp] = np.argsort(hashes, kind="stable")
        hashes, places = hashes[order], places[order]
        same = hashes[1:] == hashes[:-1]
        first, last = np.append(True, ~same), np.append(~same, True)
        self._links[places[1:][same]] = places[:-1][same]
        self._links[places[first]] = self._heads[hashes[first]]
        self._heads[hashes[last]] = places[last]
