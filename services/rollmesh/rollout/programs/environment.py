"""Many turns: the policy writes, the environment answers, and token ids are kept from turn to turn.

What the model wrote is never tokenised again; only the environment's text is, once. Its tokens are segments without
logprobs and stay out of the loss. A partial trajectory is resumed by playing its finished turns to a new environment
(``replayable``); if that cannot be done, nothing is saved before the end and a lost worker means starting over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from rollmesh.errors import RollmeshError
from rollmesh.rollout.held import Parked
from rollmesh.rollout.metrics import RolloutMetrics
from rollmesh.rollout.programs.protocol import Ending, Rollout
from rollmesh.rollout.programs.turns import Turn, turns_of
from rollmesh.runtime.logging import get_logger
from rollmesh.tasks.environments.protocol import Environment, EnvironmentReply
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, OutcomeKind, RewardOutcome, Segment, SegmentSource, Trajectory

T = TypeVar("T")


class EnvironmentFailed(RollmeshError, RuntimeError):
    """The environment raised or took too long; the attempt is over, the trajectory is not."""


class _Episode:
    """One environment in use: turns played so far and the reward they brought."""

    def __init__(self, environment: Environment, trajectory: Trajectory, tokenizer: Tokenizer, timeout: float) -> None:
        self._environment = environment
        self._trajectory = trajectory
        self._tokenizer = tokenizer
        self._timeout = timeout
        self._reward: float | None = None
        self.turn_count = 0

    async def begin(self) -> None:
        await self._guarded(self._environment.reset(self._trajectory.prompt), "reset")

    async def play(self, token_ids: Int32Array) -> EnvironmentReply:
        """Hand one finished turn to the environment; the key makes a repeated tool call recognisable."""
        text = self._tokenizer.decode(token_ids)
        key = f"{self._trajectory.trajectory_id}:{self.turn_count}"
        reply = await self._guarded(self._environment.step(text, key), f"turn {self.turn_count}")
        self.turn_count += 1
        if reply.reward is not None:
            self._reward = float(reply.reward)
        return reply

    async def aclose(self) -> None:
        """The episode is over either way: an environment that cannot be closed costs a line in the log, no answer."""
        try:
            await self._guarded(self._environment.aclose(), "aclose")
        except EnvironmentFailed as error:
            get_logger("environment").warning(
                "environment_not_closed", trajectory=self._trajectory.trajectory_id, message=str(error)
            )

    def ending(self, reason: FinishReason) -> Ending:
        return Ending(reason=reason, outcome=self.outcome)

    @property
    def outcome(self) -> RewardOutcome | None:
        """The environment's reward of the episode; None when it gave none, or something that is no number."""
        if self._reward is None:
            return None
        if not math.isfinite(self._reward):
            message = f"the environment's reward is {self._reward}"
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
        return RewardOutcome(kind=OutcomeKind.SCORED, value=self._reward, parts={"environment": self._reward})

    async def _guarded(self, awaitable: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(self._timeout):
                return await awaitable
        except TimeoutError as error:
            raise EnvironmentFailed(f"environment: {what} took longer than {self._timeout:g} s") from error
        except RollmeshError:
            raise
        except Exception as error:  # whatever an environment of the user raises fails the attempt, not the worker
            raise EnvironmentFailed(f"environment: {what}: {type(error).__name__}: {error}") from error


class EnvironmentProgram:
    """Turns with one environment per trajectory."""

    def __init__(
        self,
        make: Callable[[], Environment],
        tokenizer: Tokenizer,
        *,
        stop_token_ids: tuple[int, ...],
        max_turns: int,
        timeout_seconds: float,
        metrics: RolloutMetrics,
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._max_turns = max_turns
        self._timeout = timeout_seconds
        self._metrics = metrics

    async def run(self, rollout: Rollout) -> Ending:
        """Play turns until the environment ends the episode or tokens or turns run out (LENGTH)."""
        environment = self._make()
        held = rollout.held
        if held.token_count and not environment.replayable:
            await rollout.restart(held)
            self._metrics.restarted.inc()
        try:
            async with aclosing(_Episode(environment, held.trajectory, self._tokenizer, self._timeout)) as episode:
                await episode.begin()
                return await self._play(episode, rollout, durable=environment.replayable)
        except Parked:
            if not environment.replayable:
                held.restart()  # nobody could go on from these tokens: none of them is saved
            raise

    async def _play(self, episode: _Episode, rollout: Rollout, *, durable: bool) -> Ending:
        reply = await self._replay(episode, rollout)
        while True:
            if reply is not None:
                if reply.done:
                    return episode.ending(FinishReason.ENVIRONMENT)
                if not await self._hear(rollout, reply, durable):
                    return episode.ending(FinishReason.LENGTH)
            if rollout.left == 0 or episode.turn_count >= self._max_turns:
                return episode.ending(FinishReason.LENGTH)
            if await rollout.sample(durable=durable) is not FinishReason.STOP:
                return episode.ending(FinishReason.LENGTH)
            reply = await episode.play(self._turns(rollout)[-1].token_ids)

    async def outcome_of(self, trajectory: Trajectory) -> RewardOutcome | None:
        """Play the turns again for the environment's reward; None when it gives none and the verifier decides."""
        environment = self._make()
        if not environment.replayable:
            message = "its worker died before the score, and the environment that knew the reward went with it"
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
        try:
            async with aclosing(_Episode(environment, trajectory, self._tokenizer, self._timeout)) as episode:
                await episode.begin()
                for turn in turns_of(trajectory.segments, self._stop_token_ids):
                    if turn.complete:
                        await episode.play(turn.token_ids)
                return episode.outcome
        except EnvironmentFailed as error:
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))

    def _turns(self, rollout: Rollout) -> list[Turn]:
        return turns_of(rollout.held.segments, self._stop_token_ids)

    async def _replay(self, episode: _Episode, rollout: Rollout) -> EnvironmentReply | None:
        """Play the finished turns of a partial trajectory; returns a reply that its tokens do not hold yet."""
        reply: EnvironmentReply | None = None
        for turn in self._turns(rollout):
            if not turn.complete:
                return None
            answer = await episode.play(turn.token_ids)
            if answer.done:
                return answer
            reply = None if turn.answered else answer
        return reply

    async def _hear(self, rollout: Rollout, reply: EnvironmentReply, durable: bool) -> bool:
        """Append the environment's text; False when the budget cannot hold it and a token of an answer."""
        ids = self._tokenizer.encode(reply.text)
        if len(ids) >= rollout.left:
            return False
        held = rollout.held
        held.add(
            Segment(
                token_ids=ids,
                behavior_logprobs=None,
                policy_version=held.newest_version,
                kv_min_version=held.newest_version,
                source=SegmentSource.ENVIRONMENT,
                temperature=rollout.params.temperature,
            )
        )
        if durable:
            await rollout.save(held)
        return True
