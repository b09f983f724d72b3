"""Places in the queues of pending and of partial trajectories: admission order, or ranks within blocks of groups."""

from __future__ import annotations

import math

from rollmesh.mesh import ResumeOrder, RunLimits
from rollmesh.sim.queue_model.model_records import ORDERS_PER_GROUP, ModelGroup, ModelMember

_LAST_RANK = 127
_LN_2 = math.log(2)
_GROUPS_PER_BLOCK = 2048
"""Number of places for the groups of a block that have the same rank."""


def length_bucket(tokens: float) -> int:
    """Return the bucket of a length, floor(4 log2(tokens + 1))."""
    return math.floor(math.log(tokens + 1) / _LN_2 * 4)


def start_place(member: ModelMember, limits: RunLimits) -> int:
    """Return the place of a member without tokens: by the start rank of its group, else in admission order."""
    rank = member.group.start_rank
    return member.order if rank is None else _ranked_place(member, rank, limits)


def resume_place(member: ModelMember, limits: RunLimits) -> int:
    """Return the place of a partial trajectory, by the resume order of the run."""
    match limits.resume_order:
        case ResumeOrder.MOST_TOKENS:
            return _ranked_place(member, _LAST_RANK - _rank_of_length(member.tokens), limits)
        case ResumeOrder.NEAREST_END:
            return _ranked_place(member, _rank_by_end(member.group, member.tokens), limits)
        case ResumeOrder.ADMISSION:
            return member.order


def _ranked_place(member: ModelMember, rank: int, limits: RunLimits) -> int:
    block, position = divmod(member.group.index - 1, limits.groups_per_batch)
    group_place = (block * (_LAST_RANK + 1) + rank) * _GROUPS_PER_BLOCK + position
    return group_place * ORDERS_PER_GROUP + member.number


def _rank_of_length(tokens: float) -> int:
    return min(_LAST_RANK - 1, length_bucket(max(0, tokens)))


def _rank_by_end(group: ModelGroup, tokens: int) -> int:
    """Return the rank by the tokens to the mean length of the scored siblings; last without one, and past it."""
    left = group.scored_tokens / group.scored - tokens if group.scored else 0
    return _rank_of_length(left) if left > 0 else _LAST_RANK
