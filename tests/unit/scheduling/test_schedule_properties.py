"""Random meshes: whatever the delays, crashes and leader changes, the promises of the scheduler hold."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.scheduling import AdmissionRule, OnStale
from rollmesh.scheduling.axes import CutOrder, Harvest
from rollmesh.scheduling.presets import PRESETS as PRESET_TABLE
from rollmesh.scheduling.queue_model import GroupState
from rollmesh.sim.invariants import Invariants

from .views import schedule
from .virtual_mesh import VirtualMesh

PRESETS = tuple(PRESET_TABLE)
FIXED_STALENESS = [name for name, preset in PRESET_TABLE.items() if preset.fixed_staleness]


def pools(preset, most, auto):
    row, numbers = PRESET_TABLE[preset], st.integers(1, most)
    fixed = not auto or row.barrier or row.admission is AdmissionRule.WAVE
    return numbers if fixed else st.one_of(numbers, st.just("auto"))


def may_be(preset, fate):
    return fate != OnStale.MASK_OLD_SEGMENTS or PRESET_TABLE[preset].cut_order is not CutOrder.SHORTEST


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
    auto=True,
    windows=1,
):
    """Draw a mesh; its window has up to ``windows`` times the groups that the staleness bound lets it train."""
    preset = draw(st.sampled_from(presets))
    batch, size = draw(st.integers(1, 6)), draw(st.integers(least_size, 4))
    members = 1 if PRESET_TABLE[preset].harvest is Harvest.TRAJECTORY else size
    batch = batch + 1 if members == 1 else batch
    staleness = None if preset in FIXED_STALENESS else draw(st.integers(0, 5))
    bound = (PRESET_TABLE[preset].max_staleness if staleness is None else staleness) + 1
    window = draw(st.integers(batch, windows * bound * batch))
    waves = draw(st.integers(1, window // batch)) if PRESET_TABLE[preset].admission is AdmissionRule.WAVE else None
    spare = draw(st.integers(0, 2))
    resolved = schedule(
        preset,
        draw(st.integers(*train_steps)),
        groups_per_batch=batch,
        group_size=size,
        max_staleness=staleness,
        window_groups=window,
        wave_batches=waves,
        part_groups=0,
        spare_members=spare,
        pool_size=None if whole_pool else draw(pools(preset, window * (members + spare), auto)),
        on_stale=draw(st.sampled_from([fate for fate in on_stale if may_be(preset, fate)])),
        straggler_timeout_seconds=straggler_timeout,
        max_filtered_in_a_row=10_000,
    )
    return VirtualMesh(
        schedule=replace(resolved, segment_tokens=draw(st.sampled_from((0, 0, 1, 3)))),
        rng=random.Random(draw(st.integers(0, 2**32))),
        generators=draw(st.integers(1, 3)),
        mean_length=draw(st.sampled_from((1.0, 4.0, 12.0))),
        train_ticks=draw(st.integers(0, 12)),
        publish_ticks=draw(st.integers(0, 12)),
        reload_chance=draw(st.sampled_from((0.05, 0.3, 1.0))),
        crash_chance=draw(st.sampled_from((0.0, 0.2))) if crashes else 0.0,
        filter_chance=draw(st.sampled_from((0.0, 0.3))),
        leader_crash_chance=draw(st.sampled_from((0.0, 0.3))) if crashes else 0.0,
        cache_tokens=draw(st.sampled_from((1, 20, 1000))),
    )


def ticks_enough(mesh):
    return 400 + 3000 * mesh.schedule.train_steps


@settings(max_examples=150, deadline=None)
@given(meshes())
def test_every_run_ends_within_pool_staleness_and_backlog_and_pace_drops_nothing(mesh):
    mesh.run(ticks_enough(mesh))
    assert len(mesh.batches) == mesh.schedule.train_steps
    trained = [gid for batch in mesh.batches for gid in batch]
    assert len(trained) == len(set(trained))
    assert set(mesh.evicted.values()) <= {"run_complete"}
    assert max(mesh.staleness_seen) <= mesh.schedule.max_staleness
    assert mesh.surplus == 0 or mesh.schedule.spare_members > 0


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "areal", "roll", "one_step_off"), on_stale=("evict",), windows=3))
def test_evict_keeps_the_bound_by_dropping_and_says_why(mesh):
    mesh.run(ticks_enough(mesh))
    assert set(mesh.evicted.values()) <= {"run_complete", "stale"}


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "areal", "one_step_off"), on_stale=("mask_old_segments",), windows=3))
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


def in_waves(mesh, on_stale, spare_groups, wave_batches=1, whole_pool=False):
    """Turn a mesh with a barrier into waves at staleness 0, each with spare groups that miss the cut."""
    window = wave_batches * mesh.schedule.groups_per_batch + spare_groups
    mesh.schedule = replace(
        mesh.schedule,
        admission=AdmissionRule.WAVE,
        wave_batches=wave_batches,
        spare_groups=spare_groups,
        window_groups=window,
        pool_size=window * mesh.schedule.launched_members if whole_pool else mesh.schedule.pool_size,
        max_staleness=0,
        on_stale=OnStale(on_stale),
    )
    mesh.queue.limits = replace(mesh.queue.limits, max_staleness=0)
    mesh.invariants = Invariants(mesh.schedule, mesh.queue)
    return mesh


@settings(max_examples=60, deadline=None)
@given(
    meshes(presets=("copris_paper",), least_size=2, whole_pool=True),
    st.sampled_from(("restart", "set_aside")),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_in_waves_every_group_that_begins_again_ends_and_no_stale_token_is_trained(
    mesh, on_stale, spare_groups, wave_batches
):
    in_waves(mesh, on_stale, min(spare_groups, mesh.schedule.groups_per_batch), wave_batches).run(ticks_enough(mesh))
    ends = Counter(mesh.queue.ended.values())
    assert ends.total() == mesh.queue.admitted, "every admitted group has ended"
    assert ends.keys() <= {"consumed", "run_complete", "filtered_all_right"}
    assert ends["consumed"] == mesh.schedule.train_steps * mesh.schedule.groups_per_batch
    assert set(mesh.staleness_seen) == {0}


@settings(max_examples=60, deadline=None)
@given(
    meshes(presets=("copris_paper",), least_size=2, whole_pool=True),
    st.sampled_from(("restart", "set_aside")),
    st.integers(0, 3),
    st.integers(1, 4),
)
def test_groups_begin_again_at_most_as_often_as_the_estimate_says(mesh, on_stale, spare_groups, wave_batches):
    """Beyond it, what the last wave leaves: no batch of the run trains that."""
    spare = min(spare_groups, mesh.schedule.groups_per_batch) if on_stale == "set_aside" else 0
    rules = in_waves(mesh, on_stale, spare, wave_batches).schedule
    mesh.run(ticks_enough(mesh))
    waves = -(-rules.train_steps // wave_batches)
    trained, left = waves * wave_batches * rules.groups_per_batch, (wave_batches - 1) * rules.groups_per_batch + spare
    most = rules.most_begun_again * trained + (left if on_stale == "set_aside" else 0)
    assert mesh.begun_again.total() <= most + 1e-9


@pytest.mark.parametrize(
    ("preset", "overrides", "most"),
    [
        ("sorted", {}, (1 + 2 + 3) / 4),
        ("sorted", {"wave_batches": 1}, 0.0),
        (
            "april",
            {"on_stale": "restart", "max_staleness": 1, "wave_batches": 4, "window_groups": 8},
            (0 + 0 + 1 + 1) / 4,
        ),
        ("rollpacker", {"groups_per_batch": 8}, 2 / 10),
        ("copris", {}, 0.0),
    ],
)
def test_the_estimate_of_groups_that_begin_again_follows_from_the_waves(preset, overrides, most):
    assert schedule(preset, **overrides).most_begun_again == pytest.approx(most)


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris_paper",), least_size=2, crashes=False), st.integers(0, 3), st.integers(1, 4))
def test_a_long_round_trains_all_groups_that_were_recalled_for_it(mesh, spare_groups, wave_batches):
    """The pool holds the whole wave: else groups that have not begun may overtake those that were recalled."""
    in_waves(mesh, "set_aside", min(spare_groups, mesh.schedule.groups_per_batch), wave_batches, whole_pool=True)
    mesh.run(ticks_enough(mesh))
    assert mesh.missed == []


@pytest.mark.parametrize("on_stale", ["restart", "set_aside"])
def test_spare_groups_of_a_wave_begin_again_and_those_set_aside_fill_long_rounds(on_stale):
    rules = schedule("copris_paper", 12, groups_per_batch=3, group_size=2, max_staleness=0)
    mesh = in_waves(VirtualMesh(schedule=rules, rng=random.Random(5)), on_stale, 2)
    mesh.run(ticks_enough(mesh))
    assert mesh.begun_again.total() >= 10
    assert (mesh.recalled >= 3) == (on_stale == "set_aside"), mesh.recalled
    trained = {gid for batch in mesh.batches for gid in batch}
    assert trained & mesh.begun_again.keys()


class ArealStalenessManager:
    """AReaL's capacity rule, written from the formula: (eta + v + 1) * B - (accepted + running), and its pool."""

    def __init__(self, eta, batch, max_concurrent):
        self.eta, self.batch, self.max_concurrent = eta, batch, max_concurrent

    def capacity(self, version, accepted, running):
        return min(self.max_concurrent - running, (self.eta + version + 1) * self.batch - (accepted + running))


