"""Random meshes: whatever the delays, crashes and leader changes, the promises of the scheduler hold."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.config.schedule import ScheduleConfig
from rollmesh.scheduling import OnStale, resolve_schedule

from .virtual_mesh import VirtualMesh

PRESETS = ("sync", "one_step_off", "copris", "copris_paper", "areal")


@st.composite
def meshes(
    draw,
    presets=PRESETS,
    on_stale=("pace",),
    crashes=True,
    train_steps=(1, 8),
    straggler_timeout=1e6,
    least_size=1,
    whole_pool=False,
):
    preset = draw(st.sampled_from(presets))
    batch, size = draw(st.integers(1, 6)), draw(st.integers(least_size, 4))
    staleness = None
    if preset not in ("sync", "one_step_off"):
        staleness = draw(st.integers(0, 5))
    limit = (staleness + 1) * batch * size if staleness is not None else batch * size
    config = ScheduleConfig(
        preset=preset,
        groups_per_batch=batch,
        group_size=size,
        max_staleness=staleness,
        pool_size=None if whole_pool else draw(st.integers(1, limit)),
        on_stale=draw(st.sampled_from(on_stale)),
        straggler_timeout_seconds=straggler_timeout,
        max_filtered_in_a_row=10_000,
    )
    return VirtualMesh(
        schedule=resolve_schedule(config, train_steps=draw(st.integers(*train_steps))),
        rng=random.Random(draw(st.integers(0, 2**32))),
        generators=draw(st.integers(1, 3)),
        mean_length=draw(st.sampled_from((1.0, 4.0, 12.0))),
        train_ticks=draw(st.integers(0, 12)),
        publish_ticks=draw(st.integers(0, 12)),
        reload_chance=draw(st.sampled_from((0.05, 0.3, 1.0))),
        crash_chance=draw(st.sampled_from((0.0, 0.2))) if crashes else 0.0,
        filter_chance=draw(st.sampled_from((0.0, 0.3))),
        leader_crash_chance=draw(st.sampled_from((0.0, 0.3))) if crashes else 0.0,
    )


def ticks_enough(mesh):
    return 400 + 3000 * mesh.schedule.train_steps


@settings(max_examples=100, deadline=None)
@given(meshes())
def test_every_run_ends_within_pool_staleness_and_backlog_and_pace_drops_nothing(mesh):
    mesh.run(ticks_enough(mesh))
    assert len(mesh.batches) == mesh.schedule.train_steps
    trained = [gid for batch in mesh.batches for gid in batch]
    assert len(trained) == len(set(trained))
    assert set(mesh.evicted.values()) <= {"run_complete"}
    assert max(mesh.staleness_seen) <= mesh.schedule.max_staleness


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "areal"), on_stale=("evict",)))
def test_evict_keeps_the_bound_by_dropping_and_says_why(mesh):
    mesh.run(ticks_enough(mesh))
    assert set(mesh.evicted.values()) <= {"run_complete", "stale"}


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "areal"), on_stale=("mask_old_segments",)))
def test_masking_old_segments_neither_blocks_nor_drops(mesh):
    mesh.run(ticks_enough(mesh))
    assert set(mesh.evicted.values()) <= {"run_complete"}
    assert not any(decisions.blocked_by.startswith("due") for _, decisions in mesh.trace)


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "copris_paper", "areal"), straggler_timeout=2.0))
def test_a_short_straggler_timeout_drops_stragglers_and_nothing_else(mesh):
    mesh.run(ticks_enough(mesh))
    assert set(mesh.evicted.values()) <= {"run_complete", "straggler_timeout"}


@settings(max_examples=60, deadline=None)
@given(
    meshes(
        on_stale=("pace", "evict", "mask_old_segments"),
        straggler_timeout=30.0,
        crashes=False,
        least_size=2,
        whole_pool=True,
    ),
    st.integers(0, 12),
)
def test_one_stuck_rollout_halts_no_preset(mesh, stuck_group):
    mesh.stuck_group = stuck_group
    mesh.run(ticks_enough(mesh))
    assert len(mesh.batches) == mesh.schedule.train_steps
    allowed = {"run_complete", "straggler_timeout"} | ({"stale"} if mesh.schedule.on_stale is OnStale.EVICT else set())
    assert set(mesh.evicted.values()) <= allowed


class ArealStalenessManager:
    """AReaL's capacity rule, written from the formula: (eta + v + 1) * B - (accepted + running), and its pool."""

    def __init__(self, eta, batch, max_concurrent):
        self.eta, self.batch, self.max_concurrent = eta, batch, max_concurrent

    def capacity(self, version, accepted, running):
        return min(self.max_concurrent - running, (self.eta + version + 1) * self.batch - (accepted + running))


@settings(max_examples=30, deadline=None)
@given(meshes(presets=("areal",), crashes=False, train_steps=(12, 20)))
def test_areal_admits_exactly_what_the_staleness_managers_formula_admits(mesh):
    schedule = mesh.schedule
    manager = ArealStalenessManager(schedule.max_staleness, schedule.groups_per_batch, schedule.pool_groups)
    while mesh.trained_step + schedule.max_staleness + 2 < schedule.train_steps:
        running = len(mesh.in_state("open"))
        accepted = len(mesh.in_state("ready", "cut")) + mesh.trained_step * schedule.groups_per_batch
        expected = max(0, manager.capacity(mesh.versions[-1], accepted, running))
        assert mesh.tick().admit_groups == expected
    assert mesh.trained_step >= 4
