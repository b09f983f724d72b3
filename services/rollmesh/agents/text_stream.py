"""Text of sampled tokens: only whole characters, with a position for every token, and the stop strings in it.

Two texts grow in parallel. ``raw`` includes special tokens: a chat template has to write exactly this text to produce
the same tokens. ``text`` leaves special tokens out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array

_CONTEXT_TOKENS = 6
"""Context tokens decoded together with the answer: some tokenizers drop the space before a first word."""
_BROKEN = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 8
"""Limit of tokens without a whole character; after it, the bytes are decoded as they are."""


class TextStream:
    """Decoder of the tokens that follow ``context_ids``."""

    def __init__(self, tokenizer: Tokenizer, context_ids: Int32Array) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = context_ids[-_CONTEXT_TOKENS:].tolist()
        self._read = len(self._window)
        self._special: dict[int, bool] = {}
        self.raw = ""
        """Text of all whole characters so far, including special tokens."""
        self.text = ""
        """The same text without special tokens."""
        self.raw_ends: list[int] = []
        """Length of ``raw`` after each token."""
        self.text_ends: list[int] = []
        """Length of ``text`` after each token."""

    def push(self, token_id: int) -> None:
        """Add one token."""
        self._window.append(token_id)
        special = self._is_special(token_id)
        waiting = len(self._window) - self._read
        piece = self._piece()
        if special or not piece.endswith(_BROKEN) or waiting > _LONGEST_CHARACTER_TOKENS:
            self._emit(piece, token_id if special else None)
        self.raw_ends.append(len(self.raw))
        self.text_ends.append(len(self.text))

    def flush(self) -> None:
        """Decode the remaining incomplete characters; no token follows."""
        if self._read < len(self._window):
            self._emit(self._piece(), None)
            self.raw_ends[-1], self.text_ends[-1] = len(self.raw), len(self.text)

    def cut(self, count: int) -> None:
        """Drop all tokens after the first ``count``."""
        del self.raw_ends[count:], self.text_ends[count:]
        self.raw = self.raw[: self.raw_ends[-1] if count else 0]
        self.text = self.text[: self.text_ends[-1] if count else 0]

    def _piece(self) -> str:
        """Return the text of the undecoded tokens, as it reads after the decoded ones."""
        whole = self._tokenizer.decode(self._window, special_tokens=True)
        return whole[len(self._tokenizer.decode(self._window[: self._read], special_tokens=True)) :]

    def _emit(self, piece: str, special_id: int | None) -> None:
        self.raw += piece
        if special_id is None:
            self.text += piece
        else:
            own = self._tokenizer.decode([special_id], special_tokens=True)
            self.text += piece.removesuffix(own)
        self._window = self._window[-_CONTEXT_TOKENS:]
        self._read = len(self._window)

    def _is_special(self, token_id: int) -> bool:
        known = self._special.get(token_id)
        if known is None:
            hidden = not self._tokenizer.decode([token_id])
            known = self._special[token_id] = hidden and bool(self._tokenizer.decode([token_id], special_tokens=True))
        return known


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Return the position of the first stop string completed in ``text`` from ``start`` on, or None.

    The stop string that ends first wins, not the one that begins first. The result therefore does not depend on the
    token boundaries. If two stop strings end at the same position, the longer one wins.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the suffix of ``text`` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
