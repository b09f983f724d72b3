"""What trajectories take in the store, and how many more groups it has room for."""

from __future__ import annotations

import math

from rollmesh.mesh import MeshView
from rollmesh.scheduling.schedule import Schedule

BYTES_PER_TOKEN = 8
"""int32 id and float32 logprob."""
_BYTES_PER_SAVE = 90
_BYTES_PER_TRAJECTORY = 1500
"""Keys, hashes and list overhead in Redis, measured."""


def trajectory_bytes(tokens: float, save_tokens: int) -> float:
    """What a trajectory takes in Redis that got its tokens in partial saves of ``save_tokens``, prompt aside."""
    return tokens * (BYTES_PER_TOKEN + _BYTES_PER_SAVE / save_tokens) + _BYTES_PER_TRAJECTORY


def memory_room(schedule: Schedule, view: MeshView) -> int:
    """Groups that still fit below the limit with everything that they and the unfinished trajectories may write.

    The used memory has the prompts of admitted groups, dead letters and present snapshots. A new group is counted with
    the mean prompt, a trajectory with the bytes that finished ones took, their snapshots included.

    A trajectory is counted with the mean of those that have finished, one batch of them at full length taken in: before
    any has finished nobody knows how long they get, and the first to finish are the short ones. The groups that the
    next batch lacks are let in all the same: without them nothing is trained, and nothing leaves the store.
    """
    if not view.max_memory_bytes or not schedule.longest_trajectory_tokens:
        return schedule.capacity_groups
    doubted = schedule.groups_per_batch * schedule.group_size
    saved_tokens = doubted * schedule.longest_trajectory_tokens + view.saved_bytes_total / BYTES_PER_TOKEN
    each = trajectory_bytes(saved_tokens / (doubted + view.finished_total), schedule.partial_save_tokens)
    unfinished = view.pending + view.partial + view.leased
    free = schedule.memory_limit_ratio * view.max_memory_bytes - view.used_memory_bytes - unfinished * each
    lacking = schedule.groups_per_batch - view.open_groups - view.ready_groups
    return max(lacking, math.floor(free / (schedule.group_size * each + view.mean_prompt_bytes)))
