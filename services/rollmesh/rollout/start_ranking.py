"""Start order of new groups from the prompt history, and the measured power of history and siblings to predict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollmesh.rollout.mesh_metrics import MeshMetrics
from rollmesh.scheduling import Schedule, StartOrder
from rollmesh.scheduling.length_prediction import LengthEvidence, start_rank, weigh
from rollmesh.store import NewGroup, TrajectoryStore


class StartRanking:
    """Ranks of groups before their admission; the evidence is read from the queue, so every leader finds the same."""

    def __init__(self, store: TrajectoryStore, schedule: Schedule, metrics: MeshMetrics) -> None:
        self._records = store.prompt_records
        self._measures = schedule.predicts_lengths
        self._ranks = schedule.start_order is StartOrder.LONGEST_EXPECTED
        self._metrics = metrics
        self._evidence = LengthEvidence()

    async def measure(self) -> None:
        """Measure again how well the history and the siblings predict lengths, and set their metrics."""
        if self._measures:
            self._evidence = weigh(await self._records.predictions())
            self._metrics.predicted(self._evidence, await self._records.size())

    async def ranked(self, groups: Sequence[NewGroup]) -> list[NewGroup]:
        """Return the groups with expected length and start rank; unchanged in admission order."""
        if not self._ranks:
            return list(groups)
        names = [group.record_name or group.prompt.prompt_id for group in groups]
        records = await self._records.read(names)
        return [
            self._rank(group, records[name].mean_tokens if name in records else None)
            for group, name in zip(groups, names, strict=True)
        ]

    def _rank(self, group: NewGroup, expected: float | None) -> NewGroup:
        return replace(group, expected_tokens=expected, start_rank=start_rank(expected, self._evidence))
