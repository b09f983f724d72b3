"""Requests for the evaluations of a run in progress, made by its leader."""

from __future__ import annotations

from rollmesh.config.rollout import EvalConfig
from rollmesh.errors import Conflict
from rollmesh.runtime.logging import get_logger
from rollmesh.store.evaluation_requests import Evaluations, due_versions, evaluation_floor, evaluation_request


class PeriodicEvaluations:
    """Requests for versions k, 2k, ..., each made once across all leaders: the queue stores the requests."""

    def __init__(self, evaluations: Evaluations, config: EvalConfig, keep_last: int) -> None:
        self._evaluations = evaluations
        self._config = config
        self._keep_last = keep_last
        self._requested: int | None = None
        self._log = get_logger("leader")

    async def request_due(self, policy_version: int) -> None:
        """Request the evaluations due up to ``policy_version``, the newest; -1 before the first is announced."""
        every = self._config.every_versions
        # An empty Redis has no version until the trainer announces all of them again: evaluations do not start at -1.
        if every == 0 or policy_version < 0 or policy_version == self._requested:
            return
        if self._requested is None:
            # The newest version up to which an earlier leader has made its requests.
            known = [record.request.policy_version for record in await self._evaluations.all()]
            least = evaluation_floor(every, policy_version, self._keep_last)
            self._requested = max([least, *(version for version in known if version % every == 0)])
        for version in due_versions(every, self._requested, policy_version):
            try:
                await self._evaluations.request(evaluation_request(self._config, version))
            except Conflict as error:
                self._log.warning("evaluation_not_requested", policy_version=version, message=str(error))
        self._requested = policy_version

    def forget(self) -> None:
        """Drop the cached position: another replica may have led since, or the store may have lost requests."""
        self._requested = None
