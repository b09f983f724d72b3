"""Scores of finished trajectories under the teachers of the run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping

import numpy as np

from rollmesh.config.teachers import TeacherConfig, teacher_of_domain
from rollmesh.errors import DataError, NoTeacherScores, TeacherUnavailable
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, retry
from rollmesh.types import TeacherColumn, Trajectory
from rollmesh.wire.teacher_client import TeacherClient
from rollmesh.worker.worker_metrics import WorkerMetrics

_BACKOFF = Backoff(first_seconds=0.2, longest_seconds=5.0)


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
            column = await retry(lambda: client.score(trajectory), TeacherUnavailable, _BACKOFF, self._wait)
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

    async def _wait(self, error: TeacherUnavailable, pause: float) -> None:
        self._log.warning("teacher_unavailable", message=str(error), pause_seconds=pause)
        await asyncio.sleep(pause)


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
