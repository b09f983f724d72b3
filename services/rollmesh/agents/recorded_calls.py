"""Calls in a session: every token is recorded as sampled, and trained on after the agent posts its reward."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from rollmesh.agents.agent_session import UNWANTED, AgentSession, SessionTrajectory
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.answer_stream import AnswerInProgress, AnswerStream, AnswerTurn, Delta, policy_segments
from rollmesh.agents.context_match import (
    Differs,
    Fits,
    Match,
    Repeats,
    digest_of,
    mark_turn,
    match_first,
    match_next,
    tail_of,
)
from rollmesh.agents.openai_errors import (
    OpenAiError,
    busy,
    context_full,
    gone,
    invalid,
    not_known_yet,
    too_many,
    unavailable,
)
from rollmesh.agents.parsed_request import ParsedRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import aside
from rollmesh.store.queue_types import Fork
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, ForkStatus, Int32Array, Segment, SegmentSource
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.build import WorkerSettings
from rollmesh.worker.program import RolloutContext
from rollmesh.worker.worker import Worker

_PARKED_SECONDS = 120.0
"""Limit of each wait of a call: for its trajectory's next lease, and for the end of a pause to open another one."""
_FORK_SECONDS = 5.0
"""Seconds that a drifted context waits for room for another trajectory."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class _SessionCall:
    """A call of a session, and the leased trajectory that it continues."""

    session: AgentSession
    trajectory: SessionTrajectory
    rollout: RolloutContext
    request: ParsedRequest
    was_refused: bool
    """True for the repeat of a call that came while an equal one was in progress: both clients keep their answers."""


class RecordedCalls:
    """Handler of calls that continue the trajectories of sessions."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        session_manager: SessionManager,
        worker: Worker,
        metrics: OpenAiMetrics,
        settings: WorkerSettings,
    ) -> None:
        self._tokenizer = tokenizer
        self._session_manager = session_manager
        self._worker = worker
        self._metrics = metrics
        self._budget = settings.budget
        self._save_slack = settings.calls.saving.chunk_token_count
        """Unsaved tokens that a possible stop string may delay."""
        self._log = get_logger("agents")

    async def start(self, session: AgentSession, request: ParsedRequest, *, is_retry: bool) -> AnswerInProgress:
        """Take the session's trajectory for a call; OpenAiError if that is not possible.

        The session stays locked until the answer is closed.
        """
        session.check()
        context, was_refused = digest_of(request.context.text), False
        if session.lock.locked():
            session.refused_calls[context] += not is_retry
            raise busy(f"session {session.session_id}: another of its calls is in progress", "session_busy")
        if session.refused_calls[context] and is_retry:
            # The retry of a call that was refused: the recorded answer to the same context is another call's.
            session.refused_calls[context] -= 1
            is_retry, was_refused = False, True
        elif not is_retry:
            session.refused_calls.clear()
        await session.lock.acquire()
        try:
            return await self._start(await self._take(session, session.newest, request, was_refused), is_retry)
        except BaseException as error:
            self._release(session)
            if isinstance(error, LetGo):  # another replica may have the session: the next call is told
                raise not_known_yet(session.session_id) from error
            if isinstance(error, Parked):
                raise unavailable("the run has just been paused; send the same call again", "session_parked") from error
            raise

    async def _start(self, call: _SessionCall, is_retry: bool) -> AnswerInProgress:
        request, trajectory, active = call.request, call.trajectory, call.rollout.active
        match = await aside(partial(self._match, call), len(request.context.text))
        if isinstance(match, Differs) and trajectory.turn_mark is None and active.token_count:
            await call.rollout.restart(active)  # a crashed process left a first context without an answer
            match = await aside(partial(self._match, call), len(request.context.text))
        is_repeat = isinstance(match, Repeats)
        if is_repeat and not trajectory.finish_reason:
            assert trajectory.turn_mark is not None
            at = trajectory.turn_mark.at
            return self._answer(call, self._read(active, at, request.stops), at)  # its call was cut off
        if is_repeat and is_retry:
            return self._replay(call)
        if isinstance(match, Differs) and trajectory.turn_mark is None:
            raise self._wrong_prompt(call, match.why)
        if isinstance(match, Fits):
            return await self._next_turn(call, match)
        why = match.why if isinstance(match, Differs) else "the call repeats an answered context"
        return await self._drifted(call, why, is_repeat=is_repeat)

    async def _take(
        self, session: AgentSession, trajectory: SessionTrajectory, request: ParsedRequest, was_refused: bool = False
    ) -> _SessionCall:
        rollout = await trajectory.wait_ready(time.monotonic() + _PARKED_SECONDS)
        trajectory.busy = True
        return _SessionCall(
            session=session, trajectory=trajectory, rollout=rollout, request=request, was_refused=was_refused
        )

    def _release(self, session: AgentSession) -> None:
        for trajectory in session.trajectories:
            trajectory.busy = False
            trajectory.stream = None
        session.touch()
        if session.lock.locked():
            session.lock.release()

    # -- comparison of the context with the recorded trajectory --------------------------------------------------------
    def _match(self, call: _SessionCall) -> Match:
        active, request, mark = call.rollout.active, call.request, call.trajectory.turn_mark
        if mark is None:
            # Tokens before the first mark are the context of a call whose process crashed: the same context continues
            # there.
            return self._match_first(active.context_ids(), request)
        tail = tail_of(active.segments, mark.at)

        def written() -> Iterable[str]:
            if request.written is not None:
                newest = call.trajectory.turn
                is_whole = newest is not None and newest.token_count == len(tail.sampled)  # no tokens after a stop text
                said = newest.said if newest is not None and is_whole else None
                return request.written(_context_ids(active, mark.at), tail.sampled, said)
            turn = self._read(active, mark.at)
            turn.finish()
            return (turn.raw,)

        def next_ids(rest: str) -> Int32Array | None:
            return request.next_ids(rest, _context_ids(active, mark.at), tail.sampled)

        return match_next(request.context, mark, tail, active.context_ids(), written, next_ids)

    def _match_first(self, prompt_ids: Int32Array, request: ParsedRequest) -> Fits | Differs:
        match = match_first(prompt_ids, request.context, lambda _: request.whole_ids())
        if isinstance(match, Differs) and request.other_ids is not None:
            other = request.other_ids
            second = match_first(prompt_ids, request.context, lambda _: other())
            return second if isinstance(second, Fits) else match
        return match

    def _read(self, active: ActiveTrajectory, at: int, stops: Sequence[str] = ()) -> AnswerTurn:
        """Rebuild the newest answer from its recorded tokens."""
        turn = AnswerTurn(self._tokenizer, _context_ids(active, at), stops)
        for segment in policy_segments(active.segments, at):
            turn.feed(segment)
        return turn

    def _wrong_prompt(self, call: _SessionCall, why: str) -> OpenAiError:
        if len(call.session.prompt.token_ids) > 1:
            wanted = "with its prompt exactly as POST /v1/sessions returned it (messages, prompt or prompt_token_ids)"
            remedy = "put text common to all agents into the data set's prompts, or set rollout.agent.contexts=free"
        else:
            wanted = "with the first token of its prompt (prompt_token_ids of POST /v1/sessions)"
            remedy = "every prompt of the data set and every context begins with the same token, as of a chat template"
        return invalid(
            f"the first call of a session must begin {wanted}, but {why}; {remedy}",
            call.request.field,
            "prompt_mismatch",
        )

    # -- drift -----------------------------------------------------------------------------------------------------
    async def _drifted(self, call: _SessionCall, why: str, *, is_repeat: bool) -> AnswerInProgress:
        """Open another trajectory for a context that differs from the record; without room, restart this trajectory.

        ``is_repeat``: the agent repeats an answered context and discards the answer. If it was the first answer, no
        token of its trajectory led to the reward: the trajectory is released.
        """
        session, trajectory, rollout, request = call.session, call.trajectory, call.rollout, call.request
        match = await asyncio.to_thread(self._match_first, session.prompt.token_ids, request)
        if isinstance(match, Differs):
            raise self._wrong_prompt(call, match.why)
        self._check_room(self._budget, match.new_ids, request.field)
        mark = trajectory.turn_mark
        discards = is_repeat and not call.was_refused
        unwanted = discards and mark is not None and not _has_answers(rollout.active.segments, mark.at)
        fork = await self._fork(session, rollout)
        if fork.leased is None and is_repeat:
            return self._replay(call)  # fixed noise: sampling again gives the same answer
        session.drift_count += 1
        outcome = "restarted" if fork.leased is None else "forked"
        self._metrics.drift.labels(outcome=outcome).inc()
        self._log.info("agent_context_drifted", session=session.session_id, outcome=outcome, why=why)
        if fork.leased is None:
            await rollout.restart(rollout.active)
            trajectory.drop_turns(drift_count=session.drift_count)
            return await self._next_turn(call, match)
        newest = self._session_manager.add_trajectory(session, fork.leased.trajectory.trajectory_id)
        trajectory.busy = False
        if unwanted and session.kind == "training":  # an evaluation waits for its first trajectory
            trajectory.give_up(UNWANTED)
        return await self._next_turn(await self._take(session, newest, request), match)

    async def open_sub_agent(self, parent: AgentSession) -> AgentSession:
        """Open a session that shares the reward of another one; OpenAiError without room for its trajectory."""
        async with parent.lock:
            parent.check()
            try:
                rollout = await parent.newest.wait_ready(time.monotonic() + _PARKED_SECONDS)
                fork = await self._fork(parent, rollout)
                if fork.leased is None:
                    limit = "pool" if fork.status is ForkStatus.POOL_FULL else "group (curriculum.most_members)"
                    raise too_many(f"parent: the {limit} has no room for another trajectory", "no_room")
                session = self._session_manager.add_sub_agent(parent, fork.leased.trajectory.trajectory_id)
                try:
                    await session.newest.save_mark(await session.newest.wait_ready(time.monotonic() + _PARKED_SECONDS))
                except BaseException:
                    self._session_manager.end(session, "given_up")  # nobody has heard of it
                    raise
                return session
            except LetGo as error:
                raise gone(f"the session has ended: {error}", "session_ended") from error

    async def _fork(self, session: AgentSession, rollout: RolloutContext) -> Fork:
        """Open another trajectory; without room, the result has none.

        Raises OpenAiError if a pause outlasts the wait, or if the session ends meanwhile: what was opened for it is
        then the next waiting agent's.
        """
        session.check()
        if rollout.pinned_version is not None:
            return self._session_manager.fork_evaluation(session, rollout)
        nonce, since = secrets.token_hex(8), dict[ForkStatus, float]()
        limits = {ForkStatus.POOL_FULL: _FORK_SECONDS, ForkStatus.PAUSED: _PARKED_SECONDS}
        while True:
            fork = await self._worker.fork(rollout.active, nonce)
            if fork.status is ForkStatus.PAUSED:
                since.pop(ForkStatus.POOL_FULL, None)  # a pause hides the room that becomes free
            first = since.setdefault(fork.status, time.monotonic())
            if time.monotonic() - first >= limits.get(fork.status, 0.0):
                break
            await asyncio.sleep(_POLL_SECONDS)
        if fork.status is ForkStatus.LOST:
            raise LetGo("this process no longer has the lease of the trajectory")
        if fork.status is ForkStatus.PAUSED:
            # A pause ends, and so does the recovery of Redis: they must not cost the tokens of the trajectory.
            raise unavailable(
                "the run is paused or recovers from a crash of the queue's server, and no other trajectory can open, "
                "which a context that differs from the record and a sub-agent need; send the same call again",
                "session_parked",
            )
        session.check()
        return fork

    # -- answers ---------------------------------------------------------------------------------------------------
    async def _next_turn(self, call: _SessionCall, match: Fits) -> AnswerInProgress:
        trajectory, rollout, request = call.trajectory, call.rollout, call.request
        active = rollout.active
        self._check_room(rollout.remaining_tokens, match.new_ids, request.field)
        if len(match.new_ids):
            version = max(active.newest_version, active.trajectory.birth_version)
            added = Segment(
                token_ids=match.new_ids,
                behavior_logprobs=None,
                policy_version=version,
                kv_min_version=version,
                source=SegmentSource.ENVIRONMENT,
                temperature=rollout.params.temperature,
            )
            active.add(added)
        mark = mark_turn(request.context, active.token_count)
        is_first = trajectory.turn_mark is None
        trajectory.begin_turn(mark)
        if is_first:  # nothing else stores whose trajectory it is; later turns are saved with their first tokens
            await trajectory.save(rollout)
        turn = AnswerTurn(self._tokenizer, active.context_ids(), request.stops)
        return self._answer(call, turn, mark.at)

    def _replay(self, call: _SessionCall) -> AnswerInProgress:
        """Send a complete answer again, to a client that did not receive it."""
        trajectory = call.trajectory
        mark = trajectory.turn_mark
        assert trajectory.turn is not None and mark is not None
        stream = AnswerStream(trajectory.turn.unsent_copy(), mark.at, texts=call.request.texts)
        finish_reason = trajectory.finish_reason

        async def deltas() -> AsyncGenerator[Delta, None]:
            yield stream.replay(finish_reason)

        return self._make_answer(call, stream, deltas(), mark.at)

    def _answer(self, call: _SessionCall, turn: AnswerTurn, at: int) -> AnswerInProgress:
        trajectory, limit = call.trajectory, call.request.token_limit
        stream = trajectory.stream = AnswerStream(turn, at, texts=call.request.texts)
        end = self._budget if limit is None else min(self._budget, at + limit)

        async def deltas() -> AsyncGenerator[Delta, None]:
            async with aclosing(stream.run(lambda: self._sample(trajectory, turn, at, end))) as news:
                async for delta in news:
                    if delta.finish_reason is not None:
                        trajectory.turn, trajectory.finish_reason = turn, delta.finish_reason
                    yield delta

        return self._make_answer(call, stream, deltas(), at)

    def _make_answer(
        self, call: _SessionCall, stream: AnswerStream, deltas: AsyncGenerator[Delta, None], at: int
    ) -> AnswerInProgress:
        return AnswerInProgress(
            context_ids=_context_ids(call.rollout.active, at),
            turn=stream.turn,
            deltas=deltas,
            trajectory_id=call.trajectory.trajectory_id,
            on_close=lambda: self._release(call.session),
        )

    async def _sample(self, trajectory: SessionTrajectory, turn: AnswerTurn, at: int, end: int) -> FinishReason:
        """Sample up to ``end`` response tokens, across pauses; all tokens are saved on return."""
        while True:
            rollout = await trajectory.wait_ready(time.monotonic() + _PARKED_SECONDS)
            trajectory.busy = True
            active = rollout.active
            if active.token_count < at + turn.token_count:
                raise unavailable(
                    "part of the answer was lost in a crash of the queue's server; send the same call again",
                    "tokens_lost",
                )
            if turn.stopped or active.token_count >= end:
                return FinishReason.STOP if turn.stopped else FinishReason.LENGTH
            try:
                reason = await self._sample_active(trajectory, rollout, turn, at, end)
                await trajectory.save(rollout)
                return reason
            except Parked:
                trajectory.busy = False
                trajectory.notify()
            except LetGo as error:
                raise not_known_yet(trajectory.mark.session_id) from error

    async def _sample_active(
        self, trajectory: SessionTrajectory, rollout: RolloutContext, turn: AnswerTurn, at: int, end: int
    ) -> FinishReason:
        active = rollout.active

        async def save(active: ActiveTrajectory) -> None:
            # Saved tokens cannot be removed. Tokens that may write a stop string are therefore saved late, within the
            # limit on unsaved tokens.
            unsaved = active.token_count - max(active.saved_token_count, at)
            if turn.token_count and (not turn.undecided or unsaved > self._save_slack):
                await trajectory.save(rollout)

        last = active.segments[-1] if active.segments else None
        if turn.token_count and last is not None and int(last.token_ids[-1]) in rollout.params.stop_token_ids:
            return FinishReason.STOP  # the call was cut off after the last token
        return await rollout.caller.sample(
            active,
            end - active.token_count,
            rollout.params,
            save=save if rollout.pinned_version is None else None,
            pinned_version=rollout.pinned_version,
        )

    def _check_room(self, left: int, new_ids: Int32Array, field: str) -> None:
        if len(new_ids) >= left:
            raise context_full(
                f"rollout.max_new_tokens={self._budget} tokens in a session, answers included; {left} are left, and "
                f"this one adds {len(new_ids)}; post the reward, or give up the session",
                field,
            )


def _context_ids(active: ActiveTrajectory, at: int) -> Int32Array:
    """Return the context of the turn after ``at`` response tokens."""
    return active.context_ids()[: active.prompt_token_count + at]


def _has_answers(segments: Sequence[Segment], count: int) -> bool:
    """Tell whether the policy wrote any of the first ``count`` response tokens."""
    starts = accumulate(map(len, segments), initial=0)
    return any(at < count and s.source is SegmentSource.POLICY for at, s in zip(starts, segments, strict=False))