@settings(max_examples=30, deadline=None)
@given(meshes(presets=("areal",), crashes=False, train_steps=(12, 20), auto=False))
def test_areal_admits_exactly_what_the_staleness_managers_formula_admits(mesh):
    rules = mesh.schedule
    rules = mesh.schedule = replace(rules, window_groups=(rules.max_staleness + 1) * rules.groups_per_batch)
    mesh.invariants = Invariants(rules, mesh.queue)
    manager = ArealStalenessManager(rules.max_staleness, rules.groups_per_batch, rules.pool_groups)
    while mesh.queue.trained_step + rules.max_staleness + 2 < rules.train_steps:
        running = mesh.count(GroupState.OPEN)
        accepted = mesh.count(GroupState.READY, GroupState.CUT) + mesh.queue.trained_step * rules.groups_per_batch
        expected = max(0, manager.capacity(mesh.queue.version_steps[-1], accepted, running))
        assert mesh.tick().admit_groups == expected
    assert mesh.queue.trained_step >= 4


@settings(max_examples=30, deadline=None)
@given(meshes(presets=("pipeline", "roll"), crashes=False, train_steps=(12, 20), whole_pool=True))
def test_a_lag_in_groups_admits_exactly_what_the_counter_of_submitted_groups_admits(mesh):
    """PipelineRL: submitted < ceil(max_lag / attempts) + (v + 1) * B; ROLL: running + completed < ceil(alpha * B) +
    (v + 1) * B. Filtered groups are refunded, and the two formulas have the same lag: window_groups - B.
    """
    rules = mesh.schedule
    while mesh.queue.trained_step + rules.max_staleness + 2 < rules.train_steps:
        submitted = mesh.queue.admitted_unconsumed + mesh.queue.trained_step * rules.groups_per_batch
        most = rules.window_groups + mesh.queue.version_steps[-1] * rules.groups_per_batch
        assert mesh.tick().admit_groups == max(0, most - submitted)
    assert mesh.queue.trained_step >= 4


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_automatic_pool_trains_on_younger_tokens_than_a_fixed_one_and_the_trainer_waits_no_longer(seed):
    """An update takes 40 ticks; groups take about 12, and a few of them longer than an update."""
    ages, waits = zip(*(paced(pool, seed) for pool in ("auto", 24)), strict=True)
    assert ages[0] < 1.75 < 2.5 < ages[1]
    assert waits[0] < waits[1] + 0.01


def paced(pool, seed):
    """Run a mesh with that pool; returns the mean staleness, and the share of the time in which the trainer waits."""
    rules = schedule(train_steps=20, groups_per_batch=8, group_size=2, max_staleness=4, pool_size=pool)
    mesh = VirtualMesh(
        schedule=rules,
        rng=random.Random(seed),
        mean_length=3.0,
        reload_chance=1.0,
        publish_ticks=0,
        least_train_ticks=40,
        train_ticks=40,
    )
    mesh.run(ticks_enough(mesh))
    return sum(mesh.staleness_seen) / len(mesh.staleness_seen), 1 - rules.train_steps * 40 / mesh.queue.now
