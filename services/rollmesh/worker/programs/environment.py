"""Many turns: the policy writes, the environment answers, and token ids are kept from turn to turn.

What the model wrote is never tokenised again; only the environment's text is, once. Its tokens are segments without
logprobs and stay out of the loss. A partial trajectory is resumed by playing its finished turns to a new environment
(``replayable``), or from a snapshot of the old one; if neither can be done, nothing is saved before the end and a lost
worker means starting over.

With snapshots a turn is saved, then played, then the snapshot is kept, then the reply is saved: whenever the worker
dies, the newest snapshot covers all saved turns or all but the last, which is then played (again).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.tasks.environments.environment_protocol import Environment, EnvironmentReply, SnapshotEnvironment
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Int32Array, OutcomeKind, RewardOutcome, Segment, SegmentSource, Trajectory
from rollmesh.worker.active_trajectory import Parked
from rollmesh.worker.program import RolloutContext, RolloutResult
from rollmesh.worker.programs.snapshots import Snapshot
from rollmesh.worker.programs.turns import Turn, turns_of
from rollmesh.worker.worker_metrics import WorkerMetrics

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

    @property
    def takes_snapshots(self) -> bool:
        """Whether the trajectory is resumed from snapshots."""
        return not self._environment.replayable and isinstance(self._environment, SnapshotEnvironment)

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

    def snapshot(self, reply: EnvironmentReply) -> bytes | None:
        """The environment after its last reply; None when it cannot be saved or need not be."""
        environment = self._environment
        if not self.takes_snapshots:
            return None
        assert isinstance(environment, SnapshotEnvironment)
        try:
            state = environment.snapshot()
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: snapshot: {type(error).__name__}: {error}") from error
        return Snapshot(turn_count=self.turn_count, reply=reply, reward=self._reward, state=state).to_bytes()

    def restore(self, snapshot: Snapshot) -> None:
        """Go on from a snapshot; after ``begin``."""
        assert isinstance(self._environment, SnapshotEnvironment)
        try:
            self._environment.restore(snapshot.state)
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: restore: {type(error).__name__}: {error}") from error
        self.turn_count, self._reward = snapshot.turn_count, snapshot.reward

    async def aclose(self) -> None:
        """The episode is over either way: an environment that cannot be closed costs a line in the log, no answer."""
        try:
            await self._guarded(self._environment.aclose(), "aclose")
        except EnvironmentFailed as error:
            get_logger("environment").warning(
                "environment_not_closed", trajectory=self._trajectory.trajectory_id, message=str(error)
            )

    def ending(self, reason: FinishReason) -> RolloutResult:
        return RolloutResult(reason=reason, outcome=self.outcome)

    @property
    def outcome(self) -> RewardOutcome | None:
        """The environment's reward of the episode; None when it gave none."""
        return _outcome(self._reward)

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
        metrics: WorkerMetrics,
    ) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._max_turns = max_turns
        self._timeout = timeout_seconds
        self._metrics = metrics

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Play turns until the environment ends the episode or tokens or turns run out (LENGTH)."""
        environment = self._made()
        held = rollout.held
        durable = environment.replayable or isinstance(environment, SnapshotEnvironment)
        if held.token_count and not self._resumable(environment, rollout):
            await rollout.restart(held)
            self._metrics.restarted.inc()
        try:
            async with aclosing(_Episode(environment, held.trajectory, self._tokenizer, self._timeout)) as episode:
                await episode.begin()
                return await self._play(episode, rollout, durable=durable)
        except Parked:
            if not durable:
                held.restart()  # nobody could go on from these tokens: none of them is saved
            raise

    def _made(self) -> Environment:
        """A fresh environment; making one may fail like everything else that it does."""
        try:
            return self._make()
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: making one: {type(error).__name__}: {error}") from error

    def _resumable(self, environment: Environment, rollout: RolloutContext) -> bool:
        """Whether the saved turns can be gone on from."""
        if environment.replayable:
            return True
        if not isinstance(environment, SnapshotEnvironment):
            return False
        turns, snapshot = self._turns(rollout), rollout.held.snapshot
        played = sum(turn.complete for turn in turns)
        if not played or snapshot is None:
            return not played
        missing = played - Snapshot.from_bytes(snapshot).turn_count
        unheard = turns[-1].complete and not turns[-1].answered
        return missing == 0 or (missing == 1 and unheard)

    async def _play(self, episode: _Episode, rollout: RolloutContext, *, durable: bool) -> RolloutResult:
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
            reply = await self._turn(episode, rollout)

    async def _turn(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply:
        """Play the newest turn and keep a snapshot where that is how the trajectory is resumed."""
        if episode.takes_snapshots:
            await rollout.save(rollout.held)
        else:
            await rollout.report_first_token(rollout.held)
        reply = await episode.play(self._turns(rollout)[-1].token_ids)
        snapshot = episode.snapshot(reply)
        if snapshot is not None:
            await rollout.keep_snapshot(rollout.held, snapshot)
        return reply

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """The environment's reward, from its snapshot or by playing the turns again; None leaves it to the verifier."""
        turns = [turn for turn in turns_of(trajectory.segments, self._stop_token_ids) if turn.complete]
        try:
            environment = self._made()
            if not environment.replayable:
                last = None if snapshot is None else Snapshot.from_bytes(snapshot)
                if last is not None and last.turn_count == len(turns):
                    return _outcome(last.reward)
                message = "its worker died before the score, and the environment that knew the reward went with it"
                return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
            async with aclosing(_Episode(environment, trajectory, self._tokenizer, self._timeout)) as episode:
                await episode.begin()
                for turn in turns:
                    await episode.play(turn.token_ids)
                return episode.outcome
        except EnvironmentFailed as error:
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))

    def _turns(self, rollout: RolloutContext) -> list[Turn]:
        return turns_of(rollout.held.segments, self._stop_token_ids)

    async def _replay(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply | None:
        """Play the finished turns of a partial trajectory; returns a reply that its tokens do not hold yet."""
        if episode.takes_snapshots:
            return await self._restore(episode, rollout)
        reply: EnvironmentReply | None = None
        for turn in self._turns(rollout):
            if not turn.complete:
                return None
            answer = await episode.play(turn.token_ids)
            if answer.done:
                return answer
            reply = None if turn.answered else answer
        return reply

    async def _restore(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply | None:
        """Like ``_replay``, from a snapshot that covers all finished turns but perhaps the last."""
        turns = self._turns(rollout)
        played = sum(turn.complete for turn in turns)
        if not played or rollout.held.snapshot is None:
            return None
        snapshot = Snapshot.from_bytes(rollout.held.snapshot)
        episode.restore(snapshot)
        if snapshot.turn_count < played:
            return await self._turn(episode, rollout)
        if snapshot.reply.done:
            return snapshot.reply
        return None if turns[-1].answered or not turns[-1].complete else snapshot.reply

    async def _hear(self, rollout: RolloutContext, reply: EnvironmentReply, durable: bool) -> bool:
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


def _outcome(reward: float | None) -> RewardOutcome | None:
    if reward is None:
        return None
    if not math.isfinite(reward):
        return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=f"the environment's reward is {reward}")
    return RewardOutcome(kind=OutcomeKind.SCORED, value=reward, parts={"environment": reward})
