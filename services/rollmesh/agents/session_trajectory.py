"""One trajectory of an agent's session: held by the gateway's worker, worked on by the agent's calls.

The worker's task waits in ``hold`` while the agent thinks. A call takes the trajectory (``busy``), appends what the
agent heard, and samples. In a pause the trajectory stays leased, and calls wait. When the worker has to let go of it (a
shutdown, a lost session), it waits for the call to stop first; a call that finds it away waits for it to be leased
again, and goes on where it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rollmesh.agents.answer_stream import AnswerStream
from rollmesh.agents.answer_turn import AnswerTurn
from rollmesh.agents.context_match import TurnMark
from rollmesh.agents.openai_errors import gone, unavailable
from rollmesh.errors import RollmeshError
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import FinishReason
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.agent_mark import AgentMark
from rollmesh.worker.program import RolloutContext, RolloutResult

UNWANTED = "unwanted"
"""Why a part is given up whose only answer the agent asked for again."""


class AgentGone(RollmeshError):
    """The agent gave its session up, or was silent for too long: the prompt waits for another session."""


class SessionTrajectory:
    """One trajectory of a session."""

    def __init__(self, mark: AgentMark, deadline: Callable[[], float]) -> None:
        """``deadline`` says when a silent session is given up, in monotonic seconds."""
        self.mark = mark
        self.rollout: RolloutContext | None = None
        """The trajectory, while the worker holds it."""
        self.held: ActiveTrajectory | None = None
        """The same as it was held last."""
        self.busy = False
        """Whether a call works on it."""
        self.turn: AnswerTurn | None = None
        """The newest answer, once it is complete."""
        self.finish_reason = ""
        """How the newest answer ended: stop or length; empty while it is not complete."""
        self.flow: AnswerStream | None = None
        """The answer under way."""
        self.given_up = ""
        """Why nobody works on it any more."""
        self.lost = ""
        """Why it is no longer the session's."""
        self._deadline = deadline
        self._waiter: asyncio.Future[None] | None = None

    @property
    def trajectory_id(self) -> str:
        """Identity of the trajectory; empty before it was held."""
        return self.held.trajectory_id if self.held is not None else ""

    @property
    def turn_mark(self) -> TurnMark | None:
        """Where the newest turn begins; None before the first."""
        if not self.mark.turn:
            return None
        turn = self.mark.turn
        return TurnMark(characters=int(turn["characters"]), digest=str(turn["digest"]), at=int(turn["at"]))

    @property
    def over(self) -> bool:
        """Whether nothing more will happen to it here."""
        if self.lost:
            return True
        ended = self.mark.ended or bool(self.given_up)
        return ended and self.rollout is None and self.held is not None and self.held.over

    async def keep(self, rollout: RolloutContext, **changes: Any) -> None:
        """Make a change of the mark durable, then real."""
        mark = replace(self.mark, **changes)
        await rollout.keep_snapshot(rollout.held, mark.to_bytes())
        self.mark = mark

    async def hold(self, rollout: RolloutContext) -> RolloutResult:
        """What the worker runs: wait until the agent has had its last word.

        Raises Parked and LetGo as a program does, AgentGone when the agent is silent for too long or gave up.
        """
        held = self.held = rollout.held
        held.changed = lambda: self._look(held)
        self.rollout = rollout
        self.wake()
        try:
            while True:
                if not self.busy:
                    if self.mark.ended:
                        return self._ending()
                    held.check_lost()
                    if held.parking is ReleaseReason.DRAINED:
                        raise Parked(ReleaseReason.DRAINED)
                    if self.given_up or time.monotonic() >= self._deadline():
                        return await self._give_up(rollout)
                await self._wait(self._deadline() if not self.busy else None)
        except LetGo as error:
            self.lose(str(error))
            raise
        finally:
            self.rollout = None
            self.wake()

    async def ready(self, deadline: float) -> RolloutContext:
        """The trajectory, once it is held and may go on; OpenAiError when that takes until ``deadline``."""
        while True:
            self.check()
            if self.rollout is not None and self.rollout.held.wanted:
                return self.rollout
            if time.monotonic() >= deadline:
                raise unavailable(
                    "the session's trajectory is not held right now: the run is paused, or the pool is full; "
                    "send the same call again",
                    "session_parked",
                    2.0,
                )
            await self._wait(deadline)

    async def ended(self, deadline: float) -> bool:
        """Wait until the queue has its outcome; False when it is lost instead. OpenAiError after ``deadline``."""
        while not (self.held is not None and self.held.over and self.rollout is None):
            self.check()
            if time.monotonic() >= deadline:
                raise unavailable("the reward is kept and not scored yet; send it again", "not_scored_yet", 2.0)
            await self._wait(deadline)
        return self.held.recorded

    def check(self) -> None:
        """Raise OpenAiError when the trajectory is no longer the session's."""
        if self.lost:
            raise gone(f"the session has ended: {self.lost}; open another one: POST /v1/sessions", "session_ended")

    def forget(self, drift_count: int) -> None:
        """The trajectory begins again; the mark of its next turn will be the first one."""
        self.mark = replace(self.mark, turn={}, drift_count=drift_count)
        self.turn, self.finish_reason = None, ""

    def lose(self, why: str) -> None:
        """The trajectory is no longer the session's."""
        self.lost = self.lost or why or "the queue has given its trajectory away"
        self.wake()

    def give_up(self, why: str) -> None:
        """Nobody works on it any more."""
        self.given_up = why
        self.wake()

    def wake(self) -> None:
        """Let everyone who waits look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _look(self, held: ActiveTrajectory) -> None:
        if self.flow is not None:
            self.flow.look(held)
        self.wake()

    async def _give_up(self, rollout: RolloutContext) -> RolloutResult:
        self.given_up = self.given_up or "idle"
        if rollout.held.token_count:
            await rollout.restart(rollout.held)
        raise AgentGone(f"agent session {self.mark.session_id}: {self.given_up}")

    def _ending(self) -> RolloutResult:
        reason = FinishReason(self.mark.finish_reason)
        return RolloutResult(reason=reason, outcome=None if self.mark.ask_verifier else self.mark.outcome)

    async def _wait(self, until: float | None) -> None:
        """Until something changes. Between a look and this call nothing may be awaited, or a change is missed."""
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        seconds = None if until is None else max(0.0, until - time.monotonic())
        await asyncio.wait([self._waiter], timeout=seconds)
