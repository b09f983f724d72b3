"""Evaluations that the leader asks for while the run goes on: one for every k-th policy version."""

from __future__ import annotations

from rollmesh.config.services import EvalConfig
from rollmesh.errors import Conflict
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.store.evaluation_requests import asked_by_others_up_to, due_versions, evaluation_request


class PeriodicEvaluations:
    """Requests for versions k, 2k, ...; each of them once, whoever leads: the queue knows what was asked for."""

    def __init__(self, store: TrajectoryStore, config: EvalConfig, keep_last: int) -> None:
        self._store = store
        self._config = config
        self._keep_last = keep_last
        self._asked: int | None = None
        self._log = get_logger("leader")

    async def look(self, policy_version: int) -> None:
        """Ask for what has become due by ``policy_version``, the newest."""
        every = self._config.every_versions
        if every == 0 or policy_version == self._asked:
            return
        after = await self._asked_before(policy_version) if self._asked is None else self._asked
        for version in due_versions(every, after, policy_version):
            try:
                await self._store.request_evaluation(evaluation_request(self._config, version))
            except Conflict as error:
                self._log.warning("evaluation_not_requested", policy_version=version, message=str(error))
        self._asked = policy_version

    def forget(self) -> None:
        """Another replica may have led meanwhile."""
        self._asked = None

    async def _asked_before(self, newest: int) -> int:
        """Where an earlier leader stopped."""
        every = self._config.every_versions
        known = [record.request.policy_version for record in await self._store.evaluations()]
        least = asked_by_others_up_to(every, newest, self._keep_last)
        return max(least, *(version for version in known if version % every == 0), 0)
