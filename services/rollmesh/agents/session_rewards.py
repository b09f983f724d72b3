"""Rewards of agents' sessions: posted once a session, and recorded once for each of its trajectories."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollmesh.agents.agent_session import AgentSession, EndedSession, SessionTrajectory, session_ended
from rollmesh.agents.openai_errors import OpenAiError, busy, gone, invalid
from rollmesh.agents.openai_requests import RewardRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, SegmentSource
from rollmesh.worker.agent_mark import AgentMark

_LEASE_WAIT_SECONDS = 60.0
"""Seconds that a reward waits for trajectories without a lease."""
_SCORE_SECONDS = 120.0
"""Seconds that a reward waits until the queue has recorded the score."""


class Rewards:
    """Recorder of posted rewards; a recorded reward ends the session."""

    def __init__(self, session_manager: SessionManager, budget: int) -> None:
        """``budget``: tokens of a response; a response that used them all ends as ``length``."""
        self._session_manager = session_manager
        self._budget = budget

    async def post(self, session: AgentSession, request: RewardRequest) -> None:
        """Record the reward; repeating the same reward changes nothing, and a different one raises OpenAiError."""
        session.check()
        if session.lock.locked():
            raise busy(
                f"session {session.session_id}: one of its calls is in progress; post the reward after its answer",
                "session_busy",
            )
        async with session.lock:
            try:
                await self._post(session, request)
            finally:
                session.touch()

    async def _post(self, session: AgentSession, request: RewardRequest) -> None:
        marks = [trajectory.mark for trajectory in session.trajectories]
        if any(mark.ended for mark in marks):
            _check_same(session.session_id, marks, request)
        trajectories = [
            trajectory for trajectory in session.trajectories if _sampled(trajectory) or trajectory.mark.ended
        ]
        if not trajectories:
            raise invalid(
                "reward: no answer has been sampled in this session yet; send a call with its id first, or give up "
                "the session: DELETE /v1/sessions/ID",
                None,
                "nothing_sampled",
            )
        if request.verify and len(trajectories) > 1:
            raise invalid(
                f"verify: the session's context has drifted into {len(trajectories)} trajectories, and the verifier "
                "scores one; post a value",
                "verify",
            )
        outcome = _outcome(request)
        for trajectory in trajectories:
            if not trajectory.mark.ended:
                rollout = await trajectory.wait_ready(time.monotonic() + _LEASE_WAIT_SECONDS)
                await trajectory.save_mark(
                    rollout, outcome=outcome, ask_verifier=request.verify, finish_reason=self._reason(trajectory)
                )
            trajectory.notify()
        recorded = [await trajectory.wait_recorded(time.monotonic() + _SCORE_SECONDS) for trajectory in trajectories]
        self._session_manager.end(session, "rewarded" if any(recorded) else "lost", request.reward)
        if not any(recorded):
            raise gone("the queue has dropped the session's group before the reward arrived", "session_ended")

    def _reason(self, trajectory: SessionTrajectory) -> str:
        assert trajectory.active is not None
        full = trajectory.finish_reason == "length" and trajectory.active.token_count >= self._budget
        return (FinishReason.LENGTH if full else FinishReason.ENVIRONMENT).value


def check_repeated(session: EndedSession, request: RewardRequest) -> None:
    """Accept a repeated reward of an ended session; OpenAiError if it differs or the session ended without a reward."""
    if session.ended != "rewarded":
        raise session_ended(session.session_id, session.ended)
    _check_same(session.session_id, session.marks, request)


def _check_same(session_id: str, marks: Sequence[AgentMark], request: RewardRequest) -> None:
    """Accept a repeated post after a lost response; reject a different reward."""
    mark = next(mark for mark in reversed(marks) if mark.ended)
    recorded, posted = (None if o is None else (o.kind, o.value) for o in (mark.outcome, _outcome(request)))
    if mark.ask_verifier != request.verify or recorded != posted:
        raise OpenAiError(
            422,
            f"session {session_id} already has a different reward; a recorded reward cannot be changed",
            param="reward",
            code="already_rewarded",
        )


def _sampled(trajectory: SessionTrajectory) -> bool:
    return trajectory.active is not None and any(s.source is SegmentSource.POLICY for s in trajectory.active.segments)


def _outcome(request: RewardRequest) -> RewardOutcome | None:
    if request.verify:
        return None
    if request.error is not None:
        return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=f"agent: {request.error}")
    assert request.reward is not None
    return RewardOutcome(
        kind=OutcomeKind.SCORED, value=request.reward, parts={"agent": request.reward, **request.parts}
    )
