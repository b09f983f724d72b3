"""An answer in progress: tokens arrive in an active trajectory, and text leaves once it is final."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollmesh.agents.answer_turn import AnswerTurn, TokenLogprob
from rollmesh.agents.openai_errors import unavailable
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.segments import slice_segment
from rollmesh.types import FinishReason, Int32Array, Segment
from rollmesh.worker.active_trajectory import ActiveTrajectory

_TOKEN_TIMEOUT_SECONDS = 300.0
"""Longest time without a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """New part of an answer; the last one carries the finish reason."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    """Tokens since the last delta."""
    token_ids: Sequence[int] = ()
    """Ids of these tokens."""
    finish_reason: str | None = None
    """stop or length."""


@dataclass(slots=True, kw_only=True)
class AnswerInProgress:
    """An answer in progress; the caller closes it."""

    context_ids: Int32Array
    turn: AnswerTurn
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

    def __init__(self, turn: AnswerTurn, start: int) -> None:
        """``start``: response tokens of the trajectory before the turn."""
        self.turn = turn
        self._start = start
        self._seen = start + turn.token_count
        self._changed = asyncio.Event()
        self._sent_tokens = 0

    def update(self, active: ActiveTrajectory) -> None:
        """Read the tokens that arrived; end the generation call once the answer has ended."""
        if active.token_count > self._seen:
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
                if delta := self._delta():
                    yield delta
            yield self._last(task.result())
        finally:
            if not task.done():
                await cancel_and_wait(task)

    def replay(self, finish_reason: str) -> Delta:
        """Return a complete answer as one delta."""
        self.turn.finish()
        return self._make_delta(self.turn.new_text(final=True), finish_reason)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT_SECONDS):
                await self._changed.wait()
        except TimeoutError as error:
            message = f"no token for {_TOKEN_TIMEOUT_SECONDS:g} s: the generators are busy, or none can serve the call"
            raise unavailable(message, "no_progress", 10.0) from error
        self._changed.clear()

    def _delta(self) -> Delta | None:
        text = self.turn.new_text()
        return self._make_delta(text, None) if text else None

    def _last(self, reason: FinishReason) -> Delta:
        self.turn.finish()
        stopped = self.turn.stopped or reason is FinishReason.STOP
        return self._make_delta(self.turn.new_text(final=True), "stop" if stopped else "length")

    def _make_delta(self, text: str, finish_reason: str | None) -> Delta:
        # Tokens whose text may still become a stop string are sent with the last delta, if they belong to the answer.
        count = self.turn.token_count if finish_reason or not self.turn.undecided else self._sent_tokens
        tokens = self.turn.logprobs(self._sent_tokens)[: max(0, count - self._sent_tokens)]
        self._sent_tokens = max(self._sent_tokens, count)
        return Delta(text=text, logprobs=tokens, token_ids=[t.token_id for t in tokens], finish_reason=finish_reason)


def policy_segments(segments: Sequence[Segment], start: int) -> list[Segment]:
    """Return the policy's segments after the first ``start`` response tokens."""
    found: list[Segment] = []
    at = 0
    for segment in segments:
        if at + len(segment) > start and segment.behavior_logprobs is not None:
            found.append(slice_segment(segment, max(0, start - at)))
        at += len(segment)
    return found
