"""From an encoded answer to a typed outcome: the right place to run, and what its failures mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rollmesh.errors import ConfigError, DataError
from rollmesh.reward.judges import Judge
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.reward.pool.worker_connection import WorkerDied, WorkerTimedOut
from rollmesh.reward.pool.worker_pool import WorkerPool
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.runtime.logging import get_logger
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import outcome_from_bytes

_TRIES_AFTER_DEATH = 1
_TRIES_AFTER_TEMPLATE = 3
"""More tries for answers whose workers ended with their template, and the next one maybe with the same one."""
_UNKNOWN = "unknown"
_MOST_COMPLAINTS = 20
_MOST_CHARACTERS = 500
"""Of a verifier's name and of a message in a log line: callers choose both."""
HOPELESS_ANSWERS = 256
"""Answers without a single value, from the start of the service, that end it."""


class Scoring:
    """Scores answers one by one, any number at once."""

    def __init__(
        self,
        pool: WorkerPool,
        judges: Mapping[str, Judge],
        metrics: RewardMetrics,
        *,
        default_verifier: str,
        timeout_seconds: float,
        on_hopeless: Callable[[ConfigError], None],
    ) -> None:
        """``on_hopeless`` hears once that the first ``HOPELESS_ANSWERS`` answers got no value, one like the other."""
        self._pool = pool
        self._judges = judges
        self._metrics = metrics
        self._default = default_verifier
        self._timeout_seconds = timeout_seconds
        self._on_hopeless = on_hopeless
        self._said: set[str] = set()
        self._failures: int | None = 0
        """Answers without a value so far; None once one was scored."""

    async def score(self, verifier: str, payload: bytes) -> RewardOutcome:
        """Score one encoded item whose prompt names ``verifier`` (empty: the run's); never raises for an answer."""
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
        self._complain(name, outcome)
        self._judge_the_verifier(name, outcome)
        return outcome

    def _complain(self, name: str, outcome: RewardOutcome) -> None:
        """Log the first few different reasons for which answers got no value; the metrics count all of them."""
        message = outcome.message[:_MOST_CHARACTERS]
        if outcome.kind is OutcomeKind.SCORED or message in self._said or len(self._said) >= _MOST_COMPLAINTS:
            return
        self._said.add(message)
        get_logger("reward").warning(
            "answer_without_value", verifier=name[:_MOST_CHARACTERS], outcome=outcome.kind.value, message=message
        )

    def _judge_the_verifier(self, name: str, outcome: RewardOutcome) -> None:
        """A verifier that has never scored an answer would use up the prompts of the run without training a step."""
        if self._failures is None:
            return
        if outcome.kind is OutcomeKind.SCORED:
            self._failures = None
            return
        self._failures += 1
        if self._failures == HOPELESS_ANSWERS:
            self._on_hopeless(
                ConfigError(
                    f"reward.verifier: none of the first {HOPELESS_ANSWERS} answers could be scored; the last: "
                    f"{outcome.message or name}"
                )
            )

    async def _in_pool(self, name: str, payload: bytes) -> RewardOutcome:
        deaths = lost_templates = 0
        while True:
            try:
                return outcome_from_bytes(await self._pool.run(payload, self._timeout_seconds))
            except WorkerTimedOut as error:
                return timed_out(f"{name}: {error}", self._pool.timeout_means_wrong.get(name, False))
            except WorkerDied as error:
                # Whoever killed the worker, the answer gets one more chance; a second death is the answer's own. That
                # of a template ends all workers, of which the answer may meet two before the pool has heard of it.
                if error.with_template and lost_templates < _TRIES_AFTER_TEMPLATE:
                    lost_templates += 1
                    continue
                deaths += 1
                if deaths > _TRIES_AFTER_DEATH:
                    return verifier_error(f"{name}: the verifier's process ended twice; the last time: {error}")
            except DataError as error:
                return verifier_error(f"{name}: the verifier's process answered garbage: {error}")
