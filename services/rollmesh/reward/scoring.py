"""Scoring of an encoded answer: choice of judge or worker pool, retries, and outcomes of failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rollmesh.errors import ConfigError, DataError
from rollmesh.reward.inline_verifier import InlineVerifier
from rollmesh.reward.judges import Judge
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.reward.pool.worker_connection import WorkerDied, WorkerTimedOut
from rollmesh.reward.pool.worker_pool import WorkerPool
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.runtime.logging import get_logger
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import outcome_from_bytes

_RETRIES_AFTER_CRASH = 1
_RETRIES_AFTER_TEMPLATE_EXIT = 3
"""Retries of an answer whose worker exited with its template; the retry may use the same template and fail again."""
_UNKNOWN = "unknown"
_MAX_LOGGED_REASONS = 20
_MAX_LOGGED_CHARACTERS = 500
"""Maximum length of a verifier's name and of a message in a log line: the caller chooses both."""
UNSCORED_ANSWER_LIMIT = 256
"""Number of answers without a value since startup, with no scored answer, that ends the service."""


class Scoring:
    """Scorer of any number of concurrent answers."""

    def __init__(
        self,
        pool: WorkerPool,
        judges: Mapping[str, Judge | InlineVerifier],
        metrics: RewardMetrics,
        *,
        default_verifier: str,
        timeout_seconds: float,
        on_unusable_verifier: Callable[[ConfigError], None],
    ) -> None:
        """``on_unusable_verifier`` is called if the first ``UNSCORED_ANSWER_LIMIT`` answers all have no value."""
        self._pool = pool
        self._judges = judges
        self._metrics = metrics
        self._default = default_verifier
        self._timeout_seconds = timeout_seconds
        self._on_unusable_verifier = on_unusable_verifier
        self._logged: set[str] = set()
        self._failures: int | None = 0
        """Number of answers without a value so far; None once an answer was scored."""

    async def score(self, verifier: str, payload: bytes) -> RewardOutcome:
        """Score one encoded item with ``verifier`` (empty: the run's verifier); never raises for an answer."""
        name = verifier or self._default
        start = time.monotonic()
        self._metrics.received.inc()
        self._metrics.running.inc()
        try:
            judge = self._judges.get(name)
            outcome = await (judge.score(payload) if judge is not None else self._in_pool(name, payload))
        finally:
            self._metrics.running.dec()
        known = name in self._judges or name in self._pool.timeout_means_wrong
        self._metrics.scored(name if known else _UNKNOWN, outcome, time.monotonic() - start)
        self._log_failure(name, outcome)
        self._check_verifier(name, outcome)
        return outcome

    def _log_failure(self, name: str, outcome: RewardOutcome) -> None:
        """Log the first few distinct reasons for answers without a value; the metrics count all answers."""
        message = outcome.message[:_MAX_LOGGED_CHARACTERS]
        if outcome.kind is OutcomeKind.SCORED or message in self._logged or len(self._logged) >= _MAX_LOGGED_REASONS:
            return
        self._logged.add(message)
        get_logger("reward").warning(
            "answer_without_value", verifier=name[:_MAX_LOGGED_CHARACTERS], outcome=outcome.kind.value, message=message
        )

    def _check_verifier(self, name: str, outcome: RewardOutcome) -> None:
        """Report a verifier that has never scored an answer, because the run would consume prompts without training."""
        if self._failures is None:
            return
        if outcome.kind is OutcomeKind.SCORED:
            self._failures = None
            return
        self._failures += 1
        if self._failures == UNSCORED_ANSWER_LIMIT:
            self._on_unusable_verifier(
                ConfigError(
                    f"reward.verifier: none of the first {UNSCORED_ANSWER_LIMIT} answers could be scored; the last: "
                    f"{outcome.message or name}"
                )
            )

    async def _in_pool(self, name: str, payload: bytes) -> RewardOutcome:
        crashes = lost_templates = 0
        while True:
            try:
                return outcome_from_bytes(await self._pool.run(payload, self._timeout_seconds))
            except WorkerTimedOut as error:
                return timed_out(f"{name}: {error}", self._pool.timeout_means_wrong.get(name, False))
            except WorkerDied as error:
                # The answer is retried once after any crash; a second crash is attributed to the answer. The exit of a
                # template ends all its workers, and a retry may use another of them before the pool detects the exit.
                if error.with_template and lost_templates < _RETRIES_AFTER_TEMPLATE_EXIT:
                    lost_templates += 1
                    continue
                crashes += 1
                if crashes > _RETRIES_AFTER_CRASH:
                    return verifier_error(f"{name}: the verifier's process ended twice; the last time: {error}")
            except DataError as error:
                return verifier_error(f"{name}: the verifier's process sent an invalid outcome: {error}")
