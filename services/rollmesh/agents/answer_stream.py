"""An answer while it is sampled: tokens arrive in an active trajectory, and text leaves once it is final.

Two texts grow in parallel. ``raw`` includes special tokens: a chat template has to write exactly this text to produce
the same tokens. ``text`` leaves special tokens out.
"""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rollmesh.agents.chat_format import AnswerMessage
from rollmesh.agents.openai_errors import unavailable
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.segments import slice_segment
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, Segment
from rollmesh.worker.active_trajectory import ActiveTrajectory

_TOKEN_TIMEOUT_SECONDS = 300.0
"""Longest time without a token."""
_CONTEXT_TOKENS = 6
"""Context tokens decoded together with the answer: some tokenizers drop the space before a first word."""
_MOST_WINDOW_TOKENS = 16
"""Tokens of the window at which most decoded ones leave it."""
_BROKEN = "\ufffd"
_LONGEST_CHARACTER_TOKENS = 8
"""Limit of tokens without a whole character; after it, the bytes are decoded as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New part of an answer; the last one carries the finish reason."""

    text: str
    logprobs: "Sequence[TokenLogprob]" = ()
    """Tokens since the last delta."""
    token_ids: Sequence[int] = ()
    """Ids of these tokens."""
    finish_reason: str | None = None
    """stop or length."""
    cached_token_count: int = 0
    """Context tokens of the answer that came from a prefix cache."""


@dataclass(slots=True, kw_only=True)
class AnswerInProgress:
    """An answer in progress; the caller closes it."""

    context_ids: Int32Array
    turn: "AnswerTurn"
    deltas: AsyncGenerator[Delta, None]
    trajectory_id: str = ""
    """Trajectory that records the answer."""
    on_close: Callable[[], None] = field(default=lambda: None)
    _closed: bool = False

    async def aclose(self) -> None:
        """End the answer, complete or not; safe to call twice."""
        if not self._closed:
            self._closed = True
            try:
                await self.deltas.aclose()
            finally:
                self.on_close()


class AnswerStream:
    """Stream of deltas, fed from an active trajectory while a sampling call runs."""

    def __init__(self, turn: "AnswerTurn", start: int, *, texts: bool = True) -> None:
        """``start``: response tokens of the trajectory before the turn; ``texts``: as in ``ParsedRequest``."""
        self.turn = turn
        self._start = start
        self._texts = texts
        self._seen = start + turn.token_count
        self._changed = asyncio.Event()
        self._sent_tokens = 0

    def update(self, active: ActiveTrajectory) -> None:
        """Read the tokens that arrived; end the generation call once the answer has ended."""
        if active.token_count > self._seen:
            if not self.turn.token_count:
                self.turn.cached_token_count = active.cached_token_count
            for segment in policy_segments(active.segments, self._seen):
                self.turn.feed(segment)
            self._seen = active.token_count
        if self.turn.stopped and not active.stop_requested:
            active.request_stop(self._start + self.turn.token_count)
            self._seen = active.token_count
        self._changed.set()

    async def run(self, sampling: Callable[[], Coroutine[Any, Any, FinishReason]]) -> AsyncGenerator[Delta, None]:
        """Yield deltas while ``sampling()`` appends tokens; closing the generator cancels the call."""
        task = asyncio.ensure_future(sampling())
        task.add_done_callback(lambda _: self._changed.set())
        try:
            while not task.done():
                await self._wait()
                text = self.turn.new_text() if self._texts else ""
                if text or (not self._texts and self.turn.token_count > self._sent_tokens):
                    yield self._delta(text, None)
            reason = task.result()
            self.turn.finish()
            stopped = self.turn.stopped or reason is FinishReason.STOP
            yield self._last("stop" if stopped else "length")
        finally:
            if not task.done():
                await cancel_and_wait(task)

    def replay(self, finish_reason: str) -> Delta:
        """Return a complete answer as one delta."""
        self.turn.finish()
        return self._last(finish_reason)

    def _last(self, finish_reason: str) -> Delta:
        return self._delta(self.turn.new_text(final=True) if self._texts else "", finish_reason)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT_SECONDS):
                await self._changed.wait()
        except TimeoutError as error:
            message = f"no token for {_TOKEN_TIMEOUT_SECONDS:g} s: the generators are busy, or none can serve the call"
            raise unavailable(message, "no_progress", 10.0) from error
        self._changed.clear()

    def _delta(self, text: str, finish_reason: str | None) -> Delta:
        # Tokens whose text may still become a stop string are sent with the last delta, if they belong to the answer.
        count = self.turn.token_count if finish_reason or not self.turn.undecided else self._sent_tokens
        tokens = self.turn.logprobs(self._sent_tokens, count, texts=self._texts)
        self._sent_tokens = max(self._sent_tokens, count)
        return Delta(
            text=text,
            logprobs=tokens,
            token_ids=[t.token_id for t in tokens],
            finish_reason=finish_reason,
            cached_token_count=self.turn.cached_token_count,
        )


