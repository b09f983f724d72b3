"""Scoring of finished trajectories: verifier, the run's policy for missing values, reward shaping."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

from rollmesh.config.rollout import RewardConfig
from rollmesh.curriculum.shapers import overlong_penalty
from rollmesh.errors import DataError, RewardUnavailable
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, retry
from rollmesh.types import OutcomeKind, RewardOutcome, Trajectory
from rollmesh.wire.reward_client import RewardClient
from rollmesh.worker.worker_metrics import WorkerMetrics

_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=5.0)
_WAIT = "scoring"
_SHOWN_AFTER_SECONDS = 3.0
"""Time without any reward after which the reason shows: single answers without one are no wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredResult:
    """Score to write to the queue."""

    outcome: RewardOutcome
    shaped_reward: float
    assigned: bool
    """True if the value comes from reward.fixed_value instead of a verifier."""
    dead: bool = False
    """True if the run file requests a dead letter instead of a score, for inspection."""


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


class TrajectoryScorer:
    """Client of the reward service that retries with exponential back-off while the service is unavailable."""

    def __init__(
        self,
        service: RewardClient,
        config: RewardConfig,
        budget: int,
        metrics: WorkerMetrics,
        waits: Waits | None = None,
    ) -> None:
        """Create a scorer; ``waits`` shows why an answer got no value, until another one gets one."""
        self._service = service
        self._config = config
        self._budget = budget
        self._metrics = metrics
        self._waits = waits or Waits()
        self._log = get_logger("scoring")
        self.problem = ""
        """Reason why the newest answer without a reward has none."""
        self._shown_from = math.inf
        """Time from which a lack of rewards shows."""

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
            self._waits.end(_WAIT)
            self._shown_from = math.inf
        else:
            self.problem = outcome.message
            now = time.monotonic()
            self._shown_from = min(self._shown_from, now + _SHOWN_AFTER_SECONDS)
            text = f"an answer has no reward ({outcome.kind.value}): {outcome.message}"
            self._waits.begin(_WAIT, text, after_seconds=self._shown_from - now)
            self._log.info(
                "no_reward",
                trajectory=trajectory.trajectory_id,
                kind=outcome.kind.value,
                message=outcome.message,
            )
        budget = self._budget if budget is None else budget
        return shape(outcome, trajectory.response_token_count, self._config, budget)

    async def _request(self, trajectory: Trajectory) -> RewardOutcome:
        try:
            return (await retry(lambda: self._service.score([trajectory]), RewardUnavailable, _BACKOFF, self._wait))[0]
        except DataError as error:
            return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=str(error))

    async def _wait(self, error: RewardUnavailable, pause: float) -> None:
        self._log.warning("reward_unavailable", message=str(error), pause_seconds=pause)
        await asyncio.sleep(pause)
