"""Memory of trajectories in the store, and the number of further groups that fit."""

from __future__ import annotations

import math

from rollmesh.mesh import MeshView
from rollmesh.scheduling.resolved_schedule import Schedule

BYTES_PER_TOKEN = 8
"""Size of an int32 id and a float32 logprob."""
LIMIT_RATIO = 0.8
"""Share of Redis's maxmemory above which admission stops."""
_BYTES_PER_SAVE = 90
_BYTES_PER_TRAJECTORY = 1500
"""Keys, hashes and list overhead in Redis, measured."""


def trajectory_bytes(tokens: float, save_tokens: int) -> float:
    """Return the bytes in Redis of a trajectory saved ``save_tokens`` tokens at a time, without its prompt."""
    return tokens * (BYTES_PER_TOKEN + _BYTES_PER_SAVE / save_tokens) + _BYTES_PER_TRAJECTORY


def memory_room(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups that fit below the limit, with all that they and unfinished trajectories may write.

    The used memory includes the prompts of admitted groups, dead letters and current snapshots. A new group counts with
    the mean prompt, a trajectory with the mean bytes of finished ones, snapshots included.

    This mean includes one batch at full length: the lengths are unknown before any trajectory finishes, and the first
    to finish are short. The groups that the next batch lacks are admitted in any case: without them no step is trained
    and no memory is freed.

    Every open group has room for its later rounds. The view does not tell in which round a member is: one of a later
    round takes that room too, up to the members of the first rounds. So the room of a planner that seldom launches its
    most members is too small for as many groups as would fit; ``curriculum.most_members`` lowers the reservation.
    """
    if not view.max_memory_bytes:
        return schedule.window_groups
    doubted = schedule.groups_per_batch * schedule.launched_members
    saved_tokens = doubted * schedule.longest_trajectory_tokens + view.saved_bytes_total / BYTES_PER_TOKEN
    each = trajectory_bytes(saved_tokens / (doubted + view.finished_total), schedule.partial_save_tokens)
    first, later = schedule.launched_members, schedule.most_members - schedule.launched_members
    unwritten = max(view.unfinished, min(view.unfinished, view.open_groups * first) + view.open_groups * later)
    free = LIMIT_RATIO * view.max_memory_bytes - view.used_memory_bytes - unwritten * each
    lacking = schedule.groups_per_batch - view.open_groups - view.ready_groups
    return max(lacking, math.floor(free / (schedule.most_members * each + view.mean_prompt_bytes)))
