"""Order in which a leader applies its decisions: the same in the mesh, in the simulator and in the property tests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.mesh import Decisions, Desired, WasteReason


@dataclass(frozen=True, slots=True)
class SetDesired:
    """Write the desired state, with the name of the groups that block the cut."""

    desired: Desired
    blocked_by: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop groups."""

    group_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """Take the tokens of groups, which open again at once or wait aside for a recall."""

    group_ids: tuple[str, ...]
    reason: WasteReason
    """RESTARTED, or SET_ASIDE for groups that wait."""


@dataclass(frozen=True, slots=True)
class CutBatch:
    """Fix the batch of the next train step."""

    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Open the oldest groups that are aside, until ``count`` were recalled for the next batch."""

    count: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Open new groups."""

    count: int


LeaderStep = SetDesired | Evict | BeginAgain | CutBatch | Recall | Admit


def leader_steps(decisions: Decisions) -> Iterator[LeaderStep]:
    """Yield the steps in order; a leader that dies has made the first few of them, and the next one decides again.

    The desired state is first: groups must never be leased under a version floor older than their admission.
    """
    yield SetDesired(decisions.desired, decisions.blocked_by)
    for reason in dict.fromkeys(eviction.reason for eviction in decisions.evict):
        yield Evict(tuple(each.group_id for each in decisions.evict if each.reason == reason), reason)
    if decisions.restart:
        yield BeginAgain(decisions.restart, WasteReason.RESTARTED)
    if decisions.set_aside:
        yield BeginAgain(decisions.set_aside, WasteReason.SET_ASIDE)
    if decisions.cut is not None:
        yield CutBatch(decisions.cut)
    if decisions.recall:
        yield Recall(decisions.recall)
    if decisions.admit_groups:
        yield Admit(decisions.admit_groups)
