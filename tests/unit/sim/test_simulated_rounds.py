"""Planners and group shapers in a simulated mesh: its leader takes the path of the real one, with all invariants on."""

from dataclasses import dataclass, replace

import pytest

from rollmesh.curriculum.planners import Round
from rollmesh.curriculum.round_rules import RoundRules
from rollmesh.curriculum.shapers import Closing
from rollmesh.sim.invariants import InvariantBroken, Invariants
from rollmesh.sim.queue_model import QueueModel, Save

from .meshes import assert_conserved, mesh_settings, run

FAILURES = ("deaths_per_hour=200", "back_seconds=3", "trainer_crashes_per_hour=200", "leader_gaps_per_hour=200")


@dataclass(frozen=True)
class UntilSolved:
    """Rounds of two until an answer is right; each launches one more than it needs."""

    def first(self, seen, group_size):
        return Round(needed=2, launched=3)

    def next(self, group):
        scored = len(group.members)
        if any(member.outcome > 0 for member in group.members):
            return None
        return Round(needed=scored + 2, launched=3)


def half(group, records):
    """Keep half of every answer."""
    return Closing(
        shaped_rewards=tuple(m.shaped_reward - m.member_index / 8 for m in group.members),
        kept_tokens=tuple(-(-m.token_count // 2) for m in group.members),
    )


def planned(preset="copris", **options):
    settings = mesh_settings(preset, **options)
    rules = RoundRules(
        planner=UntilSolved(),
        shaper=half,
        planner_name="tests:until_solved",
        group_size=settings.schedule.group_size,
        spare_members=0,
        most_members=12,
    )
    limits = replace(settings.limits, has_rounds=True, keeps_history=True, most_members=12)
    return replace(settings, rounds=rules, limits=limits)


@pytest.mark.parametrize("preset", ["copris", "sync", "copris_paper", "pipeline"])
def test_groups_of_several_rounds_are_trained_and_conserve_work(preset):
    mesh, result = run(planned(preset, failures=FAILURES))
    assert [update.train_step for update in result.updates] == [1, 2, 3, 4, 5, 6]
    assert mesh.queue.totals["groups_extended_total"] > 0
    assert {"surplus", "shortened"} <= result.wasted_tokens.keys()
    assert_conserved(mesh, result)


def test_groups_that_begin_again_conserve_work_with_rounds():
    mesh, result = run(planned("sorted", harvest="group", group_size=4, groups_per_batch=4))
    assert len(result.updates) == 6
    assert mesh.queue.totals["groups_restarted_total"] > 0
    assert_conserved(mesh, result)


def test_the_bound_on_members_holds_for_a_planner_that_never_closes():
    launched = []

    class Endless(UntilSolved):
        def next(self, group):
            launched.append(group.launched)
            return Round(needed=len(group.members) + 3, launched=3)

    settings = planned()
    _, result = run(replace(settings, rounds=replace(settings.rounds, planner=Endless())))
    assert len(result.updates) == 6
    assert max(launched) == 12


def test_an_undecided_group_with_an_unfinished_member_is_found():
    settings = planned()
    queue = QueueModel(settings.limits)
    queue.announce(0)
    queue.set_desired(replace(queue.desired, pool_size=4))
    queue.open_session("worker")
    group = queue.admit("e0-0", 2, plan="{}")
    for member in queue.lease("worker", 2):
        queue.finish("worker", member.trajectory_id, Save(5, 0))
        queue.score("worker", member.trajectory_id, float(member.number))
    Invariants(settings.schedule, queue).whole_queue()
    queue.add_member(group)
    with pytest.raises(InvariantBroken, match=r"undecided group e0-0: open, unfinished members \['e0-0.2'\]"):
        Invariants(settings.schedule, queue).whole_queue()
