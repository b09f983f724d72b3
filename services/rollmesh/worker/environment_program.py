"""Multi-turn program: policy and environment take turns, and token ids are kept from turn to turn.

The policy's tokens are never tokenised again; only the environment's text is tokenised, once. Its tokens are segments
without logprobs and stay out of the loss. A partial trajectory is resumed by replaying its complete turns in a new
environment (``replayable``) or from a snapshot. If neither is possible, nothing is saved before the end, and the
trajectory restarts if its worker dies.

With snapshots the order is: save the turn, play it, save the snapshot, save the reply. Whenever the worker dies, the
newest snapshot covers all saved turns, or all but the last, and the last is then played again.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import TypeVar

import numpy as np

from rollmesh.errors import DataError, RollmeshError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancelled_awaits_as_errors
from rollmesh.tasks.environments.environment_protocol import (
    Environment,
    EnvironmentFailed,
    EnvironmentReply,
    SnapshotEnvironment,
    checked_reply,
    checked_snapshot,
)
from rollmesh.text import Tokenizer
from rollmesh.types import (
    LARGEST_REWARD,
    FinishReason,
    OutcomeKind,
    RewardOutcome,
    Segment,
    SegmentSource,
    Trajectory,
    TurnReturn,
)
from rollmesh.user_code import described
from rollmesh.worker.active_trajectory import Parked
from rollmesh.worker.program import RolloutContext, RolloutResult
from rollmesh.worker.turns import Snapshot, Turn, turns_of
from rollmesh.worker.worker_metrics import WorkerMetrics

T = TypeVar("T")
_MOST_CHARACTERS_PER_TOKEN = 100


class _Episode:
    """One environment in use, with the turns played so far and their rewards."""

    def __init__(
        self,
        environment: Environment,
        trajectory: Trajectory,
        tokenizer: Tokenizer,
        timeout: float,
        by_turn: bool,
        pinned_version: int | None = None,
    ) -> None:
        self._environment = environment
        self._trajectory = trajectory
        self._tokenizer = tokenizer
        self._timeout = timeout
        self._by_turn = by_turn
        self._pinned_version = pinned_version
        self._reward: float | None = None
        self._rewards_before: list[float] = []
        self.turn_count = 0

    @property
    def takes_snapshots(self) -> bool:
        """True if the trajectory is resumed from snapshots."""
        return not self._environment.replayable and isinstance(self._environment, SnapshotEnvironment)

    async def begin(self) -> EnvironmentReply | None:
        """Reset the environment; returns what it says before the first turn."""
        reply = await self._guarded(self._environment.reset(self._trajectory.prompt), "reset")
        return None if reply is None else self._noted(reply, "reset")

    async def play(self, turns: Sequence[Turn]) -> EnvironmentReply:
        """Pass the last of the complete ``turns`` to the environment; the key identifies a repeated turn."""
        text = self._tokenizer.decode(turns[-1].token_ids)
        # A restart can sample other tokens, and the evaluations of all versions have the same trajectory ids.
        digest = hashlib.blake2b(f"{self._pinned_version}:".encode(), digest_size=8)
        digest.update(np.concatenate([turn.token_ids for turn in turns]).astype("<i4").tobytes())
        key = f"{self._trajectory.trajectory_id}:{self.turn_count}:{digest.hexdigest()}"
        operation, before = f"turn {self.turn_count}", self._reward or 0.0
        reply = self._noted(await self._guarded(self._environment.step(text, key), operation), operation)
        self.turn_count += 1
        self._rewards_before.append(before)
        return reply

    def _noted(self, reply: EnvironmentReply, operation: str) -> EnvironmentReply:
        """Check a reply and keep its reward."""
        try:
            checked_reply(reply, "reset" if operation == "reset" else "step")
        except DataError as error:
            raise EnvironmentFailed(f"environment: {operation}: {error}") from error
        if reply.reward is not None:
            self._reward = float(reply.reward)
        return reply

    def snapshot(self, reply: EnvironmentReply) -> bytes | None:
        """Return a snapshot of the environment after ``reply``; None without ``takes_snapshots``."""
        environment = self._environment
        if not self.takes_snapshots:
            return None
        assert isinstance(environment, SnapshotEnvironment)
        try:
            state = checked_snapshot(environment.snapshot())
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: snapshot: {described(error)}") from error
        return Snapshot(
            turn_count=self.turn_count,
            reply=reply,
            reward=self._reward,
            rewards_before=tuple(self._rewards_before),
            state=state,
        ).to_bytes()

    def restore(self, snapshot: Snapshot) -> None:
        """Restore the environment from a snapshot; call it after ``begin``."""
        assert isinstance(self._environment, SnapshotEnvironment)
        try:
            self._environment.restore(snapshot.state)
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: restore: {described(error)}") from error
        self.turn_count, self._reward = snapshot.turn_count, snapshot.reward
        self._rewards_before = list(snapshot.rewards_before)

    async def aclose(self) -> None:
        """Close the environment; a failure is only logged, because the episode has ended."""
        try:
            await self._guarded(self._environment.aclose(), "aclose")
        except EnvironmentFailed as error:
            get_logger("environment").warning(
                "environment_not_closed", trajectory=self._trajectory.trajectory_id, message=str(error)
            )

    def outcome(self, turns: Sequence[Turn]) -> RewardOutcome | None:
        """Return the outcome of the episode, whose response has these turns; None without a reward."""
        return outcome_of(self._reward, self._rewards_before if self._by_turn else (), turns)

    async def _guarded(self, awaitable: Awaitable[T], operation: str) -> T:
        try:
            with cancelled_awaits_as_errors():
                async with asyncio.timeout(self._timeout):
                    return await awaitable
        except TimeoutError as error:
            raise EnvironmentFailed(f"environment: {operation} took longer than {self._timeout:g} s") from error
        except RollmeshError:
            raise
        except Exception as error:  # an error in a user's environment fails the attempt, not the worker
            raise EnvironmentFailed(f"environment: {operation}: {described(error)}") from error


class EnvironmentProgram:
    """Multi-turn program with one environment per trajectory."""

    def __init__(
        self,
        make: Callable[[], Environment],
        tokenizer: Tokenizer,
        *,
        stop_token_ids: tuple[int, ...],
        max_turns: int,
        timeout_seconds: float,
        metrics: WorkerMetrics,
        by_turn: bool = False,
    ) -> None:
        """``by_turn``: a turn has the reward of its reply (``trainer.algorithm.credit: turn``)."""
        self._make = make
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._max_turns = max_turns
        self._timeout = timeout_seconds
        self._by_turn = by_turn
        self._metrics = metrics

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Play turns until the environment ends the episode, or tokens or turns run out (LENGTH)."""
        environment = self._make_environment()
        active = rollout.active
        durable = environment.replayable or isinstance(environment, SnapshotEnvironment)
        if active.token_count and not self._resumable(environment, rollout):
            await rollout.restart(active)
            self._metrics.restarted.inc()
        try:
            episode = self._episode(environment, active.trajectory, rollout.pinned_version)
            async with aclosing(episode):
                first = await episode.begin()
                if first is not None and not active.token_count:
                    await self._append_first(rollout, first, durable)
                return await self._play(episode, rollout, durable=durable)
        except Parked:
            if not durable:
                active.restart()  # these tokens cannot be resumed, and none of them is saved
            raise

    def _episode(self, environment: Environment, trajectory: Trajectory, pinned_version: int | None = None) -> _Episode:
        return _Episode(environment, trajectory, self._tokenizer, self._timeout, self._by_turn, pinned_version)

    def _make_environment(self) -> Environment:
        """Create an environment; raises EnvironmentFailed if the user's factory fails."""
        try:
            return self._make()
        except Exception as error:  # as in _guarded
            raise EnvironmentFailed(f"environment: creation: {described(error)}") from error

    def _resumable(self, environment: Environment, rollout: RolloutContext) -> bool:
        """Tell whether the trajectory can continue from its saved turns."""
        if environment.replayable:
            return True
        if not isinstance(environment, SnapshotEnvironment):
            return False
        turns, snapshot = self._turns(rollout), rollout.active.snapshot
        played = sum(turn.complete for turn in turns)
        if not played or snapshot is None:
            return not played
        missing = played - Snapshot.from_bytes(snapshot).turn_count
        reply_missing = turns[-1].complete and not turns[-1].answered
        return missing == 0 or (missing == 1 and reply_missing)

    async def _play(self, episode: _Episode, rollout: RolloutContext, *, durable: bool) -> RolloutResult:
        reply = await self._replay(episode, rollout)
        most_turns = self._max_turns if rollout.turns is None else rollout.turns
        while True:
            if reply is not None and reply.done:
                return RolloutResult(reason=FinishReason.ENVIRONMENT, outcome=episode.outcome(self._turns(rollout)))
            # A reply that the policy cannot answer is left out: a verifier might read it as the answer.
            if (
                episode.turn_count >= most_turns
                or (reply is not None and not await self._append_reply(rollout, reply, durable))
                or rollout.remaining_tokens == 0
                or await rollout.sample(durable=durable) is not FinishReason.STOP
            ):
                return RolloutResult(reason=FinishReason.LENGTH, outcome=episode.outcome(self._turns(rollout)))
            reply = await self._turn(episode, rollout)

    async def _turn(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply:
        """Play the newest turn; save a snapshot if the trajectory is resumed from snapshots."""
        if episode.takes_snapshots:
            await rollout.save(rollout.active)
        else:
            await rollout.report_first_token(rollout.active)
        reply = await episode.play(self._turns(rollout))
        snapshot = episode.snapshot(reply)
        if snapshot is not None:
            await rollout.keep_snapshot(rollout.active, snapshot)
        return reply

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the environment's reward, from its snapshot or by a replay; None requests the verifier."""
        every = turns_of(trajectory.segments, self._stop_token_ids)
        turns = [turn for turn in every if turn.complete]
        try:
            environment = self._make_environment()
            if not environment.replayable:
                last = None if snapshot is None else Snapshot.from_bytes(snapshot)
                if last is not None and last.turn_count == len(turns):
                    return outcome_of(last.reward, last.rewards_before if self._by_turn else (), every)
                message = "the worker and its environment died before the trajectory was scored; the reward is lost"
                return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
            async with aclosing(self._episode(environment, trajectory)) as episode:
                await episode.begin()
                for count in range(1, len(turns) + 1):
                    await episode.play(turns[:count])
                return episode.outcome(every)
        except EnvironmentFailed as error:
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))

    def _turns(self, rollout: RolloutContext) -> list[Turn]:
        return turns_of(rollout.active.segments, self._stop_token_ids)

    async def _replay(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply | None:
        """Replay the complete turns of a partial trajectory; returns the last reply if its tokens are not saved."""
        if episode.takes_snapshots:
            return await self._restore(episode, rollout)
        reply: EnvironmentReply | None = None
        turns = self._turns(rollout)
        for count, turn in enumerate(turns, 1):
            if not turn.complete:
                return None
            answer = await episode.play(turns[:count])
            if answer.done:
                return answer
            reply = None if turn.answered else answer
        return reply

    async def _restore(self, episode: _Episode, rollout: RolloutContext) -> EnvironmentReply | None:
        """Do the same as ``_replay`` from a snapshot, which covers all complete turns or all but the last."""
        turns = self._turns(rollout)
        played = sum(turn.complete for turn in turns)
        if not played or rollout.active.snapshot is None:
            return None
        snapshot = Snapshot.from_bytes(rollout.active.snapshot)
        episode.restore(snapshot)
        if snapshot.turn_count < played:
            return await self._turn(episode, rollout)
        if snapshot.reply.done:
            return snapshot.reply
        return None if turns[-1].answered or not turns[-1].complete else snapshot.reply

    async def _append_first(self, rollout: RolloutContext, first: EnvironmentReply, durable: bool) -> None:
        """Append what the environment says before the first turn; without a turn there is nothing to train."""
        if first.done:
            raise EnvironmentFailed("environment: reset: the episode is over before the first turn")
        if not await self._append_reply(rollout, first, durable):
            raise DataError(
                f"environment: reset: a first text of {len(first.text)} characters leaves no room for an answer: raise "
                f"rollout.max_new_tokens, of which {rollout.remaining_tokens} are left, or shorten the text"
            )

    async def _append_reply(self, rollout: RolloutContext, reply: EnvironmentReply, durable: bool) -> bool:
        """Append the environment's text; returns False if the budget has no room for it and one more token."""
        # Megabytes would hold up all other trajectories here; the tokens of a text have some 4 characters.
        if len(reply.text) > _MOST_CHARACTERS_PER_TOKEN * rollout.remaining_tokens:
            return False
        ids = self._tokenizer.encode(reply.text)
        if len(ids) >= rollout.remaining_tokens:
            return False
        active = rollout.active
        version = max(active.newest_version, active.trajectory.birth_version)
        active.add(
            Segment(
                token_ids=ids,
                behavior_logprobs=None,
                policy_version=version,
                kv_min_version=version,
                source=SegmentSource.ENVIRONMENT,
                temperature=rollout.params.temperature,
            )
        )
        if durable:
            await rollout.save(active)
        return True


def outcome_of(
    reward: float | None, rewards_before: Sequence[float] = (), turns: Sequence[Turn] = ()
) -> RewardOutcome | None:
    """Return the outcome of an episode by its reward; None if the environment returned none.

    ``rewards_before``, those of the episode before each turn that it played, give every turn the return ``reward -
    before``, and the last of ``turns`` 0 if it was cut off.
    """
    if reward is None:
        return None
    before = [*rewards_before, *[reward] * (len(turns) - len(rewards_before))] if rewards_before else []
    returns = [reward - start for start in before]
    unfit = next((value for value in (reward, *returns) if not abs(value) <= LARGEST_REWARD), None)
    if unfit is not None:
        message = f"the environment's reward is {unfit}, expected at most {LARGEST_REWARD:g} in size"
        return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=message)
    ends = accumulate(len(turn.token_ids) for turn in turns)
    by_turn = tuple(TurnReturn(end=end, value=value) for end, value in zip(ends, returns, strict=False))
    return RewardOutcome(kind=OutcomeKind.SCORED, value=reward, parts={"environment": reward}, turns=by_turn)
