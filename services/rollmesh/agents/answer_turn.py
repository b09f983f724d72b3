"""One answer while it is sampled: its text, its end and its tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.agents.text_stream import TextStream, find_stop, held_back
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token of an answer and its log-probability."""

    token_id: int
    token: str
    """Text of the token, including special tokens."""
    logprob: float


class AnswerTurn:
    """Answer to a context, built from the segments that arrive.

    A stop string ends the text before it. The tokens that wrote the stop string are dropped, including a token that
    wrote both the end of the answer and the beginning of the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Int32Array, stops: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer, context_ids)
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sent = 0
        self._scanned = 0
        self._answer: str | None = None

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; later tokens are ignored."""
        return self._answer is not None

    @property
    def token_count(self) -> int:
        """Number of tokens of the answer."""
        return len(self._ids)

    @property
    def token_ids(self) -> Int32Array:
        """Tokens of the answer, int32 [tokens]."""
        return np.array(self._ids, np.int32)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Policy versions that wrote the answer, ascending."""
        return tuple(sorted(set(self._versions)))

    @property
    def text(self) -> str:
        """Text of the answer, without special tokens."""
        return self._stream.text if self._answer is None else self._answer

    @property
    def raw(self) -> str:
        """Text of the answer's tokens, including special tokens."""
        return self._stream.raw

    @property
    def undecided(self) -> bool:
        """True while the newest tokens may be the beginning of a stop string."""
        return not self.stopped and held_back(self._stream.text, self._stops) > 0

    def feed(self, segment: Segment) -> None:
        """Add sampled tokens; those after a stop string are ignored."""
        assert segment.behavior_logprobs is not None
        for token_id, logprob in zip(segment.token_ids.tolist(), segment.behavior_logprobs.tolist(), strict=True):
            if self.stopped:
                return
            self._stream.push(token_id)
            self._ids.append(token_id)
            self._logprobs.append(logprob)
            self._versions.append(segment.policy_version)
            self._look_for_stop()

    def finish(self) -> None:
        """Finish the text; no token follows."""
        if not self.stopped:
            self._stream.flush()
            self._look_for_stop()

    def new_text(self, *, final: bool = False) -> str:
        """Return the text not sent yet, up to a possible stop string (all of it when ``final``)."""
        text = self.text
        end = len(text) if final or self.stopped else len(text) - held_back(text, self._stops)
        sent, self._sent = self._sent, max(self._sent, end)
        return text[sent : self._sent]

    def unsent_copy(self) -> AnswerTurn:
        """Return a copy of a complete answer with no text marked as sent."""
        again = copy.copy(self)
        again._sent = 0
        return again

    def logprobs(self, start: int = 0) -> list[TokenLogprob]:
        """Return the tokens from index ``start`` on, with their log-probabilities."""
        ends = [0, *self._stream.raw_ends]
        return [
            TokenLogprob(
                token_id=self._ids[at],
                token=self._stream.raw[ends[at] : ends[at + 1]],
                logprob=self._logprobs[at],
            )
            for at in range(start, len(self._ids))
        ]

    def _look_for_stop(self) -> None:
        if not self._stops:
            return
        text = self._stream.text
        longest = max(map(len, self._stops))
        place = find_stop(text, self._stops, max(0, self._scanned - longest + 1))
        self._scanned = len(text)
        if place is None:
            return
        self._answer = text[:place]
        kept = sum(1 for end in self._stream.text_ends if end <= place)
        # A token without text (half a character) at the stop string belongs to the character after it.
        while kept and self._stream.text_ends[kept - 1] == place and self._is_silent(kept - 1):
            kept -= 1
        del self._ids[kept:], self._logprobs[kept:], self._versions[kept:]
        self._stream.cut(kept)

    def _is_silent(self, at: int) -> bool:
        ends = self._stream.raw_ends
        return ends[at] == (ends[at - 1] if at else 0)
