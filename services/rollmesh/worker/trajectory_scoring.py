"""Scoring of finished trajectories: verifier and teacher, the run's policy for missing values, reward shaping."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from rollmesh.config.rollout import RewardConfig
from rollmesh.config.teachers import TeacherConfig, teacher_of_domain
from rollmesh.curriculum.shapers import overlong_penalty
from rollmesh.errors import (
    ConfigError,
    DataError,
    NoTeacherScores,
    RewardUnavailable,
    RollmeshError,
    TeacherUnavailable,
)
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.types import OutcomeKind, RewardOutcome, TeacherColumn, Trajectory
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.wire.teacher_client import TeacherClient
from rollmesh.worker.worker_metrics import WorkerMetrics

T = TypeVar("T")

_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=5.0)


async def _retried(score: Callable[[], Awaitable[T]], unavailable: type[RollmeshError], event: str) -> T:
    """Return the scores of a service, asked again, with a log line, while it is unavailable."""

    async def wait(error: RollmeshError, pause: float) -> None:
        get_logger("scoring").warning(event, message=str(error), pause_seconds=pause)
        await asyncio.sleep(pause)

    return await retry(score, unavailable, _BACKOFF, wait)


class TeacherScorer:
    """Client of every teacher, which retries while a service is unavailable and checks what it returns."""

    def __init__(
        self,
        clients: Mapping[str, TeacherClient],
        record: Callable[[str, str], Awaitable[str]],
        metrics: WorkerMetrics,
    ) -> None:
        """``record`` records the manifest digest of a teacher with the run, and returns the recorded one."""
        self._clients = clients
        self._teachers = {name: client.config for name, client in clients.items()}
        self._record = record
        self._metrics = metrics
        self._digests: dict[str, str] = {}
        self._log = get_logger("scoring")

    def teacher_of(self, trajectory: Trajectory) -> TeacherConfig | None:
        """Return the teacher that scores a trajectory; None for none."""
        name = teacher_of_domain(self._teachers, trajectory.prompt.domain)
        return None if name is None else self._teachers[name]

    async def score(self, trajectory: Trajectory) -> TeacherColumn:
        """Score a trajectory that has a teacher. Raises NoTeacherScores, with the name of the teacher."""
        name = teacher_of_domain(self._teachers, trajectory.prompt.domain)
        assert name is not None
        started, client = time.monotonic(), self._clients[name]
        try:
            column = await _retried(lambda: client.score(trajectory), TeacherUnavailable, "teacher_unavailable")
            check_column(column, trajectory.response_token_count, client.config.top_k)
            await self._check_digest(column)
        except (DataError, NoTeacherScores) as error:
            self._metrics.teacher_failures.inc()
            self._log.info("no_teacher_scores", trajectory=trajectory.trajectory_id, message=str(error))
            raise NoTeacherScores(str(error)) from error
        self._metrics.teacher_seconds.observe(time.monotonic() - started)
        return column

    async def _check_digest(self, column: TeacherColumn) -> None:
        field, digest = f"teachers.{column.teacher}", column.manifest_digest
        if (began := self._digests.get(field)) is None:
            began = self._digests[field] = await self._record(field, digest)
        if began != digest:
            raise NoTeacherScores(
                f"{field}: a service has the model {digest[:12]} (manifest digest), but this run began with "
                f"{began[:12]}, and scores of two models are not comparable; serve that model, or start a new run"
            )


def check_column(column: TeacherColumn, token_count: int, top_k: int) -> None:
    """Raise NoTeacherScores unless the column has finite scores of each token, and its ``top_k`` likeliest in order."""
    field = f"teachers.{column.teacher}"
    if len(column.logprobs) != token_count:
        raise NoTeacherScores(
            f"{field}: {len(column.logprobs)} log-probabilities for a response of {token_count} tokens"
        )
    for values, of in ((column.logprobs, "log-probabilities"), (column.top_logprobs, "most likely tokens")):
        if values is not None and not np.isfinite(values).all():
            place = int(np.argwhere(~np.isfinite(values))[0][0])
            raise NoTeacherScores(f"{field}: the {of} of response token {place} are not finite")
    found = 0 if column.top_logprobs is None else column.top_logprobs.shape[1]
    if found != top_k:
        raise NoTeacherScores(f"{field}: the service returned the {found} most likely tokens, not top_k={top_k}")
    if column.top_logprobs is not None and (np.diff(column.top_logprobs, axis=1) > 0).any():
        raise NoTeacherScores(f"{field}: the most likely tokens are not in the order of their probabilities")


_SHOWN_AFTER_SECONDS = 3.0
"""Time without any value after which the reason shows: single answers without one are no wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResult:
    """Score to write to the queue."""

    outcome: RewardOutcome
    shaped_reward: float
    assigned: bool
    """True if the value comes from reward.fixed_value instead of a verifier."""
    dead: bool = False
    """True if the run file requests a dead letter instead of a score, for inspection."""
    teacher: TeacherColumn | None = None
    """Scores of the tokens under the teacher of the prompt's domain."""

    @property
    def has_value(self) -> bool:
        """True if the trajectory is scored."""
        return self.assigned or self.outcome.kind is OutcomeKind.SCORED


