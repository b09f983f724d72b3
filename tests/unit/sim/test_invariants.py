"""The observer finds a broken promise: each check fails on a queue that breaks it."""

from dataclasses import replace

import pytest

from rollmesh.mesh import Desired
from rollmesh.sim.invariants import InvariantBroken, Invariants
from rollmesh.sim.queue_model import QueueModel, Save
from rollmesh.types import TrajectoryState

from .meshes import mesh_settings


@pytest.fixture
def observed():
    """A queue with three groups of two in a pool of six, and its observer."""
    settings = mesh_settings("copris", groups_per_batch=1, group_size=2, pool_size=6, max_staleness=2)
    queue = QueueModel(settings.limits)
    queue.set_desired(Desired(pool_size=6))
    for _ in range(3):
        queue.announce(len(queue.version_steps))
    queue.open_session("worker")
    for index in range(3):
        queue.admit(f"e0-{index}", 2)
    return settings.schedule, queue, Invariants(settings.schedule, queue)


def finish(queue, version):
    for member in queue.lease("worker", 2):
        queue.finish("worker", member.trajectory_id, Save(5, version))
        queue.score("worker", member.trajectory_id, float(member.number))


def test_a_correct_queue_passes(observed):
    _, queue, invariants = observed
    finish(queue, 2)
    invariants.before_cut(["e0-0"])
    invariants.whole_queue()
    invariants.after_lease()
    invariants.after_admission(0)


def test_more_leases_than_the_pool_are_found(observed):
    schedule, queue, _ = observed
    queue.lease("worker", 6)
    with pytest.raises(InvariantBroken, match=r"schedule.pool_size: leased trajectories: 6, above the bound of 5"):
        Invariants(replace(schedule, pool_size=5), queue).after_lease()


def test_more_leases_than_an_automatic_pool_has_now_are_found(observed):
    _, queue, invariants = observed
    queue.lease("worker", 6)
    queue.set_desired(Desired(pool_size=4))
    with pytest.raises(InvariantBroken, match=r"leased trajectories: 6, above the bound of 4"):
        invariants.after_lease()


def test_more_groups_than_the_window_are_found(observed):
    schedule, queue, _ = observed
    with pytest.raises(InvariantBroken, match=r"schedule.window_groups: groups in the queue: 3, above the bound of 2"):
        Invariants(replace(schedule, window_groups=2), queue).after_admission(1)


def test_a_stale_token_is_found_before_the_cut(observed):
    schedule, queue, _ = observed
    queue.cut_step = 2
    finish(queue, 1)
    with pytest.raises(InvariantBroken, match=r"staleness of group e0-0: 1, above the bound of 0"):
        Invariants(replace(schedule, max_staleness=0), queue).before_cut(["e0-0"])


def test_a_group_in_two_batches_is_found(observed):
    _, queue, invariants = observed
    finish(queue, 2)
    invariants.before_cut(["e0-0"])
    with pytest.raises(InvariantBroken, match="trained twice"):
        invariants.before_cut(["e0-0"])


def test_a_token_under_the_version_floor_is_found(observed):
    with pytest.raises(InvariantBroken, match="policy version 1 follows the version floor 2"):
        observed[2].sampled(1, 2)


def test_a_group_in_two_states_and_a_wrong_counter_are_found(observed):
    _, queue, invariants = observed
    queue.counts[TrajectoryState.LEASED] += 1
    with pytest.raises(InvariantBroken, match="members by state"):
        invariants.whole_queue()
    queue.ended["e0-1"] = "stale"
    with pytest.raises(InvariantBroken, match=r"groups in two states: \['e0-1'\]"):
        invariants.whole_queue()
