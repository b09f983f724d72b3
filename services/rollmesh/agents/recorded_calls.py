"""Calls in a session: every token is recorded as sampled, and trained on once the agent has posted its reward."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict

from rollmesh.agents.agent_session import AgentSession
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.answer_stream import AnswerStream, Delta, FinishedAnswer, policy_segments
from rollmesh.agents.answer_turn import AnswerTurn
from rollmesh.agents.context_match import Differs, Fits, Match, Repeats, mark_turn, match_first, match_next, tail_of
from rollmesh.agents.openai_errors import OpenAiError, busy, gone, invalid, unavailable
from rollmesh.agents.parsed_request import ParsedRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.agents.session_trajectory import UNWANTED, SessionTrajectory
from rollmesh.runtime.logging import get_logger
from rollmesh.store.queue_types import Fork, ForkStatus
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, Segment, SegmentSource
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.program import RolloutContext
from rollmesh.worker.worker import Worker

_PARKED_SECONDS = 120.0
"""How long a call waits for its trajectory to be leased again."""
_FORK_SECONDS = 5.0
"""How long a drifted context waits for room for another trajectory."""
_LOOK_SECONDS = 0.1


class RecordedCalls:
    """Continues the trajectories of sessions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        desk: SessionManager,
        worker: Worker,
        metrics: OpenAiMetrics,
        *,
        budget: int,
        save_slack: int,
    ) -> None:
        """``budget``: tokens of a response; ``save_slack``: unsaved tokens that a possible stop string may hold up."""
        self._tokenizer = tokenizer
        self._desk = desk
        self._worker = worker
        self._metrics = metrics
        self._budget = budget
        self._save_slack = save_slack
        self._log = get_logger("agents")

    async def start(self, session: AgentSession, ask: ParsedRequest, *, is_retry: bool) -> FinishedAnswer:
        """Take the session's trajectory for a call; OpenAiError when that cannot be.

        The session stays locked until the answer is closed.
        """
        session.check()
        if session.lock.locked():
            raise busy(f"session {session.session_id}: another call of it is under way", "session_busy")
        await session.lock.acquire()
        try:
            session.touch()
            return await self._start(session, ask, is_retry)
        except BaseException as error:
            self._leave(session)
            if isinstance(error, LetGo):
                raise gone(f"the session has ended: {error}", "session_ended") from error
            if isinstance(error, Parked):
                raise unavailable("the run was paused just now; send the same call again", "session_parked") from error
            raise

    async def _start(self, session: AgentSession, ask: ParsedRequest, is_retry: bool) -> FinishedAnswer:
        part = session.newest
        rollout = await self._take(part)
        match = await asyncio.to_thread(self._match, part, rollout.held, ask)
        if isinstance(match, Differs) and part.turn_mark is None and rollout.held.token_count:
            await rollout.restart(rollout.held)  # a first context that was never answered, of a gateway that died
            match = await asyncio.to_thread(self._match, part, rollout.held, ask)
        again = isinstance(match, Repeats)
        if again and not part.finish_reason:
            return self._resume(session, part, rollout, ask)
        if again and is_retry:
            return self._replay(session, part, rollout)
        if isinstance(match, Differs) and part.turn_mark is None:
            raise self._wrong_prompt(match.why, ask.field)
        if isinstance(match, Fits):
            return await self._next_turn(session, part, rollout, ask, match)
        why = match.why if isinstance(match, Differs) else "the same context again, after an answer to it"
        return await self._drifted(session, part, rollout, ask, why, again=again)

    async def _take(self, part: SessionTrajectory) -> RolloutContext:
        rollout = await part.ready(time.monotonic() + _PARKED_SECONDS)
        part.busy = True
        return rollout

    def _leave(self, session: AgentSession) -> None:
        for part in session.parts:
            part.busy = False
            part.flow = None
        session.touch()
        if session.lock.locked():
            session.lock.release()

    # -- what the context is to the record -------------------------------------------------------------------------
    def _match(self, part: SessionTrajectory, held: ActiveTrajectory, ask: ParsedRequest) -> Match:
        mark = part.turn_mark
        if mark is None:
            # Tokens before the first mark are a context whose gateway died: the same one goes on from there.
            return self._match_first(held.context_ids(), ask)
        tail = tail_of(held.segments, mark.at)

        def raw() -> str:
            turn = self._read(held, mark.at)
            turn.finish()
            return turn.raw

        return match_next(ask.context, mark, tail, held.context_ids(), raw, self._tokenizer.encode_aside)

    def _match_first(self, prompt_ids: Int32Array, ask: ParsedRequest) -> Fits | Differs:
        match = match_first(prompt_ids, ask.context, lambda _: ask.whole_ids())
        if isinstance(match, Differs) and ask.other_ids is not None:
            other = ask.other_ids
            second = match_first(prompt_ids, ask.context, lambda _: other())
            return second if isinstance(second, Fits) else match
        return match

    def _read(self, held: ActiveTrajectory, at: int, stops: Sequence[str] = ()) -> AnswerTurn:
        """The newest answer, read from its recorded tokens."""
        turn = AnswerTurn(self._tokenizer, _context_ids(held, at), stops)
        for segment in policy_segments(held.segments, at):
            turn.feed(segment)
        return turn

    def _wrong_prompt(self, why: str, field: str) -> OpenAiError:
        return invalid(
            "the first call of a session must begin with its prompt exactly as POST /v1/sessions told it (messages, "
            f"prompt or prompt_token_ids), but {why}; put what all agents are told into the data set's prompts, or set "
            "rollout.agent.contexts=free",
            field,
            "prompt_mismatch",
        )

    # -- drift -----------------------------------------------------------------------------------------------------
    async def _drifted(
        self,
        session: AgentSession,
        part: SessionTrajectory,
        rollout: RolloutContext,
        ask: ParsedRequest,
        why: str,
        *,
        again: bool,
    ) -> FinishedAnswer:
        """Open another trajectory for a context that the record does not begin; without room, begin this one again.

        ``again``: the context of an answer that the agent does not want. If that was the first one, nothing of its
        trajectory led to the reward: it is given back.
        """
        match = await asyncio.to_thread(self._match_first, session.prompt.token_ids, ask)
        if isinstance(match, Differs):
            raise self._wrong_prompt(match.why, ask.field)
        self._check_room(self._budget, match.new_ids, ask.field)
        mark = part.turn_mark
        unwanted = again and mark is not None and not _has_answers(rollout.held.segments, mark.at)
        fork = await self._fork(rollout)
        if fork.leased is None and again:
            return self._replay(session, part, rollout)  # its noise is its own: the same answer would come again
        session.drift_count += 1
        outcome = "restarted" if fork.leased is None else "forked"
        self._metrics.drift.labels(outcome=outcome).inc()
        self._log.info("agent_context_drifted", session=session.session_id, outcome=outcome, why=why)
        if fork.leased is None:
            await rollout.restart(rollout.held)
            part.forget(drift_count=session.drift_count)
            return await self._next_turn(session, part, rollout, ask, match)
        newest = self._desk.add_part(session, fork.leased.trajectory.trajectory_id)
        part.busy = False
        if unwanted:
            part.give_up(UNWANTED)
        return await self._next_turn(session, newest, await self._take(newest), ask, match)

    async def _fork(self, rollout: RolloutContext) -> Fork:
        nonce, deadline = secrets.token_hex(8), time.monotonic() + _FORK_SECONDS
        while True:
            fork = await self._worker.fork(rollout.held, nonce)
            if fork.status not in (ForkStatus.POOL_FULL, ForkStatus.PAUSED) or time.monotonic() >= deadline:
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if fork.status is ForkStatus.LOST:
            raise LetGo("the queue no longer holds its trajectory for this gateway")
        return fork

    # -- answers ---------------------------------------------------------------------------------------------------
    async def _next_turn(
        self, session: AgentSession, part: SessionTrajectory, rollout: RolloutContext, ask: ParsedRequest, match: Fits
    ) -> FinishedAnswer:
        held = rollout.held
        self._check_room(rollout.left, match.new_ids, ask.field)
        if len(match.new_ids):
            held.add(_heard(match.new_ids, held, rollout.params.temperature))
            await rollout.save(held)
        mark = mark_turn(ask.context, held.token_count)
        part.turn, part.finish_reason = None, ""
        await part.keep(rollout, turn=asdict(mark))
        turn = AnswerTurn(self._tokenizer, held.context_ids(), ask.stops)
        return self._answer(session, part, rollout, ask, turn, mark.at)

    def _resume(
        self, session: AgentSession, part: SessionTrajectory, rollout: RolloutContext, ask: ParsedRequest
    ) -> FinishedAnswer:
        """Go on with an answer whose call was cut off: its tokens count."""
        mark = part.turn_mark
        assert mark is not None
        turn = self._read(rollout.held, mark.at, ask.stops)
        return self._answer(session, part, rollout, ask, turn, mark.at)

    def _replay(self, session: AgentSession, part: SessionTrajectory, rollout: RolloutContext) -> FinishedAnswer:
        """Tell a complete answer again, to a client that did not get it."""
        mark = part.turn_mark
        assert part.turn is not None and mark is not None
        flow = AnswerStream(part.turn.afresh(), mark.at)
        finish_reason = part.finish_reason

        async def deltas() -> AsyncGenerator[Delta, None]:
            yield flow.replay(finish_reason)

        return self._told(session, part, flow, deltas(), _context_ids(rollout.held, mark.at))

    def _answer(
        self,
        session: AgentSession,
        part: SessionTrajectory,
        rollout: RolloutContext,
        ask: ParsedRequest,
        turn: AnswerTurn,
        at: int,
    ) -> FinishedAnswer:
        flow = part.flow = AnswerStream(turn, at)
        end = self._budget if ask.token_limit is None else min(self._budget, at + ask.token_limit)

        async def deltas() -> AsyncGenerator[Delta, None]:
            async with aclosing(flow.run(lambda: self._sample(part, turn, at, end))) as news:
                async for delta in news:
                    if delta.finish_reason is not None:
                        part.turn, part.finish_reason = turn, delta.finish_reason
                    yield delta

        return self._told(session, part, flow, deltas(), _context_ids(rollout.held, at))

    def _told(
        self,
        session: AgentSession,
        part: SessionTrajectory,
        flow: AnswerStream,
        deltas: AsyncGenerator[Delta, None],
        context_ids: Int32Array,
    ) -> FinishedAnswer:
        return FinishedAnswer(
            context_ids=context_ids,
            turn=flow.turn,
            deltas=deltas,
            trajectory_id=part.trajectory_id,
            on_close=lambda: self._leave(session),
        )

    async def _sample(self, part: SessionTrajectory, turn: AnswerTurn, at: int, end: int) -> FinishReason:
        """Sample up to ``end`` response tokens, through pauses; everything is saved when it returns."""
        while True:
            rollout = await part.ready(time.monotonic() + _PARKED_SECONDS)
            part.busy = True
            held = rollout.held
            if held.token_count < at + turn.token_count:
                raise unavailable(
                    "part of the answer was lost with the queue's server; send the same call again", "tokens_lost"
                )
            if turn.stopped or held.token_count >= end:
                return FinishReason.STOP if turn.stopped else FinishReason.LENGTH
            held.enough = False
            try:
                reason = await self._sample_held(rollout, turn, end)
                await rollout.save(held)
                return reason
            except Parked:
                part.busy = False
                part.wake()
            except LetGo as error:
                raise gone(f"the session has ended: {error}", "session_ended") from error

    async def _sample_held(self, rollout: RolloutContext, turn: AnswerTurn, end: int) -> FinishReason:
        held = rollout.held

        async def save(held: ActiveTrajectory) -> None:
            # Saved tokens cannot be taken back: those that may write a stop string wait, as far as the promise allows.
            if not turn.undecided or held.token_count - held.saved_token_count > self._save_slack:
                await rollout.save(held)

        last = held.segments[-1] if held.segments else None
        if turn.token_count and last is not None and int(last.token_ids[-1]) in rollout.params.stop_token_ids:
            return FinishReason.STOP  # its call was cut off after the last token
        return await rollout.caller.sample(held, end - held.token_count, rollout.params, save=save)

    def _check_room(self, left: int, new_ids: Int32Array, field: str) -> None:
        if len(new_ids) >= left:
            raise invalid(
                f"the context adds {len(new_ids)} tokens and the session has {left} left of rollout.max_new_tokens="
                f"{self._budget}, answers included; post the reward, or give the session up",
                field,
                "context_length_exceeded",
            )


def _context_ids(held: ActiveTrajectory, at: int) -> Int32Array:
    """What the turn after ``at`` response tokens was sampled from."""
    return held.context_ids()[: held.prompt_token_count + at]


def _heard(ids: Int32Array, held: ActiveTrajectory, temperature: float) -> Segment:
    version = max(held.newest_version, held.trajectory.birth_version)
    return Segment(
        token_ids=ids,
        behavior_logprobs=None,
        policy_version=version,
        kv_min_version=version,
        source=SegmentSource.ENVIRONMENT,
        temperature=temperature,
    )


def _has_answers(segments: Sequence[Segment], count: int) -> bool:
    """Whether the policy wrote anything in the first ``count`` response tokens."""
    at = 0
    for segment in segments:
        if at >= count:
            return False
        if segment.source is SegmentSource.POLICY:
            return True
        at += len(segment)
    return False
