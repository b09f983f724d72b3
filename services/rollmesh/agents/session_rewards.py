"""Rewards of agents' sessions: posted once a session, and recorded once for each of its trajectories."""

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

from rollmesh.agents.agent_session import AgentSession, EndedSession, SessionTrajectory, session_ended
from rollmesh.agents.openai_errors import OpenAiError, busy, gone, invalid
from rollmesh.agents.openai_requests import RewardRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.segments import keep_tokens, sampled_count
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome, TurnReturn
from rollmesh.worker.agent_mark import AgentMark, root_of

_LEASE_WAIT_SECONDS = 60.0
"""Seconds that a reward waits for trajectories without a lease."""
_SCORE_SECONDS = 120.0
"""Seconds that a reward waits until the queue has recorded the score."""


class Rewards:
    """Recorder of posted rewards; a recorded reward ends the session."""

    def __init__(self, session_manager: SessionManager, budget: int, credit: str) -> None:
        """``budget``: tokens of a response; a response that used them all ends as ``length``."""
        self._session_manager = session_manager
        self._budget = budget
        self._credit = credit

    async def post(self, session: AgentSession, request: RewardRequest) -> None:
        """Record the reward; repeating the same reward changes nothing, and a different one raises OpenAiError."""
        session.check()
        if not session.is_root:
            root = root_of(session.session_id)
            raise invalid(
                f"reward: session {session.session_id} shares the reward of {root}; post it there",
                "reward",
                "shared_reward",
            )
        team = list(session.team)
        for member in team:
            if member.lock.locked():
                raise busy(
                    f"session {member.session_id}: one of its calls is in progress; post the reward after its answer",
                    "session_busy",
                )
        async with AsyncExitStack() as stack:
            for member in team:
                await stack.enter_async_context(member.lock)
                stack.callback(member.touch)
            await self._post(session, team, request)

    async def _post(self, session: AgentSession, team: Sequence[AgentSession], request: RewardRequest) -> None:
        # The reward is posted again to the parent after a crash: its newest trajectory is the last to get it.
        ordered = sorted(team, key=lambda member: member.is_root)
        every = [trajectory for member in ordered for trajectory in member.trajectories]
        marks = [trajectory.mark for trajectory in every]
        _check_same(session.session_id, marks, request)
        trajectories = [trajectory for trajectory in every if _sampled(trajectory) or trajectory.mark.ended]
        if not any(trajectory in session.trajectories for trajectory in trajectories):
            raise invalid(
                "reward: no answer has been sampled in this session yet; send a call with its id first, or give up "
                "the session: DELETE /v1/sessions/ID",
                None,
                "nothing_sampled",
            )
        if request.verify and len(trajectories) > 1:
            raise invalid(
                f"verify: the session has {len(trajectories)} trajectories, by drift or sub-agents, and the verifier "
                "scores one; post a value",
                "verify",
            )
        returns = request.returns(session.newest.mark.turn_count)
        self._check_turns(session, request)
        last = trajectories[-1]
        if len(trajectories) > 1 and not last.mark.ended:
            # A crash may come when the others are scored: the last one, which has no reward yet, tells the first value.
            rollout = await last.wait_ready(time.monotonic() + _LEASE_WAIT_SECONDS)
            await last.save_mark(rollout, promised=self._outcome_of(session, last, request, returns))
        for trajectory in trajectories:
            if not trajectory.mark.ended:
                rollout = await trajectory.wait_ready(time.monotonic() + _LEASE_WAIT_SECONDS)
                await trajectory.save_mark(
                    rollout,
                    outcome=self._outcome_of(session, trajectory, request, returns),
                    ask_verifier=request.verify,
                    finish_reason=self._reason(trajectory),
                )
        for trajectory in trajectories:
            trajectory.notify()
        recorded = [await trajectory.wait_recorded(time.monotonic() + _SCORE_SECONDS) for trajectory in trajectories]
        self._session_manager.end(session, "rewarded" if any(recorded) else "lost", request.value)
        if not any(recorded):
            raise gone("the queue has dropped the session's group before the reward arrived", "session_ended")

    def _outcome_of(
        self, session: AgentSession, trajectory: SessionTrajectory, request: RewardRequest, returns: Sequence[float]
    ) -> RewardOutcome | None:
        outcome = _outcome(request)
        if outcome is not None and self._credit == "shared":
            outcome = replace(outcome, shared_by=session.session_id)
        if outcome is not None and self._credit == "turn" and request.value is not None:
            outcome = replace(outcome, turns=_turn_returns(trajectory, returns))
        return outcome

    def _check_turns(self, session: AgentSession, request: RewardRequest) -> None:
        if request.turns is None:
            return
        if self._credit != "turn":
            raise invalid(
                f"turns: this run has no rewards by turn (trainer.algorithm.credit={self._credit}); post a reward",
                "turns",
                "no_rewards_by_turn",
            )
        if len(request.turns) != (count := session.newest.mark.turn_count):
            raise invalid(
                f"turns: {len(request.turns)} rewards, but the session recorded {count} answers (turn_count); post one "
                "for each, in order",
                "turns",
                "wrong_turn_count",
            )

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
    if any(mark.is_posted and _differs(mark, request) for mark in marks):
        raise OpenAiError(
            422,
            f"session {session_id} already has a different reward; a recorded reward cannot be changed",
            param="reward",
            code="already_rewarded",
        )


def _differs(mark: AgentMark, request: RewardRequest) -> bool:
    first, posted = mark.outcome or mark.promised, _outcome(request)
    if first is None or posted is None:
        return first is not posted
    returns = request.returns(mark.turn_count)[mark.first_turn : mark.turn_count]
    return (first.kind, first.value) != (posted.kind, posted.value) or (
        bool(first.turns) and [turn.value for turn in first.turns] != returns
    )


def _sampled(trajectory: SessionTrajectory) -> bool:
    return trajectory.active is not None and sampled_count(trajectory.active.segments) > 0


def _outcome(request: RewardRequest) -> RewardOutcome | None:
    if request.verify:
        return None
    if request.error is not None:
        return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=f"agent: {request.error}")
    assert request.value is not None
    return RewardOutcome(kind=OutcomeKind.SCORED, value=request.value, parts={"agent": request.value, **request.parts})


def _turn_returns(trajectory: SessionTrajectory, returns: Sequence[float]) -> tuple[TurnReturn, ...]:
    """Return the returns of a trajectory's own turns; ``returns`` are those of the session."""
    assert trajectory.active is not None
    mark, segments = trajectory.mark, trajectory.active.segments
    ends = (*mark.turn_starts[1:], trajectory.active.token_count)
    own = returns[mark.first_turn : mark.turn_count]
    return tuple(
        TurnReturn(end=sampled_count(keep_tokens(segments, end)[0]), value=value)
        for end, value in zip(ends, own, strict=True)
    )
