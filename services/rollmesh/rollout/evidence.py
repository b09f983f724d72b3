"""Evidence of the leader that the view of the queue does not have: generator load, finished lengths, prompt history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollmesh.mesh import EngineLoad, MeshView
from rollmesh.rollout.rollout_metrics import MeshMetrics
from rollmesh.scheduling import Schedule, StartOrder
from rollmesh.scheduling.auto_pool import mean_cached_tokens
from rollmesh.scheduling.length_prediction import LengthEvidence, start_rank, weigh
from rollmesh.store import NewGroup, StoreCounts, TrajectoryStore
from rollmesh.types import GeneratorRecord


class PoolEvidence:
    """The newest evidence, read now and then; a fixed pool needs none."""

    def __init__(self, store: TrajectoryStore, schedule: Schedule) -> None:
        self._store = store
        self._is_needed = schedule.auto_pool
        self._engines: EngineLoad | None = None
        self._mean_cached_tokens: float | None = None

    async def measure(self, counts: StoreCounts) -> None:
        """Read the load of the generators, and take the finished lengths from ``counts``."""
        if self._is_needed:
            self._engines = engine_load(await self._store.generators.live())
            self._mean_cached_tokens = mean_cached_tokens(counts.finished_lengths)

    def forget(self) -> None:
        """Drop the evidence of an earlier lead: its counters are older than the stored bound."""
        self._engines = self._mean_cached_tokens = None

    def added_to(self, view: MeshView) -> MeshView:
        """Return the view with the evidence."""
        if not self._is_needed:
            return view
        return replace(view, engines=self._engines, mean_cached_tokens=self._mean_cached_tokens)


def engine_load(records: Sequence[GeneratorRecord]) -> EngineLoad | None:
    """Return the sums over the generators that serve or load a policy; None without one.

    A generator that drains before it loads soon serves again, so it still counts. Preemptions are summed over all
    generators: one that is out of service for a moment must not look like new preemptions when it returns.
    """
    able = [record for record in records if record.serving or record.loading_version is not None]
    if not able:
        return None
    return EngineLoad(
        slots=sum(record.slot_count for record in able),
        waiting=sum(record.waiting_count for record in able),
        kv_token_capacity=sum(record.kv_token_capacity for record in able),
        preemptions=sum(record.preemption_total for record in records),
    )


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
