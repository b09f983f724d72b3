"""One answer while it is sampled: its text, where it stops, and which of its tokens count."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.agents.stop_strings import find_stop, held_back
from rollmesh.agents.text_stream import TextStream
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, Segment


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """One token of an answer and its log-probability."""

    token_id: int
    token: str
    """Its part of the text, special tokens spelled out."""
    logprob: float


class AnswerTurn:
    """Text of the tokens that follow a context; feed it every segment that arrives.

    A stop string ends the answer before it. The tokens that wrote it do not count, nor does a token that wrote both
    the end of the answer and the beginning of the stop string.
    """

    def __init__(self, tokenizer: Tokenizer, context_ids: Int32Array, stops: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer, context_ids)
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._told = 0
        self._scanned = 0
        self._answer: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found; nothing that is sampled from then on counts."""
        return self._answer is not None

    @property
    def token_count(self) -> int:
        """Tokens that count."""
        return len(self._ids)

    @property
    def token_ids(self) -> Int32Array:
        """Tokens that count, int32 [tokens]."""
        return np.array(self._ids, np.int32)

    @property
    def policy_versions(self) -> tuple[int, ...]:
        """Versions that wrote the answer, ascending."""
        return tuple(sorted(set(self._versions)))

    @property
    def text(self) -> str:
        """The answer as a reader sees it."""
        return self._stream.text if self._answer is None else self._answer

    @property
    def raw(self) -> str:
        """The text of the tokens that count, special tokens spelled out."""
        return self._stream.raw

    @property
    def undecided(self) -> bool:
        """Whether the newest tokens may turn out to write a stop string."""
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
        """Nothing follows."""
        if not self.stopped:
            self._stream.flush()
            self._look_for_stop()

    def news(self, *, final: bool = False) -> str:
        """Text that has not been told yet, up to where a stop string may begin (all of it when ``final``)."""
        text = self.text
        end = len(text) if final or self.stopped else len(text) - held_back(text, self._stops)
        told, self._told = self._told, max(self._told, end)
        return text[told : self._told]

    def afresh(self) -> AnswerTurn:
        """The same answer with nothing told yet; for an answer that is complete."""
        again = copy.copy(self)
        again._told = 0
        return again

    def logprobs(self, start: int = 0) -> list[TokenLogprob]:
        """Tokens from number ``start`` on, with their log-probabilities."""
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
        # A token without text of its own (half a character) at the border belongs to what follows it.
        while kept and self._stream.text_ends[kept - 1] == place and self._is_silent(kept - 1):
            kept -= 1
        del self._ids[kept:], self._logprobs[kept:], self._versions[kept:]
        self._stream.cut(kept)

    def _is_silent(self, at: int) -> bool:
        ends = self._stream.raw_ends
        return ends[at] == (ends[at - 1] if at else 0)