def shape(outcome: RewardOutcome, token_count: int, config: RewardConfig, budget: int) -> ScoredResult:
    """Apply the run's policy to an outcome and add the overlong penalty.

    A time-out or an error is ``unscorable`` (no value, the queue replaces the member), and also a dead letter if the
    policy says so, unless the policy assigns ``reward.fixed_value``. The outcome keeps its kind in every case.
    """
    policy = "" if outcome.kind is OutcomeKind.SCORED else policy_of(outcome, config)
    assigned = policy == "fixed"
    if policy and not assigned:
        return ScoredResult(outcome=outcome, shaped_reward=0.0, assigned=False, dead=policy == "dead_letter")
    value = config.fixed_value if assigned else outcome.value
    buffer = min(config.overlong_buffer_tokens, budget)
    return ScoredResult(
        outcome=outcome, shaped_reward=value + overlong_penalty(token_count, budget, buffer), assigned=assigned
    )


def policy_of(outcome: RewardOutcome, config: RewardConfig) -> str:
    """Return the run's policy for an outcome without a value: retry, unscorable, dead_letter or fixed."""
    return config.on_timeout if outcome.kind is OutcomeKind.TIMED_OUT else config.on_error


class Lack:
    """Reason why the newest answers lack a value, shown while none has one."""

    def __init__(self, waits: Waits, operation: str) -> None:
        self._waits, self._operation = waits, operation
        self._shown_from = math.inf

    def show(self, reason: str) -> None:
        """Show the reason unless an answer gets a value soon."""
        now = time.monotonic()
        self._shown_from = min(self._shown_from, now + _SHOWN_AFTER_SECONDS)
        self._waits.begin(self._operation, reason, after_seconds=self._shown_from - now)

    def end(self) -> None:
        """Show nothing: an answer has a value."""
        self._waits.end(self._operation)
        self._shown_from = math.inf


class TrajectoryScorer:
    """Client of the reward service and of the teachers, which retries while a service is unavailable."""

    def __init__(
        self,
        service: RewardClient,
        config: RewardConfig,
        budget: int,
        metrics: WorkerMetrics,
        waits: Waits | None = None,
        teachers: TeacherScorer | None = None,
    ) -> None:
        """Create a scorer; ``waits`` shows why an answer got no value, until another one gets one."""
        self._service = service
        self._config = config
        self._budget = budget
        self._metrics = metrics
        self._teachers = teachers
        waits = waits or Waits()
        self._rewards, self._columns = Lack(waits, "scoring"), Lack(waits, "teacher scores")
        self._log = get_logger("scoring")
        self.problem = ""
        """Reason why the newest answer without a reward, or without a teacher's scores, has none."""
        self.refused: ConfigError | None = None
        """Error of a teacher that does not fit the run; ends the worker."""

    async def score(
        self, trajectory: Trajectory, known: RewardOutcome | None = None, budget: int | None = None
    ) -> ScoredResult:
        """Return outcome and shaped reward; ``known`` is an outcome that needs no verifier (the environment's).

        The overlong penalty is relative to ``budget``, the token budget of the trajectory; None is that of the run.
        """
        started = time.monotonic()
        outcome = known if known is not None else await self._request(trajectory)
        if outcome.kind is not OutcomeKind.SCORED and policy_of(outcome, self._config) == "retry" and known is None:
            outcome = await self._request(trajectory)
        self._metrics.scored(outcome.kind.value, time.monotonic() - started)
        if outcome.kind is OutcomeKind.SCORED:
            self._rewards.end()
        else:
            self.problem = outcome.message
            self._rewards.show(f"an answer has no reward ({outcome.kind.value}): {outcome.message}")
            self._log.info(
                "no_reward",
                trajectory=trajectory.trajectory_id,
                kind=outcome.kind.value,
                message=outcome.message,
            )
        budget = self._budget if budget is None else budget
        return shape(outcome, trajectory.response_token_count, self._config, budget)

    async def score_for_training(
        self, trajectory: Trajectory, known: RewardOutcome | None, budget: int
    ) -> ScoredResult:
        """Score as ``score`` does, and meanwhile by the teacher of the prompt's domain, if the run has one."""
        teacher = None if self._teachers is None else self._teachers.teacher_of(trajectory)
        if self._teachers is None or teacher is None:
            return await self.score(trajectory, known, budget)
        column = asyncio.create_task(self._teachers.score(trajectory))
        try:
            result = await self.score(trajectory, known, budget)
            if not result.has_value:
                return result
            result = replace(result, teacher=await column)
            self._columns.end()
            return result
        except ConfigError as error:
            self.refused = error
            raise
        except NoTeacherScores as error:
            self.problem = str(error)
            self._columns.show(f"an answer has no scores of its teacher: {error}")
            outcome = RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))
            dead = teacher.on_error == "dead_letter"
            return ScoredResult(outcome=outcome, shaped_reward=0.0, assigned=False, dead=dead)
        finally:
            await cancel_and_wait(column)

    async def _request(self, trajectory: Trajectory) -> RewardOutcome:
        try:
            found = await _retried(lambda: self._service.score([trajectory]), RewardUnavailable, "reward_unavailable")
            return found[0]
        except DataError as error:
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))
