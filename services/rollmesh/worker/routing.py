"""Which generator takes the next call: a choice over the registered generators, without I/O."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.types import GeneratorRecord

AFFINITY_SLACK = 0.125
"""How much fuller, as a share of its slots, a generator may be and still be preferred for the sake of its cache."""

_FEW_ENTRIES = 64

_Entry = tuple[float, float, str]
"""Own calls per slot, reported calls per slot, instance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a call needs of its generator."""

    min_version: int = 0
    """Oldest policy version that may serve the call: not older than the newest segment."""
    pinned_version: int | None = None
    """The one version that may serve it (evaluation)."""
    group_id: str = ""


def able(record: GeneratorRecord, need: Need) -> bool:
    """Whether a generator may serve the call at all."""
    if not record.serving or record.policy_version < need.min_version:
        return False
    return need.pinned_version is None or record.policy_version == need.pinned_version


def choose_keeper(records: Sequence[GeneratorRecord], version: int, current: str = "") -> GeneratorRecord | None:
    """The generator to hold back on one version: the current one while it is there, else one that serves the version
    already, else the least busy one; None without any that serves."""
    for record in records:
        if record.instance_id == current:
            return record

    def cost(record: GeneratorRecord) -> tuple[bool, float, str]:
        busy = (record.running_count + record.waiting_count) / max(1, record.slot_count)
        return record.policy_version != version, busy, record.instance_id

    return min((r for r in records if r.serving), key=cost, default=None)


class Candidates:
    """Registered generators with this worker's own calls on them, least loaded first.

    One heap for each policy version that is served. An entry is outdated once its generator has a newer one; it is
    dropped when it is met, or when outdated ones outnumber the others.
    """

    def __init__(self) -> None:
        self.records: dict[str, GeneratorRecord] = {}
        """Registered generators by instance."""
        self._calls: dict[str, int] = {}
        self._entries: dict[str, _Entry] = {}
        """The newest entry of each generator that serves."""
        self._heaps: dict[int, list[_Entry]] = {}
        self._pushed = 0

    def update(self, records: Mapping[str, GeneratorRecord]) -> None:
        """Take in the records of now; one that is the same object as before has not changed."""
        before, self.records = self.records, dict(records)
        for name in before.keys() - records.keys():
            self._entries.pop(name, None)
        for name, record in records.items():
            if before.get(name) is not record:
                self._push(name)

    def occupy(self, name: str) -> None:
        """Count a call of this worker."""
        self._calls[name] = self._calls.get(name, 0) + 1
        self._push(name)

    def leave(self, name: str) -> None:
        """The call is over."""
        self._calls[name] -= 1
        if not self._calls[name]:
            del self._calls[name]
        self._push(name)

    def free_slots(self, need: Need, avoided: Collection[str] = ()) -> int:
        """Slots for such a call that none of this worker's calls takes."""
        records = (self.records[name] for name in self._entries if name not in avoided)
        return sum(max(0, r.slot_count - self._calls.get(r.instance_id, 0)) for r in records if able(r, need))

    def choose(
        self, need: Need, *, avoided: Collection[str] = (), preferred: str | None = None
    ) -> GeneratorRecord | None:
        """The generator for one call, or None while no one can take it.

        Least loaded first, by this worker's own calls per slot: they are exact, the counts in the records are as old as
        the last heartbeat and only break ties. ``preferred`` (where the group's prompt is already cached) wins while it
        has a free slot and is at most ``AFFINITY_SLACK`` fuller than the best one.
        """
        pinned = need.pinned_version
        versions = [v for v in self._heaps if v >= need.min_version and (pinned is None or v == pinned)]
        best = min((entry for v in versions if (entry := self._first(v, avoided)) is not None), default=None)
        if best is None:
            return None
        home = self._entries.get(preferred) if preferred is not None and preferred not in avoided else None
        if home is not None and home[0] < 1 and home[0] <= best[0] + AFFINITY_SLACK:
            record = self.records[home[2]]
            if able(record, need):
                return record
        return self.records[best[2]]

    def _first(self, version: int, avoided: Collection[str]) -> _Entry | None:
        heap, passed = self._heaps[version], list[_Entry]()
        while heap and (heap[0][2] in avoided or self._entries.get(heap[0][2]) is not heap[0]):
            entry = heapq.heappop(heap)
            if self._entries.get(entry[2]) is entry:
                passed.append(entry)
        best = heap[0] if heap else None
        for entry in passed:
            heapq.heappush(heap, entry)
        return best

    def _push(self, name: str) -> None:
        record = self.records.get(name)
        if record is None or not record.serving:
            self._entries.pop(name, None)
            return
        slots = max(1, record.slot_count)
        reported = (record.running_count + record.waiting_count) / slots
        entry = self._entries[name] = (self._calls.get(name, 0) / slots, reported, name)
        self._pushed += 1
        if self._pushed > 2 * len(self.records) + _FEW_ENTRIES:
            self._rebuild()
        else:
            heapq.heappush(self._heaps.setdefault(record.policy_version, []), entry)

    def _rebuild(self) -> None:
        self._heaps, self._pushed = {}, 0
        for name, entry in self._entries.items():
            self._heaps.setdefault(self.records[name].policy_version, []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)
