"""The agent's last word: a reward for every trajectory of its session, recorded once."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmesh.agents.agent_session import AgentSession, EndedSession, session_ended
from rollmesh.agents.openai_errors import OpenAiError, busy, gone, invalid
from rollmesh.agents.request_schema import RewardRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.agents.session_trajectory import SessionTrajectory
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, SegmentSource
from rollmesh.worker.agent_mark import AgentMark

_HOLD_SECONDS = 60.0
"""How long a reward waits for trajectories that are not held right now."""
_SCORE_SECONDS = 120.0
"""How long it waits for the queue to have the score."""


class Rewards:
    """Ends sessions."""

    def __init__(self, desk: SessionManager, budget: int) -> None:
        """``budget``: tokens of a response; one that used them up ends as ``length``."""
        self._desk = desk
        self._budget = budget

    async def post(self, session: AgentSession, request: RewardRequest) -> None:
        """Record the reward; the same one again changes nothing, another one is an error."""
        session.check()
        if session.lock.locked():
            raise busy(f"session {session.session_id}: a call of it is under way", "session_busy")
        async with session.lock:
            session.touch()
            await self._post(session, request)

    async def _post(self, session: AgentSession, request: RewardRequest) -> None:
        marks = [part.mark for part in session.parts]
        if any(mark.ended for mark in marks):
            _check_same(session.session_id, marks, request)
        parts = [part for part in session.parts if _sampled(part) or part.mark.ended]
        if not parts:
            raise invalid(
                "reward: nothing was sampled in this session yet, so there is nothing to reward; make a call with "
                "its id first, or give the session up: DELETE /v1/sessions/ID",
                None,
                "nothing_sampled",
            )
        if request.verify and len(parts) > 1:
            raise invalid(
                f"verify: the session's context has drifted into {len(parts)} trajectories, and the verifier looks at "
                "one; post a value",
                "verify",
            )
        outcome = _outcome(request)
        for part in parts:
            if not part.mark.ended:
                rollout = await part.ready(time.monotonic() + _HOLD_SECONDS)
                await part.keep(rollout, outcome=outcome, ask_verifier=request.verify, finish_reason=self._reason(part))
            part.wake()
        recorded = [await part.ended(time.monotonic() + _SCORE_SECONDS) for part in parts]
        self._desk.end(session, "rewarded" if any(recorded) else "lost", request.reward)
        if not any(recorded):
            raise gone("the queue has dropped the session's group: the reward came too late", "session_ended")

    def _reason(self, part: SessionTrajectory) -> str:
        assert part.held is not None
        full = part.finish_reason == "length" and part.held.token_count >= self._budget
        return (FinishReason.LENGTH if full else FinishReason.ENVIRONMENT).value


def check_repeated(session: EndedSession, request: RewardRequest) -> None:
    """Accept the reward of an ended session again; OpenAiError for another one, or when it ended without a reward."""
    if session.ended != "rewarded":
        raise session_ended(session.session_id, session.ended)
    _check_same(session.session_id, session.marks, request)


def _check_same(session_id: str, marks: Sequence[AgentMark], request: RewardRequest) -> None:
    """A client that did not get the answer posts again; a recorded reward never changes."""
    mark = next(mark for mark in reversed(marks) if mark.ended)
    outcome = _outcome(request)
    same = mark.ask_verifier == request.verify and (
        mark.outcome is outcome
        or (
            mark.outcome is not None
            and outcome is not None
            and (mark.outcome.kind, mark.outcome.value) == (outcome.kind, outcome.value)
        )
    )
    if not same:
        raise OpenAiError(
            422,
            f"session {session_id} has its reward already, and it is another one",
            param="reward",
            code="already_rewarded",
        )


def _sampled(part: SessionTrajectory) -> bool:
    return part.held is not None and any(s.source is SegmentSource.POLICY for s in part.held.segments)


def _outcome(request: RewardRequest) -> RewardOutcome | None:
    if request.verify:
        return None
    if request.error is not None:
        return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=f"agent: {request.error}")
    assert request.reward is not None
    return RewardOutcome(
        kind=OutcomeKind.SCORED, value=request.reward, parts={"agent": request.reward, **request.parts}
    )
