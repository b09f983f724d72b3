"""One answer under way: tokens arrive in a held trajectory, text leaves as it becomes certain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rollmesh.agents.answer_turn import AnswerTurn, TokenLogprob
from rollmesh.agents.openai_errors import unavailable
from rollmesh.types import FinishReason, Int32Array, Segment
from rollmesh.worker.active_trajectory import ActiveTrajectory

_PATIENCE_SECONDS = 300.0
"""Longest time without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """News of one answer; the last one carries the finish reason."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Tokens since the last delta."""
    token_ids: Sequence[int] = ()
    """Their ids."""
    finish_reason: str | None = None
    """stop or length."""


@dataclass(slots=True, kw_only=True)
class FinishedAnswer:
    """One answer under way; whoever asked for it closes it."""

    context_ids: Int32Array
    turn: AnswerTurn
    deltas: AsyncGenerator[Delta, None]
    trajectory_id: str = ""
    """The trajectory that records it."""
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
    """Feeds a turn from a held trajectory and tells its news while a sampling call runs."""

    def __init__(self, turn: AnswerTurn, start: int) -> None:
        """``start``: response tokens of the trajectory before the turn."""
        self.turn = turn
        self._start = start
        self._seen = start + turn.token_count
        self._news = asyncio.Event()
        self._told_tokens = 0

    def look(self, held: ActiveTrajectory) -> None:
        """Read the tokens that arrived; ends the call under way where the answer ends."""
        if held.token_count > self._seen:
            for segment in policy_segments(held.segments, self._seen):
                self.turn.feed(segment)
            self._seen = held.token_count
        if self.turn.stopped and not held.enough:
            held.enough = True
            held.trim(self._start + self.turn.token_count)
            self._seen = held.token_count
        self._news.set()

    async def run(self, sampling: Callable[[], Coroutine[Any, Any, FinishReason]]) -> AsyncGenerator[Delta, None]:
        """Tell the answer while ``sampling()`` appends its tokens; closing the generator cancels it."""
        task = asyncio.ensure_future(sampling())
        task.add_done_callback(lambda _: self._news.set())
        try:
            while not task.done():
                await self._wait()
                if delta := self._delta():
                    yield delta
            yield self._last(task.result())
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def replay(self, finish_reason: str) -> Delta:
        """An answer that is complete already, at once."""
        self.turn.finish()
        return self._news_with(self.turn.news(final=True), finish_reason)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS):
                await self._news.wait()
        except TimeoutError as error:
            message = f"no token for {_PATIENCE_SECONDS:g} s: the generators are busy, or none serves what is needed"
            raise unavailable(message, "no_progress", 10.0) from error
        self._news.clear()

    def _delta(self) -> Delta | None:
        text = self.turn.news()
        return self._news_with(text, None) if text else None

    def _last(self, reason: FinishReason) -> Delta:
        self.turn.finish()
        stopped = self.turn.stopped or reason is FinishReason.STOP
        return self._news_with(self.turn.news(final=True), "stop" if stopped else "length")

    def _news_with(self, text: str, finish_reason: str | None) -> Delta:
        # Tokens whose text may still turn out to be a stop string are told with the last delta, if they count then.
        count = self.turn.token_count if finish_reason or not self.turn.undecided else self._told_tokens
        tokens = self.turn.logprobs(self._told_tokens)[: max(0, count - self._told_tokens)]
        self._told_tokens = max(self._told_tokens, count)
        return Delta(text=text, logprobs=tokens, token_ids=[t.token_id for t in tokens], finish_reason=finish_reason)


def policy_segments(segments: Sequence[Segment], start: int) -> list[Segment]:
    """What the policy wrote after the first ``start`` response tokens."""
    found: list[Segment] = []
    at = 0
    for segment in segments:
        if at + len(segment) > start and segment.behavior_logprobs is not None:
            first = max(0, start - at)
            found.append(
                replace(
                    segment,
                    token_ids=segment.token_ids[first:],
                    behavior_logprobs=segment.behavior_logprobs[first:],
                )
            )
        at += len(segment)
    return found