def policy_segments(segments: Sequence[Segment], start: int) -> list[Segment]:
    """Return the policy's segments after the first ``start`` response tokens."""
    found: list[Segment] = []
    at = 0
    for segment in segments:
        if at + len(segment) > start and segment.behavior_logprobs is not None:
            found.append(slice_segment(segment, max(0, start - at)))
        at += len(segment)
    return found


class TokenLogprob(NamedTuple):
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
        self._decoder = TextStream(tokenizer, context_ids)
        self._finished = False
        self._stops = tuple(stops)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._sent = 0
        self._scanned = 0
        self._answer: str | None = None
        self.cached_token_count = 0
        """Context tokens that its first generation call found in a prefix cache."""
        self.said: AnswerMessage | None = None
        """Message of the complete answer, once it is read."""

    @property
    def stopped(self) -> bool:
        """True once a stop string was found; later tokens are ignored."""
        return self._answer is not None

    @property
    def token_count(self) -> int:
        return len(self._ids)

    @property
    def token_ids(self) -> Int32Array:
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
        return bool(self._stops) and not self.stopped and held_back(self._stream.text, self._stops) > 0

    @property
    def _stream(self) -> "TextStream":
        """Text of all tokens; they are decoded when it is needed."""
        for token_id in self._ids[len(self._decoder.raw_ends) :]:
            self._decoder.push(token_id)
        if self._finished:
            self._decoder.flush()
        return self._decoder

    def feed(self, segment: Segment) -> None:
        """Add sampled tokens; those after a stop string are ignored."""
        assert segment.behavior_logprobs is not None
        for token_id, logprob in zip(segment.token_ids.tolist(), segment.behavior_logprobs.tolist(), strict=True):
            if self.stopped:
                return
            self._ids.append(token_id)
            self._logprobs.append(logprob)
            self._versions.append(segment.policy_version)
            self._look_for_stop()

    def finish(self) -> None:
        """Finish the text; no token follows."""
        if not self.stopped:
            self._finished = True
            self._look_for_stop()

    def new_text(self, *, final: bool = False) -> str:
        """Return the text not sent yet, up to a possible stop string (all of it when ``final``)."""
        text = self.text
        end = len(text) if final or self.stopped else len(text) - held_back(text, self._stops)
        sent, self._sent = self._sent, max(self._sent, end)
        return text[sent : self._sent]

    def unsent_copy(self) -> "AnswerTurn":
        """Return a copy of a complete answer with no text marked as sent."""
        again = copy.copy(self)
        again._sent = 0
        return again

    def logprobs(self, start: int = 0, end: int | None = None, *, texts: bool = True) -> list[TokenLogprob]:
        """Return the tokens from index ``start`` to ``end`` with their log-probabilities, and without texts if so."""
        ids, logprobs = self._ids[start:end], self._logprobs[start:end]
        if not texts:
            return [TokenLogprob(token_id, "", logprob) for token_id, logprob in zip(ids, logprobs, strict=True)]
        raw, ends = self._stream.raw, [0, *self._stream.raw_ends]
        return [
            TokenLogprob(token_id, raw[ends[at] : ends[at + 1]], logprob)
            for at, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), start)
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


class TextStream:
    """Decoder of the tokens that follow ``context_ids``."""

    def __init__(self, tokenizer: Tokenizer, context_ids: Int32Array) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = context_ids[-_CONTEXT_TOKENS:].tolist()
        self._read = len(self._window)
        self._read_length = self._length = -1
        """Lengths of the text of the decoded tokens of the window, and of all of it; -1 before they are needed."""
        self.raw = ""
        """Text of all whole characters so far, including special tokens."""
        self.text = ""
        """The same text without special tokens."""
        self.raw_ends: list[int] = []
        """Length of ``raw`` after each token."""
        self.text_ends: list[int] = []
        """Length of ``text`` after each token."""

    def push(self, token_id: int) -> None:
        self._window.append(token_id)
        special = token_id in self._tokenizer.special_tokens
        waiting = len(self._window) - self._read
        piece = self._piece()
        if special or not piece.endswith(_BROKEN) or waiting > _LONGEST_CHARACTER_TOKENS:
            self._emit(piece, token_id if special else None)
        self.raw_ends.append(len(self.raw))
        self.text_ends.append(len(self.text))

    def flush(self) -> None:
        """Decode the remaining incomplete characters, if any; no token follows."""
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
        if self._read_length < 0:
            self._read_length = len(self._tokenizer.decode(self._window[: self._read], special_tokens=True))
        whole = self._tokenizer.decode(self._window, special_tokens=True)
        self._length = len(whole)
        return whole[self._read_length :]

    def _emit(self, piece: str, special_id: int | None) -> None:
        self.raw += piece
        if special_id is None:
            self.text += piece
        else:
            own = self._tokenizer.decode([special_id], special_tokens=True)
            self.text += piece.removesuffix(own)
        self._read_length = self._length
        if len(self._window) > _MOST_WINDOW_TOKENS:
            self._window, self._read_length = self._window[-_CONTEXT_TOKENS:], -1
        self._read = len(self._window)


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
