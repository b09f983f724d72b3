"""Admission of groups: room in the memory and in the window, and the oldest weights for new trajectories."""

import math

from rollmesh.mesh import MeshView, WaitReason
from rollmesh.scheduling.auto_pool import pool_groups, trainer_groups
from rollmesh.scheduling.axes import AdmissionRule
from rollmesh.scheduling.resolved_schedule import BYTES_PER_TOKEN, Schedule

LIMIT_RATIO = 0.8
"""Share of Redis's maxmemory above which admission stops."""
_BYTES_PER_SAVE = 90
_BYTES_PER_TRAJECTORY = 1500
"""Keys, hashes and list overhead in Redis, measured."""


def trajectory_bytes(tokens: float, schedule: Schedule) -> float:
    """Return the bytes in Redis of a scored trajectory, without its prompt."""
    saves = _BYTES_PER_SAVE / schedule.partial_save_tokens
    return tokens * (schedule.bytes_per_token + saves) + _BYTES_PER_TRAJECTORY


def memory_room(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups that fit below the limit, with all that they and trajectories in work may write.

    The used memory includes the prompts of admitted groups, dead letters and current snapshots. A new group counts with
    the mean prompt, a trajectory with the mean bytes of finished ones, snapshots and a teacher's scores included.

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
    saved_tokens = doubted * schedule.longest_trajectory_tokens + view.saved_bytes_total / schedule.bytes_per_token
    tokens = saved_tokens / (doubted + view.finished_total)
    each = trajectory_bytes(tokens, schedule)
    first, later = schedule.launched_members, schedule.most_members - schedule.launched_members
    unwritten = max(view.unfinished, min(view.unfinished, view.open_groups * first) + view.open_groups * later)
    unscored = view.finished * tokens * (schedule.bytes_per_token - BYTES_PER_TOKEN)
    free = LIMIT_RATIO * view.max_memory_bytes - view.used_memory_bytes - unwritten * each - unscored
    lacking = schedule.groups_per_batch - view.open_groups - view.ready_groups
    return max(lacking, math.floor(free / (schedule.most_members * each + view.mean_prompt_bytes)))


def capacity(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups that the window still admits, or the pace of the trainer; negative above it.

    window_groups - admitted_unconsumed, minus one batch for every trained step whose policy is not announced yet:
    groups admitted now would start on the older weights. With consumed = trained_step * B this is
    window_groups + v * B - (accepted + running) at the announced version v: AReaL's (eta + v + 1) * B - (accepted +
    running) for the window (eta + 1) * B, and PipelineRL's max_lag for B + ceil(max_lag / n). An automatic pool has a
    smaller window (``trainer_groups``), so its groups start on the policy that is announced while the trainer works.
    """
    # docs/architecture.md: The staleness bound
    unannounced = max(0, view.trained_step - view.policy_train_step)
    return trainer_groups(schedule, view) - view.admitted_unconsumed - unannounced * schedule.groups_per_batch


def still_needed(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups that the remaining train steps can use.

    The wave rule adds its spare groups, the pool rule the groups that keep a pool larger than a batch full until the
    end.
    """
    remaining = (schedule.train_steps - view.trained_step) * schedule.groups_per_batch - view.admitted_unconsumed
    if schedule.admission is AdmissionRule.POOL:
        return remaining + max(0, pool_groups(schedule, view) - schedule.groups_per_batch)
    return remaining + schedule.spare_groups


def room(schedule: Schedule, view: MeshView) -> int:
    """Return the number of groups for which the admission rule of the schedule leaves room.

    A wave is k = wave_batches batches: at cut step c the batches up to the next multiple of k are its rest, which for
    k = 1 is always one batch. Spare groups stay open beyond them. A long round is one batch without spare groups.

    The pool may have ceil(N'/n) + B groups of work ahead of the trainer. Ready groups and unfinished trajectories
    count, but not open groups: a group with only its last straggler left must not hide an empty pool. While fewer than
    B groups are ready, the pool stays full. Generators faster than the trainer are held back here, because waiting
    ready groups only become stale.
    """
    match schedule.admission:
        case AdmissionRule.WAVE:
            wanted = schedule.groups_per_batch
            if not view.recalled_groups:
                batches = schedule.wave_batches - view.cut_step % schedule.wave_batches
                wanted = batches * schedule.groups_per_batch + schedule.spare_groups
            return wanted - view.open_groups - view.ready_groups
        case AdmissionRule.CONCURRENCY:
            return pool_groups(schedule, view) - view.open_groups
        case AdmissionRule.POOL:
            ahead = view.ready_groups - (-view.unfinished // schedule.launched_members)
            return pool_groups(schedule, view) + schedule.groups_per_batch - ahead


def groups_to_admit(schedule: Schedule, view: MeshView, *, cuts: bool = False) -> tuple[int, str]:
    """Return the number of groups to open now, and the reason if it is 0; ``cuts`` if a batch is cut before.

    None opens while the next batch could not train the first tokens of a new group. With a window within the bound,
    ``capacity`` is at most 0 then.
    """
    if view.policy_version < 0:
        return 0, WaitReason.INITIAL_POLICY.format()
    if view.memory_ratio >= LIMIT_RATIO:
        return 0, WaitReason.MEMORY_USED.format(ratio=view.memory_ratio)
    is_paced = trainer_groups(schedule, view) < schedule.window_groups
    limits = (
        (capacity(schedule, view), WaitReason.TRAINER_PACE if is_paced else WaitReason.WINDOW),
        (still_needed(schedule, view), WaitReason.LAST_GROUPS),
        (room(schedule, view), WaitReason.POOL),
        (memory_room(schedule, view), WaitReason.MEMORY_PROMISED),
    )
    count, reason = min(limits)
    if count <= 0:
        return 0, reason.format()
    # docs/architecture.md: The staleness bound
    if view.cut_step + cuts - view.policy_train_step > schedule.max_staleness:
        return 0, WaitReason.NEWER_POLICY.format()
    return count, ""


def start_at_version(schedule: Schedule, view: MeshView, admitted: int) -> int:
    """Return the oldest policy version on which a trajectory without tokens may start.

    ``admitted`` more groups are about to open. Let c be the cut step and T the number of open and ready groups. In the
    worst case all T groups have tokens of train step u and are cut B at a time. The last ones are then in batch
    c + ceil(T/B), when the trainer is at c + ceil(T/B) - 1. They stay within the bound iff
    u >= c + ceil(T/B) - 1 - max_staleness. A cut lowers T by B and raises c by one, so the floor holds until more
    groups are admitted, and those use the new floor.
    """
    # docs/architecture.md: The staleness bound
    if view.policy_version < 0:
        return 0
    unclaimed = view.open_groups + view.ready_groups + admitted
    batches = -(-unclaimed // schedule.groups_per_batch)
    oldest_step = view.cut_step + batches - 1 - schedule.max_staleness
    steps_back = min(max(0, view.policy_train_step - oldest_step), view.policy_version)
    return view.policy_version - steps_back
