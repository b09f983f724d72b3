"""From an encoded answer to a typed outcome: the right place to run, and what its failures mean."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rollmesh.errors import DataError
from rollmesh.reward.connection import WorkerDied, WorkerTimedOut
from rollmesh.reward.judges import Judge
from rollmesh.reward.metrics import RewardMetrics
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.reward.pool import WorkerPool
from rollmesh.types import RewardOutcome
from rollmesh.wire.reward_messages import outcome_from_bytes

_TRIES_AFTER_DEATH = 1
_UNKNOWN = "unknown"


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
    ) -> None:
        self._pool = pool
        self._judges = judges
        self._metrics = metrics
        self._default = default_verifier
        self._timeout_seconds = timeout_seconds

    async def score(self, verifier: str, payload: bytes) -> RewardOutcome:
        """Score one encoded item whose prompt names ``verifier`` (empty: the run's); never raises for an answer."""
        name = verifier or self._default
        start = time.monotonic()
        self._metrics.running.inc()
        try:
            judge = self._judges.get(name)
            outcome = await (judge.score(payload) if judge is not None else self._in_pool(name, payload))
        finally:
            self._metrics.running.dec()
        known = name in self._judges or name in self._pool.timeout_means_wrong
        self._metrics.scored(name if known else _UNKNOWN, outcome, time.monotonic() - start)
        return outcome

    async def _in_pool(self, name: str, payload: bytes) -> RewardOutcome:
        for tries_left in range(_TRIES_AFTER_DEATH, -1, -1):
            try:
                return outcome_from_bytes(await self._pool.run(payload, self._timeout_seconds))
            except WorkerTimedOut as error:
                return timed_out(f"{name}: {error}", self._pool.timeout_means_wrong.get(name, False))
            except WorkerDied as error:
                # Whoever killed the worker, the answer gets one more chance; a second death is the answer's own.
                if tries_left == 0:
                    return verifier_error(f"{name}: the verifier's process ended twice; the last time: {error}")
            except DataError as error:
                return verifier_error(f"{name}: the verifier's process answered garbage: {error}")
        raise AssertionError("unreachable: the last try returns")
