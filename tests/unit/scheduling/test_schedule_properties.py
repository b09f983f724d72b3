"""Random meshes: whatever the delays, crashes and leader changes, the promises of the scheduler hold."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from rollmesh.errors import ConfigError
from rollmesh.scheduling import AdmissionRule, OnStale
from rollmesh.scheduling.axes import Harvest
from rollmesh.scheduling.presets import PRESETS as PRESET_TABLE
from rollmesh.sim.invariants import Invariants
from rollmesh.sim.queue_model import GroupState

from .overtaking import Overtaking
from .views import schedule
from .virtual_mesh import VirtualMesh

PRESETS = tuple(PRESET_TABLE)
FIXED_STALENESS = [name for name, preset in PRESET_TABLE.items() if preset.fixed_staleness]
BEGIN_AGAIN = ("restart", "set_aside")


def staleness_of(preset, fate):
    """Staleness bounds of a preset with a fate: None for that of the preset, where no other is allowed."""
    if preset in FIXED_STALENESS:
        return st.none()
    return st.just(0) if fate == "set_aside" else st.integers(0, 5)


def is_legal(preset, fate):
    """Tell whether the configuration accepts a fate beside a preset."""
    staleness = 0 if fate == "set_aside" and preset not in FIXED_STALENESS else None
    spare = 0 if fate == "restart" else None
    waves = 1 if PRESET_TABLE[preset].admission is AdmissionRule.WAVE else None
    given = {"max_staleness": staleness, "spare_groups": spare, "wave_batches": waves, "part_groups": 0}
    try:
        schedule(preset, on_stale=fate, **given)
    except ConfigError:
        return False
    return True


FATES = [(preset, fate.value) for preset in PRESETS for fate in OnStale if is_legal(preset, fate)]
"""Every preset with every legal fate of the groups over the staleness bound."""


def pools(preset, most, auto):
    row, numbers = PRESET_TABLE[preset], st.integers(1, most)
    fixed = not auto or row.barrier or row.admission is AdmissionRule.WAVE
    return numbers if fixed else st.one_of(numbers, st.just("auto"))


@st.composite
def sizes(draw, preset, fate, batch, members, windows):
    """Draw the window, the wave and the spare groups and members of a schedule, and its staleness bound."""
    staleness = draw(staleness_of(preset, fate))
    bound = (PRESET_TABLE[preset].max_staleness if staleness is None else staleness) + 1
    window = draw(st.integers(batch, (1 if fate == "pace" else windows) * bound * batch))
    waves = spare = None
    if PRESET_TABLE[preset].admission is AdmissionRule.WAVE:
        waves = draw(st.integers(1, window // batch))
        spare = 0 if fate == "restart" else draw(st.integers(0, min(batch, window - waves * batch)))
    return {
        "max_staleness": staleness,
        "window_groups": window,
        "wave_batches": waves,
        "spare_groups": spare,
        "spare_members": draw(st.integers(0, 2)),
    }


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
    """Draw a mesh; except under pace, its window has up to ``windows`` times the groups that the bound can train."""
    preset, fate = draw(st.sampled_from([row for row in FATES if row[0] in presets and row[1] in on_stale]))
    batch, size = draw(st.integers(1, 6)), draw(st.integers(least_size, 4))
    members = 1 if PRESET_TABLE[preset].harvest is Harvest.TRAJECTORY else size
    batch = batch + 1 if members == 1 else batch
    drawn = draw(sizes(preset, fate, batch, members, windows))
    most = drawn["window_groups"] * (members + drawn["spare_members"])
    resolved = schedule(
        preset,
        draw(st.integers(*train_steps)),
        groups_per_batch=batch,
        group_size=size,
        part_groups=0,
        pool_size=most if whole_pool else draw(pools(preset, most, auto)),
        resume_order=draw(st.sampled_from(("admission", "most_tokens", "nearest_end"))),
        on_stale=fate,
        straggler_timeout_seconds=straggler_timeout,
        max_filtered_in_a_row=10_000,
        **drawn,
    )
    rests = (1, 3) if PRESET_TABLE[preset].segments else (0, 0, 1, 3)
    return VirtualMesh(
        schedule=replace(resolved, segment_tokens=draw(st.sampled_from(rests))),
        rng=random.Random(draw(st.integers(0, 2**32))),
        generators=draw(st.integers(1, 3)),
        mean_length=draw(st.sampled_from((1.0, 4.0, 12.0))),
        train_ticks=draw(st.integers(0, 12)),
        publish_ticks=draw(st.integers(0, 12)),
        reload_chance=draw(st.sampled_from((0.05, 0.3, 1.0))),
        crash_chance=draw(st.sampled_from((0.2, 0.05))) if crashes else 0.0,
        filter_chance=draw(st.sampled_from((0.0, 0.3))),
        leader_crash_chance=draw(st.sampled_from((0.2, 0.05))) if crashes else 0.0,
        cache_tokens=draw(st.sampled_from((1, 20, 1000))),
    )


def ticks_enough(mesh):
    return (400 + 3000 * mesh.schedule.train_steps) * (2 if mesh.crash_chance else 1)


def test_every_preset_is_run_with_its_own_fate_at_least():
    assert {(name, preset.on_stale.value) for name, preset in PRESET_TABLE.items()} <= set(FATES)


@pytest.mark.parametrize(("preset", "fate"), FATES)
def test_every_group_of_a_run_ends_in_a_batch_or_by_the_fate_of_its_schedule(preset, fate):
    """Whatever dies, pool, window and staleness stay within their bounds, and no group waits without end."""
    deaths, fates = Counter(), Counter()
    is_own = PRESET_TABLE[preset].on_stale == fate
    loses_tokens = fate in ("evict", *BEGIN_AGAIN)

    @seed(f"{preset} {fate}")
    @settings(max_examples=25 if is_own and loses_tokens else 5)
    @given(meshes(presets=(preset,), on_stale=(fate,), windows=3))
    def hold(mesh):
        mesh.run(ticks_enough(mesh))
        assert_every_group_has_ended(mesh)
        deaths.update(mesh.deaths)
        fates.update(mesh.evicted.values())
        fates.update({"restart": mesh.begun_again.total(), "set_aside": mesh.recalled})

    hold()
    assert deaths.keys() == {"worker", "generator", "leader"}
    happens = {"evict": fates["stale"], "restart": fates["restart"], "set_aside": fates["set_aside"]}
    assert not is_own or happens.get(fate, 1), "no group met the fate of its preset"


def assert_every_group_has_ended(mesh):
    rules, ends = mesh.schedule, Counter(mesh.queue.ended.values())
    assert ends.total() == mesh.queue.admitted
    assert ends["consumed"] == rules.train_steps * rules.groups_per_batch
    dropped = {"stale"} if rules.on_stale is OnStale.EVICT else set()
    assert ends.keys() <= {"consumed", "run_complete", "filtered_all_right"} | dropped
    trained = [gid for batch in mesh.batches for gid in batch]
    assert len(trained) == len(set(trained)) == ends["consumed"]
    assert mesh.surplus == 0 or rules.spare_members > 0
    assert not mesh.begun_again or rules.on_stale in BEGIN_AGAIN
    if rules.on_stale is OnStale.MASK_OLD_SEGMENTS:
        assert not any(decisions.blocked_by.startswith("due") for _, decisions in mesh.trace)
    else:
        assert max(mesh.staleness_seen) <= rules.max_staleness


@settings(max_examples=40, deadline=None)
@given(meshes(presets=("copris", "copris_paper", "areal"), straggler_timeout=2.0))
def test_a_short_straggler_timeout_drops_stragglers_and_nothing_else(mesh):
    mesh.run(ticks_enough(mesh))
    assert set(mesh.evicted.values()) <= {"run_complete", "straggler_timeout"}


@settings(max_examples=60, deadline=None)
@given(
    meshes(
        on_stale=tuple(OnStale),
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


def in_waves(mesh, on_stale, spare_groups, wave_batches=1):
    """Turn a mesh with a barrier into waves at staleness 0, each with spare groups that miss the cut."""
    window = wave_batches * mesh.schedule.groups_per_batch + spare_groups
    mesh.schedule = replace(
        mesh.schedule,
        admission=AdmissionRule.WAVE,
        wave_batches=wave_batches,
        spare_groups=spare_groups,
        window_groups=window,
        max_staleness=0,
        on_stale=OnStale(on_stale),
    )
    mesh.queue.limits = replace(mesh.queue.limits, max_staleness=0)
    mesh.invariants = Invariants(mesh.schedule, mesh.queue)
    mesh.overtaking = Overtaking(mesh.schedule, mesh.queue)
    return mesh


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
@given(meshes(on_stale=("set_aside",), least_size=2, whole_pool=True, crashes=False, windows=3))
def test_a_long_round_trains_all_groups_that_were_recalled_for_it(mesh):
    """The pool holds the whole wave: else groups that have not begun may overtake those that were recalled."""
    mesh.run(ticks_enough(mesh))
    assert mesh.missed == []


@pytest.mark.parametrize(("preset", "fate"), [("sorted", "restart"), ("rollpacker", "set_aside")])
def test_groups_that_miss_their_batch_begin_again_and_those_set_aside_fill_long_rounds(preset, fate):
    rules = schedule(preset, 12, groups_per_batch=3, group_size=2, on_stale=fate)
    mesh = VirtualMesh(schedule=rules, rng=random.Random(5))
    mesh.run(ticks_enough(mesh))
    assert mesh.begun_again.total() >= 5
    assert (mesh.recalled >= 3) == (fate == "set_aside"), mesh.recalled
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
