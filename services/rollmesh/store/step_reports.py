"""Newest step reports of the trainer, for services without access to its run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.store.redis_connection import Connection
from rollmesh.store.trajectories import slices

KEPT_REPORTS = 2_000
"""Number of step reports that are kept, the newest ones."""
_REPORTS_PER_CALL = 500


class StepReports:
    """Step reports by train step: JSON objects with at least a ``train_step``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._key = connection.keys.single("reports")

    async def write(self, trainer_session: str, after: int, records: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replace every report above train step ``after`` by ``records``, which are ascending and all above it.

        Repeats are no-ops. A step that is trained again replaces its report and all later ones. Raises SessionLost when
        a newer trainer session is open.
        """
        for part in slices(records, _REPORTS_PER_CALL) or [()]:
            words: list[str | int] = []
            for record in part:
                words += [int(record["train_step"]), json.dumps(record, separators=(",", ":"), allow_nan=False)]
            await self._connection.run("report_steps", trainer_session, after, KEPT_REPORTS, *words)
            after = int(part[-1]["train_step"]) if part else after

    async def read(self, first_step: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` reports from ``first_step`` on, ascending."""
        members = await self._connection.command("ZRANGE", self._key, first_step, "+inf", "BYSCORE", "LIMIT", 0, limit)
        return [json.loads(member) for member in members]
