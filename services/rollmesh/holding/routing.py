"""Which generator takes the next call: pure choice over the registered generators."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from rollmesh.types import GeneratorRecord

AFFINITY_SLACK = 0.125
"""How much fuller, as a share of its slots, a generator may be and still be preferred for the sake of its cache."""


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


def choose_generator(
    records: Sequence[GeneratorRecord],
    in_flight: Mapping[str, int],
    need: Need,
    *,
    avoided: Collection[str] = (),
    preferred: str | None = None,
) -> GeneratorRecord | None:
    """The generator for one call, or None while no one can take it.

    Least loaded first, by this worker's own calls per slot: they are exact, the counts in the records are as old as
    the last heartbeat and only break ties. ``preferred`` (where the group's prompt is already cached) wins while it
    has a free slot and is at most ``AFFINITY_SLACK`` fuller than the best one.
    """
    candidates = [r for r in records if r.instance_id not in avoided and able(r, need)]
    if not candidates:
        return None

    def fill(record: GeneratorRecord) -> float:
        return in_flight.get(record.instance_id, 0) / max(1, record.slot_count)

    def cost(record: GeneratorRecord) -> tuple[float, float, str]:
        reported = (record.running_count + record.waiting_count) / max(1, record.slot_count)
        return fill(record), reported, record.instance_id

    best = min(candidates, key=cost)
    for record in candidates:
        if record.instance_id == preferred and fill(record) < 1 and fill(record) <= fill(best) + AFFINITY_SLACK:
            return record
    return best
