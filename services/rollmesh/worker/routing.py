"""Choice of the generator for the next call, over the registered generators, without I/O."""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum

from rollmesh.types import GeneratorRecord, VersionNeed

AFFINITY_SLACK = 0.125
"""Extra load, as a share of its slots, at which a generator is still preferred because of its cache."""

_FEW_ENTRIES = 64
_REMEMBERED = 65_536
_CACHE_LEVELS = 32
"""Steps in which a cache fills: a call that grows changes the order of the generators only now and then."""

_Entry = tuple[float, float, float, str]
"""Load by placement, own calls per slot, reported load by placement, instance id."""


class Placement(StrEnum):
    """Measure of a generator's load for the choice of the generator of a call."""

    CALLS = "calls"
    """Calls per slot."""
    TOKENS = "tokens"
    """Tokens of the calls' contexts per token of key-value cache, in steps of 1/32; within a step, calls per slot."""


def can_serve(record: GeneratorRecord, need: VersionNeed) -> bool:
    """Tell whether a generator may serve the call."""
    return record.serving and need.allows(record.policy_version)


def choose_pinned(records: Sequence[GeneratorRecord], version: int, current: str = "") -> GeneratorRecord | None:
    """Choose the generator to pin to one version.

    The order is: the current one while it is registered, one that already serves the version, the least busy one.
    Returns None if no generator serves.
    """
    for record in records:
        if record.instance_id == current:
            return record

    def cost(record: GeneratorRecord) -> tuple[bool, float, str]:
        busy = (record.running_count + record.waiting_count) / max(1, record.slot_count)
        return record.policy_version != version, busy, record.instance_id

    return min((r for r in records if r.serving), key=cost, default=None)


def refused_by_all(newest_version: int, generators: Sequence[GeneratorRecord]) -> GeneratorRecord | None:
    """Return the generator with the fewest refusals in a row if all refuse the newest version, else None."""
    if not generators or any(g.refused_version != newest_version for g in generators):
        return None
    return min(generators, key=lambda g: g.refused_count)


class Candidates:
    """Registered generators and this worker's own calls on them, ordered by load.

    There is one heap per served policy version. An entry is outdated once its generator has a newer entry. It is
    removed when it reaches the top of a heap, or when outdated entries outnumber the others.
    """

    def __init__(self, placement: Placement = Placement.CALLS) -> None:
        self.records: dict[str, GeneratorRecord] = {}
        """Registered generators by instance."""
        self._placement = placement
        self._calls: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        """Context tokens of this worker's calls."""
        self._entries: dict[str, _Entry] = {}
        """Newest entry of each serving generator."""
        self._heaps: dict[int, list[_Entry]] = {}
        self._pushed = 0
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Generator of the newest call of each trajectory and with each prompt; a plain dict would take ever longer to
        find its oldest one."""

    def update(self, records: Mapping[str, GeneratorRecord]) -> None:
        """Replace the records; a record that is the same object as before has not changed."""
        for name in self.records.keys() - records.keys():
            self.remove(name)
        for name, record in records.items():
            if self.records.get(name) is not record:
                self.put(record)

    def put(self, record: GeneratorRecord) -> None:
        """Add or replace one record."""
        self.records[record.instance_id] = record
        self._push(record.instance_id)

    def remove(self, name: str) -> None:
        """Remove the record of a generator that is no longer registered."""
        del self.records[name]
        self._entries.pop(name, None)

    def occupy(self, name: str, tokens: int = 0, cached: Sequence[str] = ()) -> None:
        """Count a call with ``tokens`` in its context; ``cached`` are ids of what its generator then has cached."""
        self._calls[name] = self._calls.get(name, 0) + 1
        self._tokens[name] = self._tokens.get(name, 0) + tokens
        self._push(name)
        for each in cached:
            self._homes[each] = name
            self._homes.move_to_end(each)
            if len(self._homes) > _REMEMBERED:
                self._homes.popitem(last=False)

    def grow(self, name: str, tokens: int) -> None:
        """Add sampled tokens to a call of this worker."""
        self._tokens[name] += tokens
        entry, record = self._entries.get(name), self.records.get(name)
        if self._placement is not Placement.TOKENS or entry is None or record is None:
            return
        if record.kv_token_capacity > 0 and entry[0] != self._token_load(record):
            self._push(name)

    def leave(self, name: str, tokens: int = 0) -> None:
        """Stop counting a call of this worker, whose context has ``tokens`` now."""
        self._calls[name] -= 1
        self._tokens[name] -= tokens
        if not self._calls[name]:
            del self._calls[name], self._tokens[name]
        self._push(name)

    def free_slots(self, need: VersionNeed, avoided: Collection[str] = ()) -> int:
        """Return the slots for a call with this need that no call of this worker takes."""
        records = (self.records[name] for name in self._entries if name not in avoided)
        return sum(max(0, r.slot_count - self._calls.get(r.instance_id, 0)) for r in records if can_serve(r, need))

    def choose(
        self, need: VersionNeed, *, avoided: Collection[str] = (), cached: Sequence[str] = ()
    ) -> GeneratorRecord | None:
        """Return the generator for one call, or None while no generator can take it.

        The least loaded generator wins, by this worker's own calls (``Placement``). These are exact; the counts in the
        records are as old as the last heartbeat and only break ties. The generator that has one of ``cached`` in its
        cache, the first of them if several do, wins while it has a free slot and its load exceeds the lowest by at most
        ``AFFINITY_SLACK``.
        """
        best: _Entry | None = None
        for version in filter(need.allows, self._heaps):
            first = self._first(version, avoided)
            if first is not None and (best is None or first < best):
                best = first
        if best is None:
            return None
        for preferred in filter(None, map(self._homes.get, cached)):
            home = self._entries.get(preferred) if preferred not in avoided else None
            if home is not None and max(home[:2]) < 1 and home[0] <= best[0] + AFFINITY_SLACK:
                record = self.records[home[-1]]
                if can_serve(record, need):
                    return record
        return self.records[best[-1]]

    def _first(self, version: int, avoided: Collection[str]) -> _Entry | None:
        heap = self._heaps[version]
        passed: list[_Entry] = []
        while heap and (heap[0][-1] in avoided or self._entries.get(heap[0][-1]) is not heap[0]):
            entry = heapq.heappop(heap)
            if self._entries.get(entry[-1]) is entry:
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
        calls = self._calls.get(name, 0) / max(1, record.slot_count)
        by_tokens = self._placement is Placement.TOKENS and record.kv_token_capacity > 0
        load = self._token_load(record) if by_tokens else calls
        entry = self._entries[name] = (load, calls, _reported(record, by_tokens=by_tokens), name)
        self._pushed += 1
        if self._pushed > 2 * len(self.records) + _FEW_ENTRIES:
            self._rebuild()
        else:
            heapq.heappush(self._heaps.setdefault(record.policy_version, []), entry)

    def _token_load(self, record: GeneratorRecord) -> float:
        tokens = self._tokens.get(record.instance_id, 0)
        return tokens * _CACHE_LEVELS // record.kv_token_capacity / _CACHE_LEVELS

    def _rebuild(self) -> None:
        self._heaps, self._pushed = {}, 0
        for name, entry in self._entries.items():
            self._heaps.setdefault(self.records[name].policy_version, []).append(entry)
        for heap in self._heaps.values():
            heapq.heapify(heap)


def _reported(record: GeneratorRecord, *, by_tokens: bool) -> float:
    if by_tokens:
        return record.kv_tokens_used / record.kv_token_capacity
    return (record.running_count + record.waiting_count) / max(1, record.slot_count)
